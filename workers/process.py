"""The worker process: one thread, one epoll loop, sole owner of one decoder.

    doorbell   new requests, cancellations, orders      -> GEN, STOP on the decoder's stdin
    stdout     the decoder's answers                     -> ring, results, the server's bell (once a read)
    stderr     the decoder's log                         -> the last lines kept, some passed on
    pidfd      the decoder ended                         -> its turns end, a new one after a backoff
    lifeline   the server is gone                        -> the decoder's group is killed, and we exit
    timer      a second's tick: heartbeat, limits, retries

Nothing here waits for anything but epoll, so the board's heartbeat tells whether tokens can move. A turn ends only with
its own DONE or ERR, or with the decoder's replacement; a decoder that must not be believed any more is killed, and its turns
end when it has been reaped.
"""

import os
import select
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from native.protocol import (
    NO_REQUEST,
    QUIT,
    AnswerParser,
    Dialect,
    DoneFields,
    DoneFinish,
    Encoder,
    Info,
    Kind,
    LineReader,
    ProtocolViolation,
    Ready,
    UnsupportedDialect,
    choose_dialect,
    is_ready,
    parse_ready,
    unsupported,
)
from native.sampling import SamplingOptions
from shm.board import Board, Word, WorkerState
from shm.doorbell import Doorbell
from shm.orders import Orders, Wanted
from shm.ring import RingWriter
from shm.segment import Segment
from shm.slots import Finish, SlotHolder
from workers.backoff import Backoff
from workers.decoder import DecoderProcess, die_with_parent, read_available
from workers.exits import Exit, ExitKind, classify, cpu_seconds, is_stopped, oom_kills
from workers.running import RunningTurn, RunningTurns, is_refusal
from workers.settings import WorkerSettings
from workers.stderr import StderrTail

TICK_S = 1.0
UNPARK_S = 0.005
BUSY_SHARE = 0.3  # of a silent prefill's time: a decoder that computes this much is granted as long again
_KNOWN_OPTIONS = 256


