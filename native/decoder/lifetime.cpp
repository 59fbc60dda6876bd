#include "lifetime.hpp"

#include <csignal>
#include <poll.h>
#include <sys/prctl.h>
#include <thread>
#include <unistd.h>

namespace ringfence {

void bind_to_parent() {
    const pid_t parent = getppid();
    std::signal(SIGTERM, SIG_DFL);
    std::signal(SIGPIPE, SIG_IGN);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The parent may have died before the request took effect. (One that died before we ran has closed our input.)
    if (getppid() != parent) _exit(0);
}

void watch_stdin(int grace_ms) {
    std::thread([grace_ms] {
        pollfd input{STDIN_FILENO, 0, 0};  // no events asked for: only a hang-up wakes it
        while (poll(&input, 1, -1) <= 0) {
        }
        poll(nullptr, 0, grace_ms);
        _exit(0);
    }).detach();
}

}  // namespace ringfence
