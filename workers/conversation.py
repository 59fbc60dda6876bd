"""What is said between the worker and a ready decoder: GEN and STOP out, answers in.

    slot arrives  -> accept -> GEN on the pipe        (or REJECTED, REFUSED at once)
    cancelled     -> stop   -> STOP on the pipe, and again each grace period until the turn's DONE
    answers       -> take   -> tokens into the ring, DONE and ERR into results

A turn ends only with its own DONE or ERR, or by `end_all` when its decoder has been reaped. What the answers say of the
decoder as a whole (it is broken, it failed again, a turn is silent for too long) is reported by `condemn`, which
the decoder's keeper provides; whether and how it ends is not decided here.
"""

import time
from collections.abc import Callable, Sequence

from native.protocol import (
    NO_REQUEST,
    AnswerParser,
    Dialect,
    DoneFields,
    DoneFinish,
    Encoder,
    Info,
    Kind,
    ProtocolViolation,
    unsupported,
)
from native.refusal import is_refusal
from native.sampling import SamplingOptions
from shm.board import Board, Word
from shm.slots import Finish, SlotHolder, SlotRequest
from workers.exits import Exit, ExitKind
from workers.running import RunningTurn, RunningTurns
from workers.settings import WorkerSettings

EMBED = 1  # kind of a request in its slot; anything else generates
UNPARK_S = 0.005
_KNOWN_OPTIONS = 256

Write = Callable[[Sequence[bytes | memoryview]], None]


