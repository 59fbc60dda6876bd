"""The product under the contracts and on the clock: a real pool, real worker processes, everything but HTTP.

    contract's thread --call--> event loop in a thread: Pool --shared memory--> worker process --pipes--> decoder
                                                                                (the contract's, by its relay)

The pool is asynchronous and a contract is not; `Home` carries calls into the loop and answers out of it. In `transport`
nothing is carried: the request is made and awaited in the loop itself, as the server does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import uvloop

from bench.contracts.adapter import LIMIT_S, DecoderSource
from bench.schemes.messages import Statistics, TurnFailed
from bench.transport import MAX_NEW, Flood, demand_own
from workers.errors import RingfenceError
from workers.incarnation import Incarnation
from workers.pool import Pool
from workers.request import GenerationRequest, TurnResult
from workers.settings import PoolSettings, WorkerSettings
from workers.turn import Turn

CONTEXT = 32768  # what the scripted decoders announce
START_LIMIT_S = 30.0
T = TypeVar("T")


def settings_of(commands: Sequence[Sequence[str]]) -> PoolSettings:
    """A pool with one worker for each decoder command. Limits are short where a test would wait for them."""
    return PoolSettings(
        workers=tuple(
            WorkerSettings(index=index, decoder_command=tuple(command), kill_grace_s=1.0, backoff_first_s=0.1)
            for index, command in enumerate(commands)
        ),
        slots=1,
        context=CONTEXT,
        queue_tokens=1 << 24,
    )


async def start(pool: Pool) -> None:
    """Start a pool and wait until every worker serves."""
    await pool.start()
    until = time.monotonic() + START_LIMIT_S
    while not all(replica.is_serving for replica in pool.replicas):
        if time.monotonic() > until:
            raise TimeoutError(f"not every worker serves: {pool!r}")
        await asyncio.sleep(0.002)


class Home:
    """An event loop in a thread of its own, for callers that block."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pool", daemon=True)
        self._thread.start()

    def wait_for(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the loop and wait for its result. Raises TimeoutError, and the coroutine is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError("nothing came in time") from None

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


class PoolTurn:
    """A turn of the pool in the hands of a blocking caller.

    The pool delivers end-of-turn tokens like any other; leaving them out is its caller's work (the server's, and ours).
    """

    def __init__(self, home: Home, turn: Turn, stop_ids: frozenset[int]) -> None:
        self._home = home
        self._turn = turn
        self._stop_ids = stop_ids
        self._seen = 0
        self._consumer_error: Exception | None = None

    def next_token(self, timeout_s: float = LIMIT_S) -> int | None:
        return self._home.wait_for(self._next(), timeout_s)

    def close(self) -> None:
        """As the server does it, in the loop, which does not wait for anything to come of it."""
        self._home.wait_for(self._cancel(), LIMIT_S)

    def throw(self, error: Exception) -> None:
        self._consumer_error = error
        self.close()

    def cancel(self) -> None:
        self.close()

    def error(self, timeout_s: float = LIMIT_S) -> Exception | None:
        self._home.wait_for(self._turn.wait_ended(), timeout_s)
        return self._consumer_error or _failure(self._turn)

    def result(self, timeout_s: float = LIMIT_S) -> Statistics:
        error = self.error(timeout_s)
        if error is not None:
            raise error
        if self._turn.result is None:
            raise TurnFailed("the caller finds no statistics")
        return _statistics(self._turn.result)

    async def _cancel(self) -> None:
        self._turn.cancel()

    async def _next(self) -> int | None:
        turn = self._turn
        while await turn.wait(self._seen) > self._seen:
            token = turn.ids[self._seen]
            self._seen += 1
            if token not in self._stop_ids:
                return token
        failure = _failure(turn)
        if failure is not None:
            raise failure
        return None


class RingfenceAdapter:
    """Runs the contracts over a pool whose workers spawn the contract's decoders."""

    def __init__(self) -> None:
        self._home = Home()
        self._pool: Pool | None = None
        self._requests = 0

    def open(self, decoders: Sequence[DecoderSource]) -> None:
        self._pool = Pool(settings_of([decoder.command for decoder in decoders]))
        self._home.wait_for(start(self._pool), START_LIMIT_S + 1.0)

    def start_turn(self, prompt: list[int], max_new: int, *, stop_ids: frozenset[int] = frozenset()) -> PoolTurn:
        turn = self._home.wait_for(self._submit(prompt, max_new), LIMIT_S)
        return PoolTurn(self._home, turn, stop_ids)

    def close(self) -> None:
        try:
            if self._pool is not None:
                self._home.wait_for(self._pool.stop(drain_s=0.0), LIMIT_S)
        except TimeoutError:
            pass  # the workers' lifelines end with this process
        self._home.close()

    async def _submit(self, prompt: list[int], max_new: int) -> Turn:
        if self._pool is None:
            raise RuntimeError("open the adapter before starting a turn")
        self._requests += 1
        return self._pool.submit(GenerationRequest(id=str(self._requests), prompt=prompt, max_new=max_new))


class RingfenceTransport:
    """A pool over decoders of its own, in a loop that runs while a request does. Made and used in the main thread."""

    def __init__(self, command: list[str], replicas: int, *, others: Sequence[list[str]] = ()) -> None:
        """`others` are decoders of further workers."""
        self._loop = uvloop.new_event_loop()
        self._pool = Pool(settings_of([command] * replicas + list(others)))
        self._own = replicas
        self._loop.run_until_complete(start(self._pool))

    def request(self, prompt: list[int]) -> tuple[int, int]:
        return self._loop.run_until_complete(self._request(prompt))

    def flood(self, requests: int, max_new: int) -> Flood:
        return self._loop.run_until_complete(self._flood(requests, max_new))

    def occupy_others(self) -> None:
        """Give each of the others a turn that goes on until `close`."""
        self._loop.run_until_complete(self._occupy_others())

    def idle(self, seconds: float) -> dict[str, float]:
        """Wait with nothing to do: CPU seconds that the server (this process), the workers and the decoders used."""
        workers = self._pids(lambda incarnation: incarnation.pid)
        decoders = self._pids(lambda incarnation: incarnation.decoder_pid)
        groups = {"server": [os.getpid()], "workers": workers, "decoders": decoders}
        before = {name: cpu_of(pids) for name, pids in groups.items()}
        self._loop.run_until_complete(asyncio.sleep(seconds))
        return {name: cpu_of(pids) - before[name] for name, pids in groups.items()}

    def close(self) -> None:
        self._loop.run_until_complete(self._pool.stop(drain_s=0.0))
        self._loop.close()

    def _pids(self, pid_of: Callable[[Incarnation], int]) -> list[int]:
        return [pid_of(replica.incarnation) for replica in self._pool.replicas if replica.incarnation is not None]

    async def _occupy_others(self) -> None:
        own, others = self._pool.replicas[: self._own], self._pool.replicas[self._own :]
        for replica in own:
            replica.is_cordoned = True
        for _ in others:
            turn = self._pool.submit(GenerationRequest(id="busy", prompt=[1, 2, 3], max_new=CONTEXT - 16))
            await turn.wait(0)
        for replica in own:
            replica.is_cordoned = False

    async def _request(self, prompt: list[int]) -> tuple[int, int]:
        called_ns = time.perf_counter_ns()
        turn = self._pool.submit(GenerationRequest(id="timed", prompt=prompt, max_new=MAX_NEW))
        count = await turn.wait(0)
        first_ns = time.perf_counter_ns()
        while count < MAX_NEW and not turn.has_ended:
            count = await turn.wait(count)
        last_ns = time.perf_counter_ns()
        demand_own(prompt, turn.ids[0], turn.ids[MAX_NEW - 1])
        await turn.wait_ended()
        turn.raise_for_error()
        if len(turn.ids) != MAX_NEW:
            raise AssertionError("more tokens came than were asked for")
        return first_ns - called_ns, last_ns - called_ns

    async def _flood(self, requests: int, max_new: int) -> Flood:
        async def call() -> int:
            turn = self._pool.submit(GenerationRequest(id="flood", prompt=[1, 2, 3], max_new=max_new))
            count = 0
            while (now := await turn.wait(count)) > count:
                count = now
            turn.raise_for_error()
            return count

        workers = self._pids(lambda incarnation: incarnation.pid)
        started, cpu = time.perf_counter(), time.process_time() + cpu_of(workers)
        counts = await asyncio.gather(*(call() for _ in range(requests)))
        seconds = time.perf_counter() - started
        return Flood(sum(counts), seconds, time.process_time() + cpu_of(workers) - cpu)


def cpu_of(pids: Sequence[int]) -> float:
    """CPU seconds that these processes have used, all their threads, to the nanosecond."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # as clock_getcpuclockid(3) makes a clock of a pid


def _failure(turn: Turn) -> TurnFailed | None:
    error: RingfenceError | None = turn.error
    return None if error is None else TurnFailed(f"{type(error).__name__}: {error}")


def _statistics(result: TurnResult) -> Statistics:
    return Statistics(
        generated=result.generated,
        prompt_tokens=result.prompt_tokens,
        prompt_ms=result.prompt_ms,
        decode_ms=result.decode_ms,
        finish=str(result.finish),
        reused=result.cached_tokens,
    )
