"""The life of a worker's decoder: started, loading, ready, and ended for a reason.

    start -> LOADING -> READY -> (died | condemned | told to quit) -> reaped -> BACKOFF | FATAL | UNLOADED | exit
                ^                                                                  |
                +------------------------------ delay over ------------------------+

A decoder that must not be used again is condemned: killed at once, and its turns end when it has been reaped, so that no
turn ends while the old decoder could still answer it. What it had said before it died counts, unless it said itself that
it is broken.
"""

import os
import time
from collections.abc import Callable, Sequence

from native.protocol import (
    QUIT,
    Dialect,
    Info,
    LineReader,
    ProtocolViolation,
    Ready,
    UnsupportedDialect,
    choose_dialect,
    is_ready,
    parse_ready,
)
from shm.board import Board, Word, WorkerState
from workers import session
from workers.backoff import Backoff
from workers.conversation import Conversation
from workers.decoder import DecoderProcess, read_available
from workers.exits import STOPPED, Exit, ExitKind, classify, cpu_seconds, is_stopped, oom_kills
from workers.loop import TICK_S, Loop
from workers.settings import WorkerSettings
from workers.stderr import StderrTail

BUSY_SHARE = 0.3  # of the last tick: a decoder that computes this much is not merely silent
SOLO_HEADROOM = 8  # tokens: Strata refuses prompt + max_new + 8 > context (docs/protocol.md)
CLEAR_LIMIT_S, CLEAR_LOOK_S = 30.0, 0.05
_STDERR_DRAIN_LINES = 100_000


