#include "output.hpp"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <poll.h>
#include <unistd.h>

namespace ringfence {

Output::Output(int fd) : fd_(fd) { buffer_.reserve(64 * 1024); }

Output& Output::number(double value, int precision) {
    if (!std::isfinite(value)) value = value > 0 ? 1e30 : -1e30;  // never "inf" or "nan" on the wire
    char digits[48];
    const auto end = std::to_chars(digits, digits + sizeof digits, value, std::chars_format::general, precision).ptr;
    buffer_.append(digits, size_t(end - digits));
    return *this;
}

void Output::flush() {
    size_t written = 0;
    while (written < buffer_.size()) {
        const ssize_t count = write(fd_, buffer_.data() + written, buffer_.size() - written);
        if (count > 0) {
            written += size_t(count);
        } else if (count < 0 && errno == EAGAIN) {
            pollfd ready{fd_, POLLOUT, 0};
            poll(&ready, 1, -1);
        } else if (!(count < 0 && errno == EINTR)) {
            _exit(0);
        }
    }
    buffer_.clear();
}

}  // namespace ringfence
