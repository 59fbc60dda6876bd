"""The turns that a worker runs: which answer belongs to which slot, and what goes into the ring.

A turn is taken from a slot, written to the decoder under a request id that is never used again while that decoder lives,
and ended once: by its own DONE or ERR, or because its decoder was replaced. Its result is written into its own slot before
its END record. An answer for a turn that is over finds nobody, and is counted.

When the ring is full (the server is stalled), records are parked with their turn, at most max_new of them, and the worker
goes on reading its decoder. Order holds: a turn that has parked records parks the next one too.
"""

from collections import deque

import msgspec

from native.protocol import Dialect, DoneFields, DoneFinish
from shm.board import Board, Word
from shm.ring import Kind, RingWriter, float_bits, record_head
from shm.slots import Finish, SlotHolder, SlotRequest, SlotResult


class RunningTurn(msgspec.Struct, eq=False):
    """A turn of this worker. Times in seconds of the monotonic clock unless named otherwise."""

    slot: int
    generation: int
    rid: int
    max_new: int
    prompt_tokens: int
    resume: int
    taken_ns: int
    token_head: int
    heard_s: float  # its last own progress
    silence_limit_s: float
    generated: int = 0
    cached: int = 0
    position: int = 0  # prompt tokens read, as the last PP said
    is_extended: bool = False  # a silent but computing prefill is granted its limit once more
    is_cancelled: bool = False
    is_stalled: bool = False
    stop_again_s: float = 0.0
    parked: deque[tuple[int, int, int]] | None = None