class Conversation:
    """All turns of one worker with its present decoder."""

    def __init__(
        self,
        settings: WorkerSettings,
        board: Board,
        holder: SlotHolder,
        turns: RunningTurns,
        *,
        write: Write,
        condemn: Callable[[Exit], None],
        soon: Callable[[float], None],
        show: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        self.turns = turns
        self._settings = settings
        self._board = board
        self._holder = holder
        self._write = write
        self._condemn = condemn
        self._soon = soon
        self._show = show
        self._note = note
        self._plans: dict[bytes, tuple[bytes, str | None]] = {}  # by encoded options
        self._engine_failures = 0
        self._is_broken = False  # the decoder said so: nothing it says after that is believed, a DONE least of all
        self.begin(Dialect.SOLO, Info())

    def __repr__(self) -> str:
        return f"Conversation(dialect={self._dialect}, turns={self.turns!r})"

    @property
    def slots(self) -> int:
        """Turns that the segment has room for."""
        return self._holder.count

    def begin(self, dialect: Dialect, info: Info) -> None:
        """A new decoder is ready, and speaks this dialect."""
        self._dialect = dialect
        self._info = info
        self._parser = AnswerParser(dialect, info.vocabulary)
        self._encoder = Encoder(dialect, info)
        self._plans.clear()
        self._engine_failures = 0
        self._is_broken = False
        self.turns.new_decoder()

    # ---- out -------------------------------------------------------------------------------------------------------

    def accept(self, slot: int, generation: int) -> None:
        """A request arrived: write it to the decoder, or end it at once."""
        if len(self.turns.by_rid) >= self._board.ready_capacity:
            self.turns.reject(slot, generation, Finish.REJECTED, f"the worker is {self._board.state} or has no room")
            return
        request = self._holder.read(slot, generation)
        plan = self._plans.get(request.options)
        if plan is None:
            plan = self._plan(request.options)
        keys, lacking = plan
        is_embedding = request.kind == EMBED
        if is_embedding and not self._info.embeddings:
            lacking = "embeddings"
        if lacking is not None:
            self.turns.reject(slot, generation, Finish.REFUSED, f"unsupported {lacking}: not announced by the decoder")
            return
        now_ns = time.monotonic_ns()
        rid = self.turns.next_rid(self._dialect)
        if is_embedding:
            head = self._encoder.embed_head(rid)
        else:
            head = self._encoder.head(rid, request.max_new, keys, request.resume)
        self._write([head, request.prompt, b"\n"])
        limit_s = self._first_limit_s(request)
        self.turns.take(request, rid, now=now_ns / 1e9, now_ns=now_ns, silence_limit_s=limit_s)

    def _first_limit_s(self, request: SlotRequest) -> float:
        """Silence allowed before a turn's first line grows with its prompt."""
        return self._settings.hang_limit_s + min(request.prompt_tokens, 32768) / self._settings.prefill_rate

    def _plan(self, encoded: bytes) -> tuple[bytes, str | None]:
        """What such options become for this decoder: the keys of a GEN line, or the capability that it lacks."""
        options = SamplingOptions.decode(encoded)
        if len(self._plans) >= _KNOWN_OPTIONS:
            self._plans.clear()
        plan = self._plans[encoded] = (self._encoder.keys(options), unsupported(options, self._info))
        return plan

    def stop_cancelled(self) -> None:
        """Pass on the server's cancellations."""
        cancelled = self._holder.cancelled()
        for turn in list(self.turns.by_rid.values()):
            if cancelled[turn.slot] == turn.generation and not turn.is_cancelled:
                self.stop(turn)

    def stop(self, turn: RunningTurn) -> None:
        """Ask the decoder to end a turn. A STOP can overtake its GEN and be lost, so `check` asks again."""
        turn.is_cancelled = True
        turn.stop_again_s = time.monotonic() + self._settings.stop_grace_s
        self._soon(turn.stop_again_s)
        self._write([self._encoder.stop(turn.rid)])

    # ---- in --------------------------------------------------------------------------------------------------------

    def take(self, lines: list[bytes], now: float) -> None:
        """Lines of the decoder, one step's or several. The hot path: tokens here, the rest in `_on_answer`."""
        parse, by_rid, token = self._parser.parse, self.turns.by_rid, self.turns.token
        tokens = stale = violations = 0
        is_progress = False  # words about the decoder as a whole, and answers for turns that are over, are none
        for line in lines:
            if self._is_broken:
                break
            try:
                kind, rid, a, b, extra = parse(line)
            except ProtocolViolation as violation:
                violations += 1
                if violations == 1:  # one line of log a read, however many there are
                    self._note(f"protocol violation: {violation}")
                continue
            if kind != Kind.TOKEN:
                is_progress |= self._on_answer(kind, rid, a, b, extra, now)
                continue
            turn = by_rid.get(rid)
            if turn is None:
                stale += 1
                continue
            if token(turn, a, b, extra):
                tokens += 1
                turn.heard_s = now
                if turn.generated == 1:  # somebody waits for it more than for any other
                    self._show()
            else:
                violations += 1
        if tokens or is_progress:
            self._board.set(Word.PROGRESS_NS, int(now * 1e9))
        self._count(tokens, stale, violations, now)

    def _count(self, tokens: int, stale: int, violations: int, now: float) -> None:
        board = self._board
        if tokens:
            board.add(Word.TOKENS_OUT, tokens)
            board.add(Word.STEPS)
        if stale:
            board.add(Word.STALE, stale)
        if violations:
            board.add(Word.VIOLATIONS, violations)
        if self.turns.has_parked:
            self._soon(now + UNPARK_S)

    def _on_answer(self, kind: int, rid: int, a: int, b: int, extra: object, now: float) -> bool:
        """Anything but a token; whether it was for a turn that runs."""
        turn = self.turns.by_rid.get(rid)
        if turn is None:
            self._on_unowned(kind, rid, a, extra)
            return False
        turn.heard_s = now
        if kind == Kind.DONE and isinstance(extra, DoneFields):
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
                self.turns.fail(turn, Finish.REFUSED, "context: the embedding is larger than a slot")
        return True

    def _on_unowned(self, kind: int, rid: int, a: int, extra: object) -> None:
        """Words about the decoder as a whole, and answers for turns that are over."""
        if kind in (Kind.STAT, Kind.INFO):
            self._on_words(extra if isinstance(extra, dict) else {})
        elif kind == Kind.ERROR and (a or rid == NO_REQUEST):
            self._on_engine_error(str(extra), is_fatal=bool(a))
        elif kind != Kind.IGNORED:
            self._board.add(Word.STALE)

    def _on_prefill(self, turn: RunningTurn, position: int, total: int, figures: object) -> None:
        chunk_ms = figures[0] if isinstance(figures, tuple) else 0.0
        turn.silence_limit_s = max(self._settings.hang_limit_s, 3 * chunk_ms / 1000)
        self.turns.progress(turn, position, total)
        self._board.add(Word.PREFILL_TOKENS, max(position - max(turn.position, turn.cached), 0))
        turn.position = position

    def _on_done(self, turn: RunningTurn, fields: DoneFields) -> None:
        if fields.finish is DoneFinish.NONFINITE:
            self._board.add(Word.NONFINITE)
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
        self._board.error.write(text)
        self._note(f"engine error: {text}")
        self._engine_failures += 1
        if is_fatal:
            self._is_broken = True
            self._condemn(Exit(ExitKind.BROKEN, f"the engine said: {text}"))
        elif self._engine_failures >= self._settings.engine_failures_limit:
            reason = f"{self._engine_failures} engine errors in a row, the last: {text}"
            self._condemn(Exit(ExitKind.BROKEN, reason))

    def _on_words(self, words: dict[str, str]) -> None:
        """STAT and late INFO words."""
        for word, key in ((Word.KV_CELLS_USED, "kv_used"), (Word.KV_CELLS, "kv_cells")):
            if words.get(key, "").isdigit():
                self._board.set(word, int(words[key]))

    # ---- time ------------------------------------------------------------------------------------------------------

    def check(self, now: float, *, is_computing: bool) -> None:
        """Ask again for stops that were not answered, and judge silent turns. is_computing: the decoder uses its CPU."""
        for turn in list(self.turns.by_rid.values()):
            if turn.is_cancelled:
                self._stop_again(turn, now)
            silent_s = now - turn.heard_s
            limit_s = self._settings.hang_limit_s if turn.generated else turn.silence_limit_s  # the prompt is read
            if silent_s < limit_s:
                self._soon(turn.heard_s + limit_s)
            elif not turn.generated and is_computing and not turn.is_extended:
                turn.is_extended = True
                turn.silence_limit_s *= 2
            else:
                self._condemn(Exit(ExitKind.HANG, f"a turn made no progress for {silent_s:.1f} s"))

    def _stop_again(self, turn: RunningTurn, now: float) -> None:
        if now >= turn.stop_again_s:
            turn.stop_again_s = now + self._settings.stop_grace_s
            self._board.add(Word.STOPS_RESENT)
            self._write([self._encoder.stop(turn.rid)])
        self._soon(turn.stop_again_s)

    def unpark(self, now: float) -> bool:
        """Push parked records as far as the ring has room, and stop turns that the server has left too long.

        True when records became visible, and the server's bell is due.
        """
        is_due = self.turns.unpark(now)
        since = self.turns.parked_since
        if since is not None:
            self._soon(now + UNPARK_S)
            if now - since > self._settings.stall_limit_s:
                self._stop_stalled()
        return is_due

    def _stop_stalled(self) -> None:
        for turn in list(self.turns.by_rid.values()):
            if turn.parked is not None and not turn.is_cancelled:
                turn.is_stalled = True
                self._board.add(Word.STALLED)
                self.stop(turn)

    def end_all(self, reason: Exit) -> None:
        """The decoder has been reaped: its turns end, and the server carries them on elsewhere."""
        self.turns.fail_all(Finish.KILLED if reason.is_external else Finish.BROKEN, reason.text)
