"""A pool without processes: turns run in the test's own event loop, by a script.

A script says what a turn does; `FakePool.scripts` holds one per request to come, and `default` is used when it is
empty.

    pool = FakePool(Script(ids=[5, 6, 7]))
    pool.hold()            # turns stay queued until pool.release()
    turn = pool.turns[0]   # what the server submitted
    pool.give(turn, [5])   # or by hand, token by token
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shm.board import BoardSnapshot, WorkerState
from workers.errors import Overloaded, PromptTooLong, RingfenceError, ShuttingDown
from workers.request import FinishReason, GenerationRequest, RequestKind, TurnResult
from workers.snapshot import Capabilities, PoolCounters, PoolSnapshot, QueueSnapshot, WorkerSnapshot
from workers.turn import Turn, TurnState


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a turn does. batch: tokens that come together. by_hand: nothing happens unless the test makes it happen."""

    ids: Sequence[int] = (10, 11, 12)
    batch: int = 1
    finish: FinishReason | None = None  # by default length when ids fill max_new, else stop
    error: RingfenceError | None = None  # after the ids
    logprobs: Sequence[float] = ()
    alternatives: Sequence[list[tuple[int, float]]] = ()
    embedding: bytes = b""
    by_hand: bool = False
    ends_on_cancel: bool = True


@dataclass(slots=True)
class FakeReservation:
    pool: "FakePool"
    prompt_tokens: int
    is_held: bool = True

    def release(self) -> None:
        if self.is_held:
            self.is_held = False
            self.pool.reserved.remove(self)

    def resize(self, tokens: int, /) -> None:
        if tokens > self.pool.token_limit:
            raise Overloaded("prompt tokens", self.pool.token_limit, 1.5)
        self.prompt_tokens = tokens