class RunningTurns:
    """All turns of one worker. Answers go in by kind, records and results come out into the segment."""

    def __init__(self, holder: SlotHolder, ring: RingWriter, board: Board) -> None:
        self._holder = holder
        self._ring = ring
        self._board = board
        self._next_rid = 1
        self._parked: dict[RunningTurn, None] = {}  # in order; those over but with records yet to push too
        self.by_rid: dict[int, RunningTurn] = {}
        self.parked_since: float | None = None

    def __repr__(self) -> str:
        return f"RunningTurns(running={len(self.by_rid)}, parked={len(self._parked)})"

    def __len__(self) -> int:
        return len(self.by_rid)

    def new_decoder(self) -> None:
        """Request ids begin anew."""
        self._next_rid = 1

    def next_rid(self, dialect: Dialect) -> int:
        """A request id for the turn that is written next."""
        rid = self._next_rid if dialect is Dialect.TAGGED else 0
        self._next_rid += 1
        return rid

    def take(self, request: SlotRequest, rid: int, *, now: float, now_ns: int, silence_limit_s: float) -> RunningTurn:
        """Enter a request that was written to the decoder."""
        turn = RunningTurn(
            slot=request.slot,
            generation=request.generation,
            rid=rid,
            max_new=request.max_new,
            prompt_tokens=request.prompt_tokens,
            resume=request.resume,
            taken_ns=now_ns,
            token_head=record_head(request.slot, request.generation, Kind.TOKEN),
            heard_s=now,
            silence_limit_s=silence_limit_s,
        )
        self.by_rid[rid] = turn
        self._board.set(Word.RUNNING, len(self.by_rid))
        return turn

    def token(
        self, turn: RunningTurn, token: int, logprob: float | None, alternatives: tuple[tuple[int, float], ...] | None
    ) -> bool:
        """A token for the ring; False when the decoder has sent more than it was asked for."""
        if turn.generated >= turn.max_new:
            return False
        turn.generated += 1
        if turn.is_cancelled:
            return True
        if logprob is None:
            if turn.parked is not None or not self._ring.try_push(turn.token_head, token):
                self._park(turn, turn.token_head, token, 0)
            return True
        if alternatives:
            head = record_head(turn.slot, turn.generation, Kind.ALTERNATIVE)
            for other, other_logprob in alternatives:
                self._push(turn, head, other, float_bits(other_logprob))
        self._push(turn, turn.token_head, token, float_bits(logprob))
        return True

    def progress(self, turn: RunningTurn, position: int, total: int) -> None:
        """Prompt tokens now in the decoder's cache."""
        self._push(turn, record_head(turn.slot, turn.generation, Kind.PROGRESS), position, total)

    def done(self, turn: RunningTurn, fields: DoneFields) -> None:
        """The turn's own DONE."""
        finish = Finish.STALLED if turn.is_stalled else _FINISHES[fields.finish]
        self._end(
            turn,
            SlotResult(
                finish=finish,
                prompt_tokens=fields.prompt_tokens,
                cached_tokens=fields.reused or turn.cached,
                generated=turn.generated,
                prompt_us=round(fields.prompt_ms * 1000),
                decode_us=round(fields.decode_ms * 1000),
                drafts_accepted=fields.drafts_accepted,
                drafts_offered=fields.drafts_offered,
                taken_ns=turn.taken_ns,
            ),
        )

    def fail(self, turn: RunningTurn, finish: Finish, text: str) -> None:
        """The turn ends without DONE."""
        if turn.is_stalled:
            finish = Finish.STALLED
        self._end(
            turn,
            SlotResult(
                finish=finish, cached_tokens=turn.cached, generated=turn.generated, taken_ns=turn.taken_ns, error=text
            ),
        )

    def fail_all(self, finish: Finish, text: str) -> None:
        for turn in list(self.by_rid.values()):
            self.fail(turn, finish, text)

    def reject(self, slot: int, generation: int, finish: Finish, text: str) -> None:
        """End a request that was never written to a decoder."""
        self._holder.write_result(slot, generation, SlotResult(finish=finish, error=text))
        turn = RunningTurn(slot, generation, -1, 0, 0, 0, 0, 0, 0.0, 0.0)
        self._push(turn, record_head(slot, generation, Kind.END), finish, 0)

    def payload(self, turn: RunningTurn, data: bytes) -> bool:
        """Leave an embedding in the turn's slot; the result's `generated` counts its floats. False when it has no room."""
        return self._holder.write_payload(turn.slot, data)

    def publish(self) -> bool:
        """Make this step's records visible; True when the server's bell is due."""
        return self._ring.publish()

    def unpark(self, now: float) -> bool:
        """Push what was parked, as far as there is room; True when records became visible."""
        for turn in list(self._parked):
            assert turn.parked is not None
            while turn.parked:
                if not self._ring.try_push(*turn.parked[0]):
                    self._count_parked()
                    return self._ring.publish()
                turn.parked.popleft()
                self.parked_since = now
            turn.parked = None
            del self._parked[turn]
        self.parked_since = None
        self._count_parked()
        return self._ring.publish()

    @property
    def has_parked(self) -> bool:
        return bool(self._parked)

    def _end(self, turn: RunningTurn, result: SlotResult) -> None:
        del self.by_rid[turn.rid]
        self._board.set(Word.RUNNING, len(self.by_rid))
        self._board.add(Word.TURNS)
        self._holder.write_result(turn.slot, turn.generation, result)
        self._push(turn, record_head(turn.slot, turn.generation, Kind.END), result.finish, 0)

    def _push(self, turn: RunningTurn, head: int, value: int, detail: int) -> None:
        if turn.parked is not None or not self._ring.try_push(head, value, detail):
            self._park(turn, head, value, detail)

    def _park(self, turn: RunningTurn, head: int, value: int, detail: int) -> None:
        if turn.parked is None:
            turn.parked = deque()
            self._parked[turn] = None
        turn.parked.append((head, value, detail))
        if self.parked_since is None:
            self.parked_since = turn.heard_s
        self._count_parked()

    def _count_parked(self) -> None:
        self._board.set(Word.PARKED, sum(len(turn.parked or ()) for turn in self._parked))


_FINISHES = {
    DoneFinish.STOP: Finish.STOP,
    DoneFinish.LENGTH: Finish.LENGTH,
    DoneFinish.CANCEL: Finish.CANCEL,
    DoneFinish.NONFINITE: Finish.NONFINITE,
}
