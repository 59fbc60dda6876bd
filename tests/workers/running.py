"""A real pool for a test: worker processes and scripted decoders, without HTTP.

    async with running_pool(stage, workers=2) as running:
        turn = running.submit(echo_prompt(7), 20)
        assert await answer(turn) == expected(echo_prompt(7), 20)

Each worker's decoders keep a journal of their own, named w0, w1, ... When the block ends the pool is stopped, and nothing of it
may be left: no process, no descriptor. Limits are short, so that what would take minutes in production takes a second here.
"""

import asyncio
import itertools
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from native.sampling import SamplingOptions
from tests.fakes.echo import expected
from tests.fakes.stage import Stage
from workers import session
from workers.pool import Pool
from workers.replica import Replica
from workers.request import FinishReason, GenerationRequest, TurnResult
from workers.settings import PoolSettings, WorkerSettings
from workers.snapshot import PoolCounters
from workers.turn import Turn

T = TypeVar("T")

SHORT: dict[str, Any] = {
    "start_limit_s": 10.0,
    "hang_limit_s": 20.0,
    "stop_grace_s": 0.3,
    "stall_limit_s": 10.0,
    "kill_grace_s": 1.0,
    "backoff_first_s": 0.05,
    "backoff_cap_s": 0.4,
    "stable_after_s": 60.0,
}
_numbers = itertools.count(1)


class Running:
    """A started pool, its stage and what reached its decoders."""

    def __init__(self, pool: Pool, stage: Stage) -> None:
        self.pool = pool
        self.stage = stage
        self._sessions: set[int] = set()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return self.pool.replicas

    @property
    def counters(self) -> PoolCounters:
        return self.pool.snapshot().counters

    def pid(self, worker: int = 0) -> int:
        """Of the worker process."""
        incarnation = self.replicas[worker].incarnation
        assert incarnation is not None
        return incarnation.pid

    def decoder_pid(self, worker: int = 0) -> int:
        incarnation = self.replicas[worker].incarnation
        assert incarnation is not None
        return incarnation.decoder_pid

    def board(self, worker: int = 0) -> Any:
        """A reading of a worker's board."""
        board = self.pool.snapshot().workers[worker].board
        assert board is not None
        return board

    def board_error(self, worker: int = 0) -> str:
        """The last error on a worker's board."""
        return self.pool.snapshot().workers[worker].last_error

    def submit(self, prompt: Sequence[int], max_new: int = 16, **options: Any) -> Turn:
        return self.pool.submit(request(prompt, max_new, **options))

    async def generate(self, prompt: Sequence[int], max_new: int = 16, **options: Any) -> TurnResult:
        """Run a request alone to its end, and check its tokens."""
        return await exact(self.submit(prompt, max_new, **options))

    def events(self, *kinds: str, worker: int | None = None) -> list[dict[str, Any]]:
        """What reached the decoders, oldest first."""
        workers = range(len(self.replicas)) if worker is None else (worker,)
        found = [event for index in workers for event in self.stage.events(*kinds, name=f"w{index}")]
        return sorted(found, key=lambda event: float(event["time"]))

    async def serving(self, *workers: int, timeout_s: float = 10.0) -> None:
        """Until these workers (or all) serve."""
        indexes = workers or range(len(self.replicas))
        await until(
            lambda: all(self.replicas[index].is_serving for index in indexes),
            timeout_s=timeout_s,
            what=lambda: f"serving: {self.replicas}",
        )

    def processes(self) -> set[int]:
        """Every living process of the pool's workers."""
        self._sessions |= {replica.incarnation.pid for replica in self.replicas if replica.incarnation is not None}
        return {pid for leader in self._sessions for pid in session.members(leader)}

    async def idle(self, timeout_s: float = 5.0) -> None:
        """Until nothing runs or waits, and every slot is free."""
        await until(
            lambda: self.pool.running == 0 and self.pool.snapshot().queue.requests == 0,
            timeout_s=timeout_s,
            what=lambda: f"idle: {self.pool}",
        )
        for replica in self.replicas:
            incarnation = replica.incarnation
            if incarnation is not None:
                assert sorted(incarnation.free) == list(range(len(incarnation.leases))), incarnation
        assert self.pool.snapshot().queue.reserved == 0