class FakeOperations:
    """Notes what was called. succeeds: what each call answers."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self.succeeds = True

    async def restart_all(self) -> bool:
        return self._note("restart_all")

    async def restart(self, index: int) -> bool:
        return self._note(f"restart {index}")

    async def drain(self, index: int) -> bool:
        return self._note(f"drain {index}")

    async def resume(self, index: int) -> bool:
        return self._note(f"resume {index}")

    async def cordon(self, index: int) -> bool:
        return self._note(f"cordon {index}")

    async def uncordon(self, index: int) -> bool:
        return self._note(f"uncordon {index}")

    async def unload(self, index: int) -> bool:
        return self._note(f"unload {index}")

    async def load(self, index: int) -> bool:
        return self._note(f"load {index}")

    def _note(self, call: str) -> bool:
        self._calls.append(call)
        return self.succeeds


class FakePool:
    """Stands in for workers.pool.Pool."""

    def __init__(self, default: Script | None = None, *, context: int = 512, workers: int = 2, slots: int = 4) -> None:
        self.default = default or Script()
        self.scripts: deque[Script] = deque()
        self.turns: list[Turn] = []
        self.reserved: list[FakeReservation] = []
        self.context = context
        self.capabilities = Capabilities(logprobs=20, grammar=True, logit_bias=True, resume=True)
        self.slots = slots
        self.token_limit = 1_000_000
        self.reserve_error: RingfenceError | None = None
        self.submit_error: RingfenceError | None = None
        self.is_draining = False
        self.is_held = False
        self.is_stopped_now = False
        self.states: list[WorkerState] = [WorkerState.READY] * workers
        self.reasons: list[str] = [""] * workers
        self.cordoned: set[int] = set()
        self.counters = PoolCounters()
        self.calls: list[str] = []
        self.operations = FakeOperations(self.calls)
        self.snapshot_error: Exception | None = None
        self.incident_records: list[dict[str, Any]] = []
        self._scripts_of: dict[int, Script] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._released = asyncio.Event()
        self._submitted = asyncio.Event()

    # ---- the pool's API ------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and WorkerState.READY in self.states

    def reserve(self, *, prompt_tokens: int) -> FakeReservation:
        if self.is_draining:
            raise ShuttingDown
        if self.reserve_error is not None:
            raise self.reserve_error
        reservation = FakeReservation(self, prompt_tokens)
        self.reserved.append(reservation)
        return reservation

    def submit(self, request: GenerationRequest, reservation: Any = None) -> Turn:
        if self.submit_error is not None:
            raise self.submit_error
        if len(request.prompt) + (request.kind is RequestKind.GENERATE) > self.context:
            raise PromptTooLong(len(request.prompt), self.context)
        if reservation is not None:
            reservation.release()
        turn = Turn(request)
        turn.on_cancel(self._cancelled)
        script = self.scripts.popleft() if self.scripts else self.default
        self._scripts_of[id(turn)] = script
        self.turns.append(turn)
        self._submitted.set()
        if not script.by_hand:
            task = asyncio.get_running_loop().create_task(self._run(turn, script))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return turn

    def snapshot(self) -> PoolSnapshot:
        if self.snapshot_error is not None:
            raise self.snapshot_error
        running = sum(turn.state is TurnState.RUNNING for turn in self.turns)
        waiting = sum(turn.state is TurnState.QUEUED for turn in self.turns)
        ready = sum(state is WorkerState.READY for state in self.states)
        return PoolSnapshot(
            workers=tuple(self._worker(index, running) for index in range(len(self.states))),
            queue=QueueSnapshot(
                requests=waiting,
                tokens=0,
                reserved=len(self.reserved),
                request_limit=256,
                token_limit=self.token_limit,
                oldest_s=0.0,
            ),
            counters=self.counters,
            running=running,
            capacity=ready * self.slots,
            context=self.context,
            capabilities=self.capabilities,
            is_draining=self.is_draining,
            uptime_s=1.0,
            tokens_per_s=0.0,
        )

    def begin_drain(self) -> None:
        self.is_draining = True
        self.calls.append("begin_drain")

    async def start(self) -> None:
        self.calls.append("start")

    async def stop(self, *, drain_s: float) -> None:
        """Lets running turns end for drain_s, then ends the rest with ShuttingDown."""
        self.calls.append("stop")
        self.is_draining = True
        until = time.monotonic() + drain_s
        while self.live_turns and not self.is_stopped_now and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        for turn in self.turns:
            turn.end(error=ShuttingDown())

    def stop_now(self) -> None:
        self.is_stopped_now = True

    def incidents(self) -> list[dict[str, Any]]:
        return self.incident_records

    # ---- the test's side -----------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Turns submitted from now on stay queued."""
        self.is_held = True
        self._released.clear()

    def release(self) -> None:
        self.is_held = False
        self._released.set()

    async def submitted(self, count: int = 1) -> Turn:
        """Wait for that many turns, and return the last."""
        while len(self.turns) < count:
            self._submitted.clear()
            await self._submitted.wait()
        return self.turns[count - 1]

    def start_turn(self, turn: Turn, worker: int = 0) -> None:
        turn.start(worker, time.monotonic())

    def give(self, turn: Turn, ids: Sequence[int]) -> None:
        """Tokens that have just come from the decoder."""
        if turn.state is TurnState.QUEUED:
            self.start_turn(turn)
        turn.ids.extend(ids)
        turn.wake()

    def finish(self, turn: Turn, reason: FinishReason = FinishReason.STOP) -> None:
        turn.end(result=result_of(turn, reason))

    def set_state(self, index: int, state: WorkerState, reason: str = "") -> None:
        self.states[index] = state
        self.reasons[index] = reason

    def count(self, **changes: int) -> None:
        self.counters = replace(self.counters, **changes)

    @property
    def live_turns(self) -> list[Turn]:
        return [turn for turn in self.turns if not turn.has_ended]

    async def _run(self, turn: Turn, script: Script) -> None:
        if self.is_held:
            await self._released.wait()
        if turn.has_ended:
            return
        self.start_turn(turn, len(self.turns) % len(self.states))
        await self._play(turn, script)

    async def _play(self, turn: Turn, script: Script) -> None:
        if turn.request.kind is RequestKind.EMBED:
            await asyncio.sleep(0)
            turn.embedding = script.embedding
            self._end_by(turn, script)
            return
        ids = list(script.ids)[: turn.request.max_new]
        for first in range(0, len(ids), script.batch):
            await asyncio.sleep(0)
            if turn.has_ended:
                return
            last = first + script.batch
            turn.logprobs.extend(script.logprobs[first:last])
            turn.alternatives.extend(script.alternatives[first:last])
            turn.ids.extend(ids[first:last])
            turn.wake()
        await asyncio.sleep(0)
        self._end_by(turn, script)

    def _end_by(self, turn: Turn, script: Script) -> None:
        if script.error is not None:
            turn.end(error=script.error)
            return
        filled = len(turn.ids) >= turn.request.max_new
        self.finish(turn, script.finish or (FinishReason.LENGTH if filled else FinishReason.STOP))

    def _cancelled(self, turn: Turn) -> None:
        if self._scripts_of[id(turn)].ends_on_cancel:
            self.finish(turn, FinishReason.CANCEL)

    def _worker(self, index: int, running: int) -> WorkerSnapshot:
        state = self.states[index]
        is_alive = state in (WorkerState.READY, WorkerState.DRAINING, WorkerState.LOADING)
        return WorkerSnapshot(
            index=index,
            device="cpu",
            state=state,
            reason=self.reasons[index],
            is_serving=state is WorkerState.READY and index not in self.cordoned,
            is_cordoned=index in self.cordoned,
            incarnation=1,
            pid=1000 + index,
            decoder_pid=2000 + index if is_alive else 0,
            capacity=self.slots,
            running=running if index == 0 else 0,
            restarts=0,
            progress_age_s=0.1,
            heartbeat_age_s=0.1,
            last_error="",
            info="engine=fake",
            memory_bytes=1 << 20,
            board=board_of(state) if is_alive else None,
        )


def result_of(turn: Turn, finish: FinishReason) -> TurnResult:
    return TurnResult(
        finish=finish,
        worker=turn.worker or 0,
        prompt_tokens=len(turn.request.prompt),
        cached_tokens=1,
        generated=len(turn.ids),
        queue_ms=turn.queue_ms,
        prompt_ms=2.0,
        decode_ms=3.0,
        moves=turn.moves,
    )


def board_of(state: WorkerState) -> BoardSnapshot:
    figures = {name: 0 for name in BoardSnapshot.__dataclass_fields__ if name != "state"}
    figures["load_percent"] = 100 if state is WorkerState.READY else 40
    return BoardSnapshot(state=state, **figures)