class DecoderKeeper:
    """Starts, watches and ends the decoder. `ended` is called after each end, when everything is settled."""

    def __init__(self, settings: WorkerSettings, board: Board, loop: Loop, *, bell: Callable[[], None]) -> None:
        self.decoder: DecoderProcess | None = None
        self.start_at_s: float | None = 0.0  # when the next decoder is due, None while none is wanted
        self.backoff = Backoff(
            first_s=settings.backoff_first_s,
            cap_s=settings.backoff_cap_s,
            stable_after_s=settings.stable_after_s,
            deaths_limit=settings.deaths_limit,
        )
        self._settings = settings
        self._board = board
        self._loop = loop
        self._bell = bell
        self._info = Info()
        self._lines = LineReader()
        self._stderr = StderrTail()
        self._condemned: Exit | None = None
        self._kill_at_s: float | None = None  # a decoder that was asked to end is killed then
        self._heard_s = 0.0  # last life sign while loading
        self._was_stopped = False
        self._last_group: int | None = None  # of the last decoder, until it is known to be empty
        self._ended_s = 0.0
        self._oom_kills = 0
        self._cpu_mark = (0.0, 0.0)

    def __repr__(self) -> str:
        return f"DecoderKeeper(decoder={self.decoder!r}, condemned={self._condemned}, deaths={self.backoff.deaths})"

    def attach(self, conversation: Conversation, ended: Callable[[], WorkerState | None]) -> None:
        """Join the two halves of the worker. `ended` names the state to rest in, or None to start another."""
        self._conversation = conversation
        self._ended = ended

    # ---- begin -----------------------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Spawn a decoder."""
        self.start_at_s = None
        self._stderr, self._lines, self._info = StderrTail(), LineReader(), Info()
        self._condemned, self._kill_at_s, self._was_stopped = None, None, False
        self._oom_kills = oom_kills()
        self._heard_s = now
        self._board.set(Word.LOAD_PERCENT, 0)
        self._board.set(Word.PROGRESS_NS, int(now * 1e9))
        self.enter(WorkerState.LOADING)
        try:
            self.decoder = DecoderProcess.spawn(self._settings)
        except OSError as error:
            command = self._settings.decoder_command[0]
            self._settle(Exit(ExitKind.FAILED, f"can't run {command!r}: {error.strerror}"), 127)
            return
        self._board.set(Word.DECODER_PID, self.decoder.pid)
        self._board.add(Word.DECODER_INCARNATION)
        self._loop.watch(self.decoder.stdout_fd, self._on_stdout)
        self._loop.watch(self.decoder.stderr_fd, self._on_stderr)
        self._loop.watch(self.decoder.pidfd, self._on_exit)

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a command; nobody is there to read it when the decoder is gone."""
        decoder = self.decoder
        if decoder is None or decoder.stdin_fd < 0:
            return
        decoder.write(pieces)
        if decoder.has_backlog and not self._loop.is_watching(decoder.stdin_fd):
            self._loop.watch_writable(decoder.stdin_fd, self._on_stdin)

    def enter(self, state: WorkerState) -> None:
        """A change of state, told to the server at once."""
        self._board.state = state
        self._board.add(Word.CHANGES)
        self._bell()

    def _on_line(self, line: bytes, now: float) -> None:
        """A line before READY; those after it in the same read are answers already."""
        if self._board.state is not WorkerState.LOADING:
            self._conversation.take([line], now)
            return
        try:
            if line.startswith(b"INFO"):
                self._info = self._info.add(line)
                self._board.set(Word.LOAD_PERCENT, self._info.load_percent)
            elif is_ready(line):
                self._on_ready(parse_ready(line), now)
        except ProtocolViolation as violation:
            self._board.add(Word.VIOLATIONS)
            note(self._settings.index, f"protocol violation: {violation}")
        except UnsupportedDialect as error:
            self.condemn(Exit(ExitKind.FAILED, str(error)))

    def _on_ready(self, ready: Ready, now: float) -> None:
        dialect = choose_dialect(self._info, ready)
        self._conversation.begin(dialect, self._info)
        board = self._board
        board.info.write(" ".join(f"{key}={value}" for key, value in self._info.values.items()))
        board.set(Word.CONTEXT, ready.context - SOLO_HEADROOM if dialect is Dialect.SOLO else ready.context)
        board.set(Word.LOAD_PERCENT, 100)
        board.set(Word.PROGRESS_NS, int(now * 1e9))
        board.set(Word.BACKOFF_UNTIL_NS, 0)
        board.set(Word.CAPACITY, min(ready.capacity, self._conversation.slots))
        self.backoff.ready(now)
        note(self._settings.index, f"ready dialect={dialect} context={ready.context} slots={ready.capacity}")
        self.enter(WorkerState.READY)

    # ---- what it says ----------------------------------------------------------------------------------------------

    def _on_stdout(self) -> None:
        decoder = self.decoder
        if decoder is None:
            return
        data = read_available(decoder.stdout_fd)
        if data:
            self._take(data)
        elif data is not None:  # end of file: it can answer nothing more, and is usually about to be reaped
            self._loop.unwatch(decoder.stdout_fd)
            self._board.set(Word.CAPACITY, 0)
            self._kill_at(time.monotonic() + self._settings.kill_grace_s)

    def _take(self, data: bytes) -> None:
        now = time.monotonic()
        lines = self._lines.feed(data)
        if self._board.state is WorkerState.LOADING:
            self._heard_s = now
            for line in lines:
                self._on_line(line, now)
        else:
            self._conversation.take(lines, now)
        if self._lines.too_long:
            self._board.add(Word.VIOLATIONS, self._lines.too_long)
            self._lines.too_long = 0
        if self._conversation.turns.publish():
            self._bell()

    def _on_stderr(self) -> None:
        decoder = self.decoder
        if decoder is None:
            return
        data = read_available(decoder.stderr_fd)
        if data:
            self._heard_s = time.monotonic()
            self._take_stderr(data, self._heard_s)
        elif data is not None:
            self._loop.unwatch(decoder.stderr_fd)

    def _take_stderr(self, data: bytes, now: float) -> None:
        for line in self._stderr.feed(data, now):
            if not pass_on(line):
                self._stderr.dropped += 1
        self._board.set(Word.STDERR_LINES, self._stderr.seen)
        self._board.set(Word.STDERR_DROPPED, self._stderr.dropped)

    def _on_stdin(self) -> None:
        decoder = self.decoder
        if decoder is None:
            return
        decoder.flush()
        if not decoder.has_backlog:
            self._loop.unwatch(decoder.stdin_fd)
            if self._condemned is not None:
                decoder.close_stdin()

    # ---- end -------------------------------------------------------------------------------------------------------

    def condemn(self, reason: Exit) -> None:
        """End a decoder that must not be used again."""
        if self.decoder is None or self._condemned is not None:
            return
        self._condemned = reason
        self._board.set(Word.CAPACITY, 0)
        self._board.error.write(reason.text)
        note(self._settings.index, f"decoder condemned: {reason}")
        self.decoder.kill()

    def quit(self, now: float) -> None:
        """Let the decoder go in peace: QUIT and end of file, SIGKILL after the grace."""
        decoder = self.decoder
        if decoder is None or self._condemned is not None:
            return
        self._condemned = Exit(ExitKind.CLEAN, "told to quit")
        self._board.set(Word.CAPACITY, 0)
        self.enter(WorkerState.STOPPING)
        self._kill_at(now + self._settings.kill_grace_s)
        self.write([QUIT])
        if not decoder.has_backlog:
            decoder.close_stdin()

    def kill(self) -> None:
        """The server is gone: kill the decoder and all it started."""
        if self.decoder is not None:
            self.decoder.kill()

    def _kill_at(self, at_s: float) -> None:
        self._kill_at_s = at_s
        self._loop.soon(at_s)

    def _on_exit(self) -> None:
        decoder = self.decoder
        if decoder is None:
            return
        status = decoder.reap()
        if status is None:
            return
        self._drain(decoder)
        for fd in (decoder.stdin_fd, decoder.stdout_fd, decoder.stderr_fd, decoder.pidfd):
            self._loop.unwatch(fd)
        self._stderr.finish()
        decoder.close()
        self.decoder = None
        self._last_group, self._ended_s = decoder.pid, time.monotonic()
        reason = self._condemned
        if reason is None:
            reason = classify(status, self._stderr.lines, oom_kills=oom_kills() - self._oom_kills)
        self._settle(reason, status)

    def _drain(self, decoder: DecoderProcess) -> None:
        """What the dead decoder had said: its last tokens are good, unless we had stopped believing it."""
        while self._stderr.seen < _STDERR_DRAIN_LINES and (data := read_available(decoder.stderr_fd)):
            self._take_stderr(data, time.monotonic())
        is_believed = self._condemned is None or self._condemned.kind is not ExitKind.BROKEN
        while is_believed and (data := read_available(decoder.stdout_fd)):
            self._take(data)

    def _settle(self, reason: Exit, status: int) -> None:
        """The decoder is gone: end its turns, and plan its successor."""
        now = time.monotonic()
        is_own_wish = self._condemned is not None and self._condemned.kind is ExitKind.CLEAN
        self._condemned = self._kill_at_s = None
        board = self._board
        for word in (Word.CAPACITY, Word.DECODER_PID, Word.KV_CELLS_USED):
            board.set(word, 0)
        board.set(Word.DECODER_EXIT_KIND, ExitKind.KILLED.place if is_own_wish else reason.kind.place)
        if not is_own_wish:
            board.error.write(reason.text)
            board.set(Word.DECODER_EXIT, status + 1024)
            board.add(Word.DECODER_DEATHS)
        self._conversation.end_all(Exit(ExitKind.KILLED, reason.text) if is_own_wish else reason)  # nobody's fault
        note(self._settings.index, f"decoder ended: {reason}")
        rest = self._ended()
        if rest is None:
            delay_s = 0.0 if is_own_wish else self.backoff.died(now)
            self.start_at_s = now + delay_s
            self._loop.soon(self.start_at_s)
            board.set(Word.BACKOFF_UNTIL_NS, int(self.start_at_s * 1e9))
            rest = WorkerState.FATAL if self.backoff.is_exhausted else WorkerState.BACKOFF
        self._conversation.turns.publish()
        self.enter(rest)

    # ---- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """What time brings about: a start that is due, a kill that is due, limits."""
        self.backoff.settle(now)
        if self.decoder is not None:
            self._check(self.decoder, now)
        elif self.start_at_s is not None and now >= self.start_at_s:
            if self._is_clear(now):
                self.start(now)
        elif self.start_at_s is not None:
            self._loop.soon(self.start_at_s)

    def _is_clear(self, now: float) -> bool:
        """Whether nothing of the last decoder's group is left: it may hold the memory that the next one needs.

        The wait is bounded, since what does not end may as well hold nothing; then the log names it.
        """
        if self._last_group is None:
            return True
        left = session.group_members(self._last_group)
        if left and now - self._ended_s < CLEAR_LIMIT_S:
            self._loop.soon(now + CLEAR_LOOK_S)
            return False
        if left:
            note(self._settings.index, f"starting although processes of the last decoder do not end: {left}")
        self._last_group = None
        return True

    def _check(self, decoder: DecoderProcess, now: float) -> None:
        if self._kill_at_s is not None:
            if now >= self._kill_at_s:
                self._kill_at_s = None
                self.condemn(Exit(ExitKind.FAILED, "closed its stdout and did not exit"))
                decoder.kill()
            else:
                self._loop.soon(self._kill_at_s)
            return
        if self._condemned is not None:
            return
        was_stopped, self._was_stopped = self._was_stopped, is_stopped(decoder.pid)
        if was_stopped and self._was_stopped:
            self.condemn(STOPPED)
        elif self._board.state is WorkerState.LOADING:
            self._check_loading(now)
        elif len(self._conversation.turns):
            self._conversation.check(now, is_computing=self._is_computing(decoder, now))

    def _check_loading(self, now: float) -> None:
        limit_s = self._settings.start_limit_s
        if now - self._heard_s > limit_s:
            self.condemn(Exit(ExitKind.HANG, f"not READY, and silent for {limit_s:.0f} s"))
        else:
            self._loop.soon(self._heard_s + limit_s + 0.001)

    def _is_computing(self, decoder: DecoderProcess, now: float) -> bool:
        """Whether the decoder has used its time since the last look (at least a quarter of a tick ago)."""
        since, used = self._cpu_mark
        if now - since < TICK_S / 4:
            return False
        seconds = cpu_seconds(decoder.pid)
        self._cpu_mark = (now, seconds)
        return since > 0 and seconds - used > BUSY_SHARE * (now - since)


def note(worker: int, text: str) -> None:
    """A line of our own for the server's log."""
    pass_on(f"worker={worker} {text}")


def pass_on(line: str) -> bool:
    """Write a line to our stderr, a non-blocking pipe to the server; False when it has no room."""
    try:
        os.write(2, line.encode("utf-8", "replace") + b"\n")
    except (BlockingIOError, BrokenPipeError):
        return False
    return True