@asynccontextmanager
async def running_pool(
    stage: Stage,
    *,
    workers: int = 1,
    slots: int = 4,
    worker: dict[str, Any] | None = None,
    decoder: dict[str, Any] | None = None,
    is_awaited: bool = True,
    **pool: Any,
) -> AsyncIterator[Running]:
    """A pool of scripted decoders. worker, pool: settings that differ; decoder: options of tests/fakes/script.py."""
    before = set(os.listdir("/proc/self/fd"))
    started = Pool(pool_settings(stage, workers=workers, slots=slots, worker=worker, decoder=decoder, **pool))
    running = Running(started, stage)
    await started.start()
    try:
        if is_awaited:
            await running.serving()
        yield running
        running.processes()
    finally:
        await started.stop(drain_s=0.0)
    assert all(replica.is_stopped for replica in running.replicas), running.replicas
    assert running.processes() == set()
    await until(lambda: set(os.listdir("/proc/self/fd")) <= before, what="every descriptor closed")
    assert running.events("VIOLATION") == []


def pool_settings(
    stage: Stage,
    *,
    workers: int = 1,
    slots: int = 4,
    worker: dict[str, Any] | None = None,
    decoder: dict[str, Any] | None = None,
    **pool: Any,
) -> PoolSettings:
    command = stage.command(**{"slots": slots, "eos": 0, **(decoder or {})})
    return PoolSettings(
        workers=tuple(
            WorkerSettings(
                index=index,
                environment=(("FD_NAME", f"w{index}"),),
                **{**SHORT, "decoder_command": command, **(worker or {})},
            )
            for index in range(workers)
        ),
        slots=slots,
        **{"watchdog_interval_s": 0.2, **pool},
    )


def request(
    prompt: Sequence[int], max_new: int = 16, *, deadline_s: float = 60.0, **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(
        id=f"t{next(_numbers)}",
        prompt=prompt,
        max_new=max_new,
        deadline_s=deadline_s,
        sampling=SamplingOptions(**sampling),
    )


async def until(
    condition: Callable[[], T], *, timeout_s: float = 10.0, what: str | Callable[[], str] = "condition"
) -> T:
    """The first true value of a condition. Raises AssertionError when that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what if isinstance(what, str) else what()}")
        await asyncio.sleep(0.005)
    return value


async def ended(turn: Turn, timeout_s: float = 20.0) -> Turn:
    """The turn, once it has ended."""
    async with asyncio.timeout(timeout_s):
        await turn.wait_ended()
    return turn


async def tokens(turn: Turn, count: int, timeout_s: float = 20.0) -> None:
    """Until the turn has received so many tokens. A turn that ends earlier is a failure."""
    async with asyncio.timeout(timeout_s):
        seen = 0
        while seen < count:
            more = await turn.wait(seen)
            assert more > seen, turn
            seen = more


async def exact(turn: Turn, timeout_s: float = 20.0) -> TurnResult:
    """The result of a turn that ended well, with exactly the tokens of its prompt, each once."""
    await ended(turn, timeout_s)
    turn.raise_for_error()
    prompt, max_new = turn.request.prompt, turn.request.max_new
    assert list(turn.ids) == expected(prompt, max_new), turn
    assert turn.result is not None
    assert turn.result.finish is FinishReason.LENGTH
    assert turn.result.generated == max_new
    assert turn.result.prompt_tokens == len(prompt)
    return turn.result


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal one process, and never a group: 0 stands for a decoder that is not there."""
    assert pid > 1
    os.kill(pid, number)


def process_is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rfind(b")") + 2 :][:1] not in (b"Z", b"X")


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """So many more descriptors than now, and not one more."""
    free = []
    for _ in range(count + 1):
        free.append(os.dup(0))
    for fd in free:
        os.close(fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
