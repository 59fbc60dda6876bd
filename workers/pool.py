"""The pool: one queue in front of all workers.

    submit --> waiting queue --> router --> a worker's slot --> ... --> end
                    ^                            |
                    +--- lost its decoder -------+      goes on elsewhere from the tokens received

Late binding: a turn gets its worker when one can take it, so nothing waits behind a slow or dying worker. The pool is the
only writer of turns, jobs and queue; it runs in one event loop and awaits nothing between a decision and its effect.
"""

import asyncio
import itertools
import logging
import random
import time
from typing import Any

import msgspec

from shm.layout import Layout
from shm.orders import Wanted
from workers.blame import may_join
from workers.errors import DecoderRefused, PromptTooLong, ShuttingDown
from workers.job import Job
from workers.ledger import Ledger
from workers.operations import Operations
from workers.prefix import PrefixChain
from workers.replica import Replica
from workers.request import GenerationRequest, RequestKind
from workers.roster import Roster
from workers.router import RUN, choose
from workers.settings import PoolSettings
from workers.settlement import Settlement
from workers.snapshot import Capabilities, PoolSnapshot, QueueSnapshot
from workers.turn import Turn
from workers.waiting import Reservation, WaitingQueue
from workers.watchdog import Lag

_log = logging.getLogger("ringfence.pool")

_IDLE_WATCH_S = 1.0


