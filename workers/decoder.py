"""The decoder process, owned by the one worker that holds its pipes.

The decoder leads its own process group inside the worker's session: the worker ends it with everything it started by one
signal to the group, and the server finds what may be left by the session. It is told to die with the worker
(PR_SET_PDEATHSIG), whatever it does with the end of file on its stdin.

Writes never block: a pipe of 1 MiB takes a prompt of 100,000 ids in one writev, and what does not fit waits in `_backlog`
until the pipe is writable again. The backlog is bounded by the slots' own size, since each turn is written once.
"""

import ctypes
import fcntl
import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence

from workers.settings import WorkerSettings

_PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 16  # from 128 KiB on malloc maps and unmaps pages for every read: 12 us a step in place of 1
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel for a signal when the thread that made this process ends (prctl(2), PR_SET_PDEATHSIG)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


class DecoderProcess:
    """A running decoder. Its descriptors are non-blocking; `fileno`s go into the worker's epoll."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin and process.stdout and process.stderr
        self._process = process
        self.pid = process.pid
        self.stdin_fd = process.stdin.fileno()
        self.stdout_fd = process.stdout.fileno()
        self.stderr_fd = process.stderr.fileno()
        self.pidfd = os.pidfd_open(process.pid)
        self._backlog: deque[bytes] = deque()
        for fd in (self.stdin_fd, self.stdout_fd, self.stderr_fd):
            os.set_blocking(fd, False)
        for fd in (self.stdin_fd, self.stdout_fd):
            _enlarge(fd)

    def __repr__(self) -> str:
        return f"DecoderProcess(pid={self.pid}, backlog={len(self._backlog)}, status={self._process.returncode})"

    @classmethod
    def spawn(cls, settings: WorkerSettings) -> "DecoderProcess":
        """Start the configured command. Raises OSError when it can't be run."""
        environment = {**os.environ, **dict(settings.environment)}
        cores = settings.cores

        def prepare() -> None:
            die_with_parent(signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            if cores:
                os.sched_setaffinity(0, cores)

        process = subprocess.Popen(
            settings.decoder_command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            bufsize=0,
            process_group=0,
            preexec_fn=prepare,
        )
        return cls(process)

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a command, all of it or with the rest kept in order. A decoder that is gone takes nothing."""
        if self._backlog:
            self._backlog.append(b"".join(pieces))
            return
        try:
            written = os.writev(self.stdin_fd, pieces)
        except BlockingIOError:
            written = 0
        except BrokenPipeError:
            return
        if written < sum(map(len, pieces)):
            self._backlog.append(b"".join(pieces)[written:])

    def flush(self) -> None:
        """Go on with the backlog; called when stdin is writable."""
        while self._backlog:
            piece = self._backlog[0]
            try:
                written = os.write(self.stdin_fd, piece)
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._backlog.clear()
                return
            if written < len(piece):
                self._backlog[0] = piece[written:]
                return
            self._backlog.popleft()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the decoder's process group, unless it has been reaped: its number may be another's by then."""
        if self._process.returncode is not None:
            return
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def close_stdin(self) -> None:
        if self.stdin_fd >= 0:
            assert self._process.stdin
            self._process.stdin.close()
            self.stdin_fd = -1

    def reap(self) -> int | None:
        """The exit status as subprocess gives it (negative: signal), or None while it lives.

        The rest of its group is killed first, while the unreaped leader still keeps the group's number from reuse.
        """
        if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self.kill()
        return self._process.wait()

    def close(self) -> None:
        """Close every descriptor; the process must have been reaped."""
        self.close_stdin()
        assert self._process.stdout and self._process.stderr
        self._process.stdout.close()
        self._process.stderr.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _enlarge(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        pass  # over the user's pipe budget (pipe-user-pages-soft): the default size works, in more writes


def read_available(fd: int) -> bytes | None:
    """What a non-blocking descriptor holds, b"" at end of file, None when there is nothing yet."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None