class WorkerProcess:
    """The loop and the decoder's life. `run` returns the exit code."""

    def __init__(
        self,
        settings: WorkerSettings,
        segment: Segment,
        *,
        bell: Doorbell,
        server_bell: Doorbell,
        lifeline_fd: int,
    ) -> None:
        self.settings = settings
        self.board = Board(segment)
        self.orders = Orders(segment)
        self.holder = SlotHolder(segment)
        self.ring = RingWriter(segment)
        self.turns = RunningTurns(self.holder, self.ring, self.board)
        self.bell = bell
        self.server_bell = server_bell
        self.slots = segment.layout.slots
        self.decoder: DecoderProcess | None = None
        self.dialect = Dialect.SOLO
        self.info = Info()
        self.stderr = StderrTail()
        self.backoff = Backoff(
            first_s=settings.backoff_first_s,
            cap_s=settings.backoff_cap_s,
            stable_after_s=settings.stable_after_s,
            deaths_limit=settings.deaths_limit,
        )
        self._lines = LineReader()
        self._parser = AnswerParser(Dialect.SOLO)
        self._encoder = Encoder(Dialect.SOLO, self.info)
        self._options: dict[bytes, SamplingOptions] = {}
        self._condemned: Exit | None = None  # why we are ending the decoder ourselves
        self._start_at_s: float | None = 0.0  # when the next decoder is due
        self._heard_s = 0.0  # last life sign of a loading decoder
        self._end_by_s = 0.0  # a decoder asked to quit is killed then
        self._engine_failures = 0
        self._oom_kills = 0
        self._is_stopped_twice = False
        self._cpu_mark = (0.0, 0.0)  # time and the decoder's CPU seconds at the last tick with work owed
        self._is_computing = False
        self._replacements = self.orders.replacements
        self._due_s = 0.0
        self._exit_code: int | None = None
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._watch(bell.fd, self._on_bell)
        self._watch(lifeline_fd, self._on_lifeline)

    def __repr__(self) -> str:
        return f"WorkerProcess(index={self.settings.index}, state={self.board.state}, decoder={self.decoder!r}, turns={self.turns!r})"

    def run(self) -> int:
        """Serve until told to stop."""
        self._tick(time.monotonic())
        while self._exit_code is None:
            timeout = self._due_s - time.monotonic()
            for fd, _ in self._epoll.poll(max(timeout, 0.0)):
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler()
            now = time.monotonic()
            if now >= self._due_s:
                self._tick(now)
        return self._exit_code

    # ---- the server's side -----------------------------------------------------------------------------------------

    def _on_bell(self) -> None:
        self.bell.clear()
        for slot, generation in self.holder.arrivals():
            self._accept(slot, generation)
        if self.turns.by_rid:
            self._stop_cancelled()
        if self.turns.has_parked:
            self._unpark(time.monotonic())
        if self.orders.wanted is not Wanted.RUN or self._replacements != self.orders.replacements:
            self._obey(time.monotonic())
        elif self.board.state is WorkerState.UNLOADED:
            self._start_at_s = time.monotonic()
            self._soon(self._start_at_s)

    def _accept(self, slot: int, generation: int) -> None:
        decoder, capacity = self.decoder, self.board.get(Word.CAPACITY)
        if decoder is None or self.board.state is not WorkerState.READY or len(self.turns) >= capacity:
            self.turns.reject(slot, generation, Finish.REJECTED, f"the worker is {self.board.state} and has no room")
            self._ring_server()
            return
        request = self.holder.read(slot, generation)
        options = self._decoded(request.options)
        lacking = unsupported(options, self.info, is_embedding=request.kind == 1)
        if lacking is not None:
            self.turns.reject(
                slot, generation, Finish.REFUSED, f"unsupported {lacking}: the decoder has not announced it"
            )
            self._ring_server()
            return
        now_ns = time.monotonic_ns()
        now = now_ns / 1e9
        limit = self.settings.hang_limit_s + min(request.prompt_tokens, 32768) / self.settings.prefill_rate
        turn = self.turns.take(request, self.dialect, now=now, now_ns=now_ns, silence_limit_s=limit)
        if request.kind == 1:
            head = self._encoder.embed_head(turn.rid)
        else:
            head = self._encoder.generate_head(turn.rid, request.max_new, options, request.resume)
        self._write(decoder, [head, request.prompt, b"\n"])

    def _decoded(self, encoded: bytes) -> SamplingOptions:
        options = self._options.get(encoded)
        if options is None:
            if len(self._options) >= _KNOWN_OPTIONS:
                self._options.clear()
            options = self._options[encoded] = SamplingOptions.decode(encoded)
        return options

    def _stop_cancelled(self) -> None:
        cancelled = self.holder.cancelled()
        for turn in list(self.turns.by_rid.values()):
            if cancelled[turn.slot] == turn.generation and not turn.is_cancelled:
                self._stop(turn)

    def _stop(self, turn: RunningTurn) -> None:
        """Ask the decoder to end a turn, and again each grace period: a STOP can overtake its GEN and be lost."""
        turn.is_cancelled = True
        turn.stop_again_s = time.monotonic() + self.settings.stop_grace_s
        self._soon(turn.stop_again_s)
        if self.decoder is not None:
            self._write(self.decoder, [self._encoder.stop(turn.rid)])

    def _obey(self, now: float) -> None:
        wanted = self.orders.wanted
        if wanted is Wanted.STOP:
            self._enter(WorkerState.STOPPING)
            self._start_at_s = None
            self._quit(now)
        elif wanted is Wanted.UNLOAD:
            self._start_at_s = None
            if self.decoder is None:
                self._enter(WorkerState.UNLOADED)
            elif not self.turns.by_rid:
                self._quit(now)
        elif self._replacements != self.orders.replacements:
            self._replacements = self.orders.replacements
            self.board.set(Word.REPLACEMENTS, self._replacements)
            self.backoff.forgive()
            if self.decoder is None:
                self._start_at_s = now
                self._soon(now)
            else:
                self._condemn(Exit(ExitKind.KILLED, "replaced on order"))

    def _quit(self, now: float) -> None:
        """Let the decoder go in peace; `_tick` kills it after the grace."""
        if self.decoder is None:
            self._exit_code = 0
            return
        if self._condemned is None:
            self._condemned = Exit(ExitKind.CLEAN, "told to quit")
            self.board.set(Word.CAPACITY, 0)
            self._enter(WorkerState.STOPPING)
            self._end_by_s = now + self.settings.kill_grace_s
            self._soon(self._end_by_s)
            self.decoder.write([QUIT])
            if not self.decoder.has_backlog:
                self._unwatch(self.decoder.stdin_fd)
                self.decoder.close_stdin()

    def _on_lifeline(self) -> None:
        """Nothing is ever sent on it: it is readable because the server is gone."""
        self.die()

    def die(self) -> NoReturn:
        """The server is gone: nothing may outlive it."""
        if self.decoder is not None:
            self.decoder.kill()
        os._exit(0)

    # ---- the decoder's answers -------------------------------------------------------------------------------------

    def _on_stdout(self) -> None:
        decoder = self.decoder
        if decoder is None:
            return
        data = read_available(decoder.stdout_fd)
        if data is None:
            return
        if not data:
            self._unwatch(decoder.stdout_fd)
            self._on_stdout_closed()
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Lines of the decoder, one step's or several."""
        now = time.monotonic()
        if self.board.state is WorkerState.LOADING:
            self._heard_s = now
            for line in self._lines.feed(data):
                self._on_line(line, now)
        else:
            self._on_answers(self._lines.feed(data), now)
        if self._lines.too_long:
            self.board.add(Word.VIOLATIONS, self._lines.too_long)
            self._lines.too_long = 0
        self._ring_server()

    def _on_answers(self, lines: list[bytes], now: float) -> None:
        """The hot path: tokens first, everything else in `_on_answer`."""
        parse, by_rid, token = self._parser.parse, self.turns.by_rid, self.turns.token
        tokens = stale = violations = 0
        for line in lines:
            try:
                kind, rid, a, b, extra = parse(line)
            except ProtocolViolation as violation:
                violations += 1
                self._note(f"protocol violation: {violation}")
                continue
            if kind != Kind.TOKEN:
                self._on_answer(kind, rid, a, b, extra, now)
                continue
            turn = by_rid.get(rid)
            if turn is None:
                stale += 1
                continue
            turn.heard_s = now
            if token(turn, a, b, extra):
                tokens += 1
            else:
                violations += 1
        board = self.board
        board.set(Word.PROGRESS_NS, int(now * 1e9))
        if tokens:
            board.add(Word.TOKENS_OUT, tokens)
            board.add(Word.STEPS)
        if stale:
            board.add(Word.STALE, stale)
        if violations:
            board.add(Word.VIOLATIONS, violations)
        if self.turns.has_parked:
            self._soon(now + UNPARK_S)

    def _on_answer(self, kind: int, rid: int, a: int, b: int, extra: object, now: float) -> None:
        if kind == Kind.STAT or kind == Kind.INFO:
            self._on_words(extra if isinstance(extra, dict) else {})
            return
        if kind == Kind.IGNORED:
            return
        turn = self.turns.by_rid.get(rid)
        if turn is None:
            if kind == Kind.ERROR and (a or rid == NO_REQUEST):
                self._on_engine_error(str(extra), is_fatal=bool(a))
            else:
                self.board.add(Word.STALE)
            return
        turn.heard_s = now
        if kind == Kind.DONE:
            self._on_done(turn, extra)
        elif kind == Kind.ERROR:
            self._on_error(turn, str(extra), is_fatal=bool(a))
        elif kind == Kind.RESUME:
            turn.cached = a
            self.turns.progress(turn, a, turn.prompt_tokens)
        elif kind == Kind.PREFILL:
            self._on_prefill(turn, a, b, extra)
        elif kind == Kind.EMBEDDING and isinstance(extra, bytes):
            turn.generated = a
            if not self.turns.payload(turn, extra):
                self.turns.fail(turn, Finish.REFUSED, "the embedding is larger than a request slot; raise `context`")

    def _on_prefill(self, turn: RunningTurn, position: int, total: int, figures: object) -> None:
        chunk_ms = figures[0] if isinstance(figures, tuple) else 0.0
        turn.silence_limit_s = max(self.settings.hang_limit_s, 3 * chunk_ms / 1000)
        self.turns.progress(turn, position, total)
        self.board.add(Word.PREFILL_TOKENS, max(position - max(turn.position, turn.cached), 0))
        turn.position = position

    def _on_done(self, turn: RunningTurn, fields: object) -> None:
        assert isinstance(fields, DoneFields)
        if fields.finish is DoneFinish.NONFINITE:
            self.board.add(Word.NONFINITE)
        else:
            self._engine_failures = 0
        self.turns.done(turn, fields)

    def _on_error(self, turn: RunningTurn, text: str, *, is_fatal: bool) -> None:
        if is_fatal:
            self._on_engine_error(text, is_fatal=True)
        elif turn.is_cancelled:
            self.turns.fail(turn, Finish.CANCEL, text)
        elif is_refusal(text):
            self.turns.fail(turn, Finish.REFUSED, text)
        else:
            self.turns.fail(turn, Finish.ENGINE, text)
            self._on_engine_error(text, is_fatal=False)

    def _on_engine_error(self, text: str, *, is_fatal: bool) -> None:
        self.board.error.write(text)
        self._note(f"engine error: {text}")
        self._engine_failures += 1
        if is_fatal:
            self._condemn(Exit(ExitKind.BROKEN, f"the engine said: {text}"))
        elif self._engine_failures >= self.settings.engine_failures_limit:
            self._condemn(Exit(ExitKind.BROKEN, f"{self._engine_failures} engine errors in a row, the last: {text}"))

    def _on_words(self, words: dict[str, str]) -> None:
        """STAT and late INFO words."""
        for word, key in ((Word.KV_CELLS_USED, "kv_used"), (Word.KV_CELLS, "kv_cells"), (Word.LOAD_PERCENT, "load")):
            if words.get(key, "").isdigit():
                self.board.set(word, int(words[key]))

    # ---- the decoder's life ----------------------------------------------------------------------------------------

    def _start_decoder(self, now: float) -> None:
        self._start_at_s = None
        self.stderr = StderrTail()
        self._lines, self._parser, self.info = LineReader(), AnswerParser(Dialect.SOLO), Info()
        self._condemned, self._engine_failures, self._is_stopped_twice = None, 0, False
        self._oom_kills = oom_kills()
        self._heard_s = now
        self.turns.new_decoder()
        self._enter(WorkerState.LOADING)
        self.board.set(Word.LOAD_PERCENT, 0)
        self.board.set(Word.PROGRESS_NS, int(now * 1e9))
        try:
            decoder = DecoderProcess.spawn(self.settings)
        except OSError as error:
            self._on_ended(
                Exit(ExitKind.FAILED, f"can't run {self.settings.decoder_command[0]!r}: {error.strerror}"), 127
            )
            return
        self.decoder = decoder
        self.board.set(Word.DECODER_PID, decoder.pid)
        self.board.add(Word.DECODER_INCARNATION)
        self._watch(decoder.stdout_fd, self._on_stdout)
        self._watch(decoder.stderr_fd, self._on_stderr)
        self._watch(decoder.pidfd, self._on_exit)

    def _on_line(self, line: bytes, now: float) -> None:
        """A line before READY; those after it in the same read are answers already."""
        if self.board.state is not WorkerState.LOADING:
            self._on_answers([line], now)
            return
        try:
            if line.startswith(b"INFO"):
                self.info = self.info.add(line)
                self.board.set(Word.LOAD_PERCENT, self.info.load_percent)
            elif is_ready(line):
                self._on_ready(parse_ready(line), now)
        except ProtocolViolation as violation:
            self.board.add(Word.VIOLATIONS)
            self._note(f"protocol violation: {violation}")
        except UnsupportedDialect as error:
            self._condemn(Exit(ExitKind.FAILED, str(error)))

    def _on_ready(self, ready: Ready, now: float) -> None:
        self.dialect = choose_dialect(self.info, ready)
        self._parser = AnswerParser(self.dialect, self.info.vocabulary)
        self._encoder = Encoder(self.dialect, self.info)
        self.board.info.write(" ".join(f"{key}={value}" for key, value in self.info.values.items()))
        self.board.set(Word.CONTEXT, ready.context)
        self.board.set(Word.LOAD_PERCENT, 100)
        self.board.set(Word.PROGRESS_NS, int(now * 1e9))
        self.board.set(Word.BACKOFF_UNTIL_NS, 0)
        self.board.set(Word.CAPACITY, min(ready.capacity, self.slots))
        self._enter(WorkerState.READY)
        self.backoff.ready(now)
        self._note(f"ready dialect={self.dialect} context={ready.context} slots={ready.capacity}")
        if self.orders.wanted is not Wanted.RUN:
            self._obey(now)

    def _condemn(self, reason: Exit) -> None:
        """End a decoder that must not be used again. Its turns end once it has been reaped."""
        if self.decoder is None or self._condemned is not None:
            return
        self._condemned = reason
        self.board.set(Word.CAPACITY, 0)
        self.board.error.write(reason.text)
        self._note(f"decoder condemned: {reason}")
        self.decoder.kill()

    def _on_stdout_closed(self) -> None:
        """A decoder without stdout can answer nothing; usually it is about to be reaped anyway."""
        self._end_by_s = time.monotonic() + self.settings.kill_grace_s
        self._soon(self._end_by_s)

    def _on_exit(self) -> None:
        decoder = self.decoder
        if decoder is None:
            return
        status = decoder.reap()
        if status is None:
            return
        self._drain(decoder)
        for fd in (decoder.stdin_fd, decoder.stdout_fd, decoder.stderr_fd, decoder.pidfd):
            self._unwatch(fd)
        self.stderr.finish()
        decoder.close()
        self.decoder = None
        reason = self._condemned
        if reason is None:
            reason = classify(status, self.stderr.lines, oom_kills=oom_kills() - self._oom_kills)
        self._on_ended(reason, status)

    def _drain(self, decoder: DecoderProcess) -> None:
        """What the dead decoder had said: its last tokens are good unless we had stopped believing it."""
        while (data := read_available(decoder.stderr_fd)) and self.stderr.seen < 100_000:
            self.stderr.feed(data, time.monotonic())
        while data := read_available(decoder.stdout_fd):
            if self._condemned is None or self._condemned.kind is not ExitKind.BROKEN:
                self._take(data)

    def _on_ended(self, reason: Exit, status: int) -> None:
        """The decoder is gone: settle its turns, and plan its successor."""
        now = time.monotonic()
        is_wanted_end = reason.kind is ExitKind.CLEAN and self._condemned is not None
        self._condemned = None
        board = self.board
        board.set(Word.CAPACITY, 0)
        board.set(Word.DECODER_PID, 0)
        board.set(Word.KV_CELLS_USED, 0)
        if not is_wanted_end:
            board.error.write(reason.text)
            board.set(Word.DECODER_EXIT, status + 1024)
            board.add(Word.DECODER_DEATHS)
        self.turns.fail_all(Finish.KILLED if reason.is_external else Finish.BROKEN, reason.text)
        if self.orders.wanted is Wanted.STOP:
            self._exit_code = 0
        elif self.orders.wanted is Wanted.UNLOAD:
            self._enter(WorkerState.UNLOADED)
        else:
            delay = 0.0 if reason.text == "replaced on order" or is_wanted_end else self.backoff.died(now)
            self._start_at_s = now + delay
            board.set(Word.BACKOFF_UNTIL_NS, int(self._start_at_s * 1e9))
            self._enter(WorkerState.FATAL if self.backoff.is_exhausted else WorkerState.BACKOFF)
            self._soon(self._start_at_s)
        self._note(f"decoder ended: {reason}")
        self.ring.publish()
        self.server_bell.ring()

    def _on_stderr(self) -> None:
        decoder = self.decoder
        if decoder is None:
            return
        data = read_available(decoder.stderr_fd)
        if data is None:
            return
        if not data:
            self._unwatch(decoder.stderr_fd)
            return
        now = time.monotonic()
        self._heard_s = now
        for line in self.stderr.feed(data, now):
            if not _pass_on(line):
                self.stderr.dropped += 1
        self.board.set(Word.STDERR_LINES, self.stderr.seen)
        self.board.set(Word.STDERR_DROPPED, self.stderr.dropped)

    # ---- time ------------------------------------------------------------------------------------------------------

    def _soon(self, at_s: float) -> None:
        self._due_s = min(self._due_s, at_s)

    def _tick(self, now: float) -> None:
        """Everything that time alone brings about. Runs once a second, or when something asked for it sooner."""
        self._due_s = now + TICK_S
        if not self.board.get(Word.HEARTBEAT_NS):
            self.server_bell.ring()  # the board lives
        self.board.set(Word.HEARTBEAT_NS, int(now * 1e9))
        if self.orders.wanted is Wanted.UNLOAD and self.decoder is not None:
            self._obey(now)
        if self._start_at_s is not None:
            if now >= self._start_at_s:
                self._start_decoder(now)
            else:
                self._soon(self._start_at_s)
        if self.turns.has_parked:
            self._unpark(now)
        if self.decoder is not None:
            self._check_decoder(self.decoder, now)
        self.backoff.settle(now)
        self._ring_server()

    def _check_decoder(self, decoder: DecoderProcess, now: float) -> None:
        if self._condemned is not None or decoder.stdout_fd not in self._handlers:
            if self._end_by_s and now >= self._end_by_s:
                self._end_by_s = 0.0
                decoder.kill()
            elif self._end_by_s:
                self._soon(self._end_by_s)
            return
        is_stopped_now = is_stopped(decoder.pid)
        if is_stopped_now and self._is_stopped_twice:
            self._condemn(Exit(ExitKind.KILLED, "stopped from outside (SIGSTOP)"))
            return
        self._is_stopped_twice = is_stopped_now
        if self.board.state is WorkerState.LOADING:
            if now - self._heard_s > self.settings.start_limit_s:
                self._condemn(Exit(ExitKind.HANG, f"not READY, and silent for {self.settings.start_limit_s:.0f} s"))
            else:
                self._soon(self._heard_s + self.settings.start_limit_s + 0.001)
            return
        if self.turns.by_rid:
            self._measure_cpu(decoder, now)
        for turn in list(self.turns.by_rid.values()):
            self._check_turn(decoder, turn, now)

    def _check_turn(self, decoder: DecoderProcess, turn: RunningTurn, now: float) -> None:
        if turn.is_cancelled:
            if now >= turn.stop_again_s:
                turn.stop_again_s = now + self.settings.stop_grace_s
                self.board.add(Word.STOPS_RESENT)
                self._write(decoder, [self._encoder.stop(turn.rid)])
            self._soon(turn.stop_again_s)
        silent_s = now - turn.heard_s
        if silent_s < turn.silence_limit_s:
            self._soon(turn.heard_s + turn.silence_limit_s)
        elif not turn.generated and self._is_computing and not turn.is_extended:
            turn.is_extended = True
            turn.silence_limit_s *= 2
        else:
            self._condemn(Exit(ExitKind.HANG, f"a turn made no progress for {silent_s:.1f} s"))

    def _measure_cpu(self, decoder: DecoderProcess, now: float) -> None:
        """Whether the decoder has used its time since the last tick."""
        since, used = self._cpu_mark
        if now - since >= TICK_S / 4:
            seconds = cpu_seconds(decoder.pid)
            self._is_computing = since > 0 and seconds - used > BUSY_SHARE * (now - since)
            self._cpu_mark = (now, seconds)

    def _unpark(self, now: float) -> None:
        if self.turns.unpark(now):
            self.server_bell.ring()
        if not self.turns.has_parked:
            return
        self._soon(now + UNPARK_S)
        since = self.turns.parked_since
        if since is not None and now - since > self.settings.stall_limit_s:
            for turn in list(self.turns.by_rid.values()):
                if turn.parked is not None and not turn.is_cancelled:
                    turn.is_stalled = True
                    self.board.add(Word.STALLED)
                    self._stop(turn)

    # ---- small things ----------------------------------------------------------------------------------------------

    def _enter(self, state: WorkerState) -> None:
        """A change of state, told to the server at once."""
        self.board.state = state
        self.server_bell.ring()

    def _ring_server(self) -> None:
        if self.turns.publish():
            self.server_bell.ring()

    def _write(self, decoder: DecoderProcess, pieces: list[bytes | memoryview]) -> None:
        decoder.write(pieces)
        if decoder.has_backlog and decoder.stdin_fd not in self._handlers:
            self._watch(decoder.stdin_fd, self._on_stdin, select.EPOLLOUT)

    def _on_stdin(self) -> None:
        decoder = self.decoder
        if decoder is None:
            return
        decoder.flush()
        if not decoder.has_backlog:
            self._unwatch(decoder.stdin_fd)
            if self._condemned is not None:
                decoder.close_stdin()

    def _watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _note(self, text: str) -> None:
        _pass_on(f"worker={self.settings.index} {text}")


def _pass_on(line: str) -> bool:
    """Write a line to our stderr, a non-blocking pipe to the server; False when it has no room."""
    try:
        os.write(2, line.encode("utf-8", "replace") + b"\n")
    except (BlockingIOError, BrokenPipeError):
        return False
    return True


def install_signals(worker: WorkerProcess) -> None:
    """Signals of a worker.

    TERM, INT and HUP are ignored: a group's TERM must not end what the server is still draining, and the server's own
    orders and lifeline end a worker. When the server dies the kernel sends CONT, which wakes even a stopped worker, so
    that it sees its lifeline's end and can kill its decoder's group (a KILL would leave the decoder's children).
    """
    server = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def on_continue(_signal: int, _frame: object) -> None:
        if os.getppid() != server:
            worker.die()

    signal.signal(signal.SIGCONT, on_continue)
    die_with_parent(signal.SIGCONT)