class Pool:
    """Owns the workers. Create it, `start` it in the main thread's event loop, `stop` it."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self._layout = Layout(slots=settings.slots, context=settings.context, ring_records=settings.ring_records)
        epochs = itertools.count(random.getrandbits(40) << 20 | 1)  # no two pools' segments can be mistaken
        self.replicas = tuple(Replica(worker, settings, self, epochs) for worker in settings.workers)
        self._roster = Roster(self.replicas, settings)
        self.is_draining = False
        self._queue = WaitingQueue(request_limit=settings.queue_requests, token_limit=settings.queue_tokens)
        self._ledger = Ledger()
        self._hand_overs = 0
        self._started_s = time.monotonic()
        self._watch_task: asyncio.Task[None] | None = None
        self._lag = Lag(_IDLE_WATCH_S)
        self._stop_now = asyncio.Event()
        self._context = settings.context
        self.operations = Operations(self.replicas, self.on_capacity)
        self._settlement = Settlement(settings, self._roster, self._queue, self._ledger, self.on_capacity)
        self.on_turn_ended = self._settlement.on_turn_ended
        self.on_death = self._settlement.on_death

    def __repr__(self) -> str:
        return f"Pool(running={self.running}, waiting={len(self._queue)}, replicas={self.replicas!r})"

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the workers; they become ready by themselves."""
        self._started_s = time.monotonic()
        for replica in self.replicas:
            replica.start()
        self._watch_task = asyncio.create_task(self._watch(), name="watchdog")

    def begin_drain(self) -> None:
        """Take nothing new; what runs and waits goes on."""
        self.is_draining = True

    async def stop(self, *, drain_s: float) -> None:
        """Finish what runs within `drain_s`, end the rest with ShuttingDown, and leave no process behind."""
        self.begin_drain()
        await self._drained(drain_s)
        for job in list(self._settlement.jobs.values()):
            self._drop(job)
            self._settlement.end_with(job, ShuttingDown())
        if self._watch_task is not None:
            self._watch_task.cancel()
        for replica in self.replicas:
            replica.stop()
        if not await self._all_stopped(max(worker.kill_grace_s for worker in self.settings.workers) + 2.0):
            for replica in self.replicas:
                replica.kill()
            await self._all_stopped(5.0)
        await self._settlement.incidents.flush()

    def stop_now(self) -> None:
        """A drain in progress ends at once."""
        self._stop_now.set()

    async def _drained(self, drain_s: float) -> None:
        until = time.monotonic() + drain_s
        while self._settlement.jobs and not self._stop_now.is_set() and (left := until - time.monotonic()) > 0:
            self._settlement.idle.clear()
            waiters = [
                asyncio.ensure_future(self._settlement.idle.wait()),
                asyncio.ensure_future(self._stop_now.wait()),
            ]
            await asyncio.wait(waiters, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for waiter in waiters:
                waiter.cancel()

    async def _all_stopped(self, limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while not all(replica.is_stopped for replica in self.replicas):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.01)
        return True

    # ---- turns: in -------------------------------------------------------------------------------------------------

    def reserve(self, *, prompt_tokens: int) -> Reservation:
        """A place for a request that still has to be tokenised (prompt_tokens may be an estimate).

        Raises ShuttingDown; NoWorkers when no worker serves or sleeps and none is expected within `wait_for_workers_s`;
        Overloaded when the queue is full.
        """
        if self.is_draining:
            raise ShuttingDown
        self._roster.require_workers()
        return self._queue.reserve(
            prompt_tokens, free_capacity=self._roster.free_capacity, retry_after_s=self.retry_after_s
        )

    def submit(self, request: GenerationRequest, reservation: Reservation | None = None) -> Turn:
        """Queue a request, and give it to a worker at once when one is free. Takes over the reservation.

        Raises what `reserve` raises when there is no reservation, PromptTooLong and Unsupported.
        """
        has_place = reservation is not None and reservation.is_held
        if reservation is not None:
            reservation.release()  # nothing is awaited up to the hand-over, so nobody can take the place meanwhile
        able = [] if len(self._queue) else [replica for replica in self.replicas if replica.free_capacity > 0]
        if not has_place and (self.is_draining or not able):
            self.reserve(prompt_tokens=len(request.prompt)).release()
        job = self._admit(request)
        self._ledger.add("submitted")
        self._settlement.jobs[job.turn] = job
        if able:
            self._hand_over(job, able)
        else:
            self._wait(job)
            self.on_capacity()  # those before it may be suspects that wait for one another (blame.py)
        return job.turn

    def _admit(self, request: GenerationRequest) -> Job:
        context = self._context
        if not request.prompt or request.max_new < 1:
            raise ValueError("a request needs at least one prompt token and max_new of at least 1.")
        if len(request.prompt) + (request.kind is RequestKind.GENERATE) > context:
            raise PromptTooLong(len(request.prompt), context)
        sampling = request.sampling
        self._roster.require_capabilities(request)
        if sampling.temperature > 0 and sampling.seed == 0:
            sampling = msgspec.structs.replace(sampling, seed=random.getrandbits(32) or 1)
            request = msgspec.structs.replace(request, sampling=sampling)
        options = sampling.encode()
        if len(options) > self._layout.options_bytes:
            raise DecoderRefused(
                f"grammar and logit_bias take {len(options)} bytes; {self._layout.options_bytes} is the most"
            )
        turn = Turn(request)
        job = Job(turn, options, PrefixChain(request.prompt))
        if job.prompt_bytes() > self._layout.prompt_bytes:
            raise ValueError(
                f"the prompt's ids need {job.prompt_bytes()} bytes; {self._layout.prompt_bytes} is the most."
            )
        turn.on_cancel(self._on_cancel)
        return job

    def _wait(self, job: Job) -> None:
        self._queue.append(job)
        limit_s = job.turn.request.deadline_s
        if self.settings.wait_for_workers_s and not self._roster.is_serving:
            limit_s = min(limit_s, self.settings.wait_for_workers_s)
        job.deadline = asyncio.get_running_loop().call_later(limit_s, self._settlement.expire, job)
        self._wake_sleepers()

    # ---- turns: on -------------------------------------------------------------------------------------------------

    def on_capacity(self) -> None:
        """Something changed that may let a waiting turn run (called by replicas)."""
        self._context = self.context
        if not len(self._queue):
            return
        for job in self._queue:
            if not self._roster.free_capacity:
                break
            if self._place(job):
                self._queue.remove(job)
        self._wake_sleepers()

    def _place(self, job: Job) -> bool:
        """Give a turn to the best worker that can take it now."""
        is_suspect = job.record.deaths > 0 and job.is_suspect
        able = [
            replica
            for replica in self.replicas
            if replica.free_capacity > 0 and (not is_suspect or may_join(True, (replica.has_suspect,)))
        ]
        if not able:
            return False
        self._hand_over(job, able)
        return True

    def _hand_over(self, job: Job, able: list[Replica]) -> None:
        replica, known_tokens = choose(job.chain, able)
        job.forget_deadline()
        job.runs += 1
        self._hand_overs += 1
        replica.given += 1
        if replica.given % RUN == 0:
            replica.last_run = self._hand_overs
        replica.give(job, known_tokens)
        if job.turn.request.kind is RequestKind.GENERATE:  # embeddings are computed beside the cache
            replica.belief.hold(job.chain)
        job.turn.start(replica.index, time.monotonic())

    def _wake_sleepers(self) -> None:
        """Requests wait and no awake worker has room: load one sleeping decoder, unless one is loading already."""
        if not len(self._queue) or self._roster.free_capacity or self._roster.is_waking:
            return
        if self._roster.wake_sleeper(len(self._queue)):
            asyncio.get_running_loop().call_soon(self.on_capacity)

    def _on_cancel(self, turn: Turn) -> None:
        job = self._settlement.jobs.get(turn)
        if job is None:
            return
        if self._queue.remove(job):
            self._settlement.end_cancelled(job)
            self.on_capacity()
        elif turn.worker is not None:
            self.replicas[turn.worker].cancel(job)

    def _drop(self, job: Job) -> None:
        """Take a turn out of wherever it is."""
        if not self._queue.remove(job) and job.turn.worker is not None:
            self.replicas[job.turn.worker].cancel(job)

    # ---- readings --------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return self._roster.running

    @property
    def is_ready(self) -> bool:
        """Whether a request would be served: not draining, and a worker serves or can be loaded on demand."""
        return not self.is_draining and self._roster.is_reachable

    @property
    def context(self) -> int:
        """Longest prompt plus output in tokens that a ready worker takes."""
        return self._roster.context

    @property
    def capabilities(self) -> Capabilities:
        return self._roster.capabilities

    def retry_after_s(self) -> float:
        """When a place in the queue may be free."""
        return self._ledger.retry_after_s(time.monotonic(), len(self._queue) + self._queue.reserved)

    def incidents(self) -> list[dict[str, Any]]:
        """Deaths of workers and decoders, newest first."""
        return self._settlement.incidents.newest()

    def snapshot(self) -> PoolSnapshot:
        now = time.monotonic()
        queue = self._queue
        return PoolSnapshot(
            workers=tuple(replica.snapshot() for replica in self.replicas),
            queue=QueueSnapshot(
                requests=len(queue),
                tokens=queue.tokens,
                reserved=queue.reserved,
                request_limit=queue.request_limit,
                token_limit=queue.token_limit,
                oldest_s=queue.oldest_s(now),
            ),
            counters=self._ledger.counters(
                rejected=queue.rejected,
                worker_hangs=sum(replica.hangs for replica in self.replicas),
                stale_records=sum(replica.stale_records for replica in self.replicas),
            ),
            running=self.running,
            capacity=sum(r.free_capacity + r.running for r in self.replicas if r.is_serving),
            context=self.context,
            capabilities=self.capabilities,
            is_draining=self.is_draining,
            uptime_s=now - self._started_s,
            tokens_per_s=self._ledger.tokens_per_s,
        )

    # ---- the watchdog's round --------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at every worker each `watchdog_interval_s` while turns run, once a second otherwise."""
        while True:
            interval_s = self.settings.watchdog_interval_s if self.running else _IDLE_WATCH_S
            await asyncio.sleep(interval_s)
            try:
                self._watch_once(time.monotonic())
            except Exception:  # noqa: BLE001 a fault in one round must not end the watch
                _log.exception("a round of the watchdog failed; the next one is tried")

    def _watch_once(self, now: float) -> None:
        self._ledger.read_tokens(now, self._roster.tokens_out)
        if self._lag.is_late(now):
            _log.warning("the watchdog's own round came late; it judges nobody this time")
            return
        for replica in self.replicas:
            replica.watch(now)
            self._unload_idle(replica, now)

    def _unload_idle(self, replica: Replica, now: float) -> None:
        limit_s = replica.settings.unload_idle_s
        if (
            limit_s
            and replica.is_serving
            and not replica.running
            and not len(self._queue)
            and now - replica.idle_since_s > limit_s
        ):
            _log.info("worker=%d unloading its decoder after %.0f idle seconds", replica.index, limit_s)
            replica.want(Wanted.UNLOAD)
