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
from collections import deque
from typing import Any

import msgspec

from native.dialect import Info, words_of
from shm.layout import Layout
from shm.orders import Wanted
from shm.slots import Finish, SlotResult
from workers.blame import accuse, may_join
from workers.errors import (
    DeadlineExceeded,
    DecoderRefused,
    EngineFailed,
    NonFinite,
    NoWorkers,
    PoisonRequest,
    PromptTooLong,
    RingfenceError,
    ShuttingDown,
    SlowClient,
    Unsupported,
    WorkerLost,
)
from workers.exits import ExitKind
from workers.incarnation import Lease
from workers.incidents import IncidentLog
from workers.job import Job
from workers.operations import Operations
from workers.prefix import PrefixChain
from workers.replica import Death, Replica
from workers.request import FinishReason, GenerationRequest, RequestKind, TurnResult
from workers.router import RUN, choose
from workers.settings import PoolSettings
from workers.snapshot import Capabilities, PoolCounters, PoolSnapshot, QueueSnapshot
from workers.turn import Turn, TurnState
from workers.waiting import Reservation, WaitingQueue
from workers.watchdog import Lag

_log = logging.getLogger("ringfence.pool")

_FINISHES = {
    Finish.STOP: FinishReason.STOP,
    Finish.LENGTH: FinishReason.LENGTH,
    Finish.CANCEL: FinishReason.CANCEL,
}
_RETRY_LEAST_S, _RETRY_MOST_S = 1.0, 120.0
_IDLE_WATCH_S = 1.0


class Pool:
    """Owns the workers. Create it, `start` it in the main thread's event loop, `stop` it."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self._layout = Layout(slots=settings.slots, context=settings.context, ring_records=settings.ring_records)
        epochs = itertools.count(random.getrandbits(40) << 20 | 1)  # no two pools' segments can be mistaken
        self.replicas = tuple(Replica(worker, settings, self, epochs) for worker in settings.workers)
        self.is_draining = False
        self._queue = WaitingQueue(request_limit=settings.queue_requests, token_limit=settings.queue_tokens)
        self._jobs: dict[Turn, Job] = {}
        self._counts: dict[str, int] = dict.fromkeys(PoolCounters.__dataclass_fields__, 0)
        self._hand_overs = 0
        self._ends: deque[float] = deque(maxlen=64)
        self._rates: deque[tuple[float, int]] = deque(maxlen=10)
        self._started_s = time.monotonic()
        self._watch_task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._lag = Lag(_IDLE_WATCH_S)
        self._info: tuple[str, Info] = ("", Info())
        self._stop_now = asyncio.Event()
        self._context = settings.context
        self.operations = Operations(self.replicas, self.on_capacity)
        self._incidents = IncidentLog(
            settings.incidents_dir, kept=settings.incidents_kept, with_content=settings.incidents_with_content
        )

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
        for job in list(self._jobs.values()):
            self._drop(job)
            self._end_with(job, ShuttingDown())
        if self._watch_task is not None:
            self._watch_task.cancel()
        for replica in self.replicas:
            replica.stop()
        if not await self._all_stopped(max(worker.kill_grace_s for worker in self.settings.workers) + 2.0):
            for replica in self.replicas:
                replica.kill()
            await self._all_stopped(5.0)
        await self._incidents.flush()

    def stop_now(self) -> None:
        """A drain in progress ends at once."""
        self._stop_now.set()

    async def _drained(self, drain_s: float) -> None:
        until = time.monotonic() + drain_s
        while self._jobs and not self._stop_now.is_set() and (left := until - time.monotonic()) > 0:
            self._idle.clear()
            waiters = [asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(self._stop_now.wait())]
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
        self._require_workers()
        return self._queue.reserve(prompt_tokens, free_capacity=self._free_capacity(), retry_after_s=self.retry_after_s)

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
        self._counts["submitted"] += 1
        self._jobs[job.turn] = job
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
        self._require_capabilities(request)
        if sampling.temperature > 0 and sampling.seed == 0:
            sampling = msgspec.structs.replace(sampling, seed=random.getrandbits(32) or 1)
            request = msgspec.structs.replace(request, sampling=sampling)
        options = sampling.encode()
        if len(options) > self._options_room():
            raise DecoderRefused(
                f"grammar and logit_bias take {len(options)} bytes; {self._options_room()} is the most"
            )
        turn = Turn(request)
        job = Job(turn, options, PrefixChain(request.prompt))
        if job.prompt_bytes() > self._layout.prompt_bytes:
            raise ValueError(
                f"the prompt's ids need {job.prompt_bytes()} bytes; {self._layout.prompt_bytes} is the most."
            )
        turn.on_cancel(self._on_cancel)
        return job

    def _options_room(self) -> int:
        return self._layout.options_bytes

    def _require_workers(self) -> None:
        if any(replica.is_serving or replica.is_asleep for replica in self.replicas):
            return
        if self.settings.wait_for_workers_s > 0:
            return
        reasons = tuple(f"worker {replica.index}: {replica.state}, {replica.reason()}" for replica in self.replicas)
        raise NoWorkers(reasons, 2.0)

    def _require_capabilities(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        if (
            request.kind is RequestKind.GENERATE
            and sampling.grammar is None
            and sampling.logprobs is None
            and not sampling.logit_bias
        ):
            return
        able = self.capabilities
        if not able.vocabulary and not any(replica.is_serving for replica in self.replicas):
            return  # nobody has announced anything yet: the worker will say
        if request.kind is RequestKind.EMBED and not able.embeddings:
            raise Unsupported("embeddings")
        if sampling.grammar is not None and not able.grammar:
            raise Unsupported("grammar")
        if sampling.logit_bias and not able.logit_bias:
            raise Unsupported("logit_bias")
        if sampling.logprobs is not None and not 0 < able.logprobs >= sampling.logprobs:
            raise Unsupported("logprobs")

    def _wait(self, job: Job) -> None:
        self._queue.append(job)
        limit_s = job.turn.request.deadline_s
        if self.settings.wait_for_workers_s and not any(replica.is_serving for replica in self.replicas):
            limit_s = min(limit_s, self.settings.wait_for_workers_s)
        job.deadline = asyncio.get_running_loop().call_later(limit_s, self._expire, job)
        self._wake_sleepers()

    def _expire(self, job: Job) -> None:
        if self._queue.remove(job):
            self._counts["expired"] += 1
            self._end_with(job, DeadlineExceeded(time.monotonic() - job.turn.submitted_s))

    # ---- turns: on -------------------------------------------------------------------------------------------------

    def on_capacity(self) -> None:
        """Something changed that may let a waiting turn run (called by replicas)."""
        self._context = self.context
        if not len(self._queue):
            return
        for job in self._queue:
            if not self._free_capacity():
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
        if not len(self._queue) or self._free_capacity() or any(replica.is_waking for replica in self.replicas):
            return
        sleeper = next((replica for replica in self.replicas if replica.is_asleep), None)
        if sleeper is not None:
            _log.info("worker=%d loading its decoder on demand waiting=%d", sleeper.index, len(self._queue))
            sleeper.wake()
            if self._free_capacity():  # it had not heard of its unloading yet, and will not ring
                asyncio.get_running_loop().call_soon(self.on_capacity)

    def _on_cancel(self, turn: Turn) -> None:
        job = self._jobs.get(turn)
        if job is None:
            return
        if self._queue.remove(job):
            self._end_cancelled(job)
            self.on_capacity()
        elif turn.worker is not None:
            self.replicas[turn.worker].cancel(job)

    def _drop(self, job: Job) -> None:
        """Take a turn out of wherever it is."""
        if not self._queue.remove(job) and job.turn.worker is not None:
            self.replicas[job.turn.worker].cancel(job)

    # ---- turns: out ------------------------------------------------------------------------------------------------

    def on_turn_ended(self, replica: Replica, lease: Lease, result: SlotResult) -> None:
        """A turn's own end (called by its replica)."""
        job, turn = lease.job, lease.turn
        self._account(job, result)
        if turn.state is TurnState.ENDED:
            return
        if turn.is_cancelled or result.finish is Finish.CANCEL:
            if turn.request.kind is RequestKind.GENERATE:  # of an embedding, `generated` counts its numbers
                job.unread = max(0, lease.first_token + result.generated - len(turn.ids))
            self._end_cancelled(job)
        elif result.finish in _FINISHES:
            self._learn(replica, lease, result)
            self._complete(job, _FINISHES[result.finish])
        elif result.finish is Finish.REJECTED:
            self._again(job)
        elif result.finish is Finish.NONFINITE:
            self._on_nonfinite(replica, lease)
        elif result.finish is Finish.STALLED:
            self._counts["slow_clients"] += 1
            self._end_with(job, SlowClient(self.settings.workers[replica.index].stall_limit_s))
        elif result.finish is Finish.ENGINE:
            self._end_with(job, EngineFailed(replica.index, result.error))
        elif result.error.startswith("busy") and job.runs < 3:
            self._again(job)
        elif result.error.startswith("unsupported "):
            self._end_with(job, Unsupported(result.error.split()[1].rstrip(":")))
        else:
            self._end_with(job, DecoderRefused(result.error))

    def on_death(self, replica: Replica, death: Death) -> None:
        """A worker or decoder died (called by its replica): its turns go on elsewhere, but for a guilty one."""
        if not replica.supervisor.is_stopping and (death.exit.kind is not ExitKind.CLEAN or death.leases):
            self._counts["worker_deaths" if death.is_worker else "decoder_deaths"] += 1
            self._incidents.record(death)
        is_external = death.exit.is_external or death.is_worker
        live = [lease for lease in death.leases if lease.turn.state is not TurnState.ENDED]
        refused = [False] * len(live)
        if not _is_chance(death):
            refused = accuse(
                [(lease.job.record, len(lease.turn.ids)) for lease in live],
                is_external=is_external,
                limit=self.settings.poison_limit,
            )
        for lease, is_refused in zip(live, refused, strict=True):
            self._on_lost(lease, death, is_refused=is_refused)
        if not death.is_worker and replica.is_waking and not any(other.is_serving for other in self.replicas):
            self._give_up_waking(replica)

    def _on_lost(self, lease: Lease, death: Death, *, is_refused: bool) -> None:
        job, turn = lease.job, lease.turn
        if turn.is_cancelled and death.exit.kind is ExitKind.BROKEN:
            self._end_with(job, WorkerLost(death.replica, death.exit.text))
        elif turn.is_cancelled:
            self._end_cancelled(job)
        elif turn.ids and turn.ids[-1] in self.settings.end_ids:
            self._complete(job, FinishReason.STOP)
        elif len(turn.ids) >= turn.request.max_new:
            self._complete(job, FinishReason.LENGTH)
        elif is_refused:
            self._counts["poisoned"] += 1
            deaths = max(job.record.deaths, job.record.idle_losses)
            _log.error("request=%s refused: it was running when %d decoders died", turn.request.id, deaths)
            self._end_with(job, PoisonRequest(deaths))
        elif not self._fits(job):
            self._end_with(
                job, WorkerLost(death.replica, f"{death.exit.text}; it has grown too long to go on elsewhere")
            )
        else:
            self._counts["moved"] += 1
            turn.requeue()
            self._again(job)

    def _again(self, job: Job) -> None:
        """To the front of the queue, with a new deadline."""
        job.turn.state = TurnState.QUEUED
        self._queue.put_back(job)
        job.deadline = asyncio.get_running_loop().call_later(job.turn.request.deadline_s, self._expire, job)
        asyncio.get_running_loop().call_soon(self.on_capacity)

    def _on_nonfinite(self, replica: Replica, lease: Lease) -> None:
        self._counts["nonfinite"] += 1
        replica.belief.forget()
        lease.job.nonfinite += 1
        if len(lease.turn.ids) == lease.first_token and lease.job.nonfinite < 2:
            self._again(lease.job)
        else:
            self._end_with(lease.job, NonFinite())

    def _give_up_waking(self, replica: Replica) -> None:
        replica.is_waking = False
        for job in self._queue:
            self._queue.remove(job)
            self._end_with(
                job, NoWorkers((f"worker {replica.index}: its decoder could not be loaded, {replica.reason()}",), 5.0)
            )

    def _account(self, job: Job, result: SlotResult) -> None:
        if job.runs == 1:
            job.cached_tokens = result.cached_tokens
        job.prompt_us += result.prompt_us
        job.decode_us += result.decode_us
        job.drafts_accepted += result.drafts_accepted
        job.drafts_offered += result.drafts_offered

    def _learn(self, replica: Replica, lease: Lease, result: SlotResult) -> None:
        """What the result says of the decoder's cache; that of an embedding says nothing."""
        job = lease.job
        if lease.turn.request.kind is RequestKind.EMBED:
            return
        replica.belief.correct(known_tokens=lease.known_tokens, cached_tokens=result.cached_tokens)
        if len(lease.turn.ids) > 1:  # the last token was drawn and never read
            replica.belief.hold(job.chain.extended(lease.turn.ids[:-1]))

    def _complete(self, job: Job, finish: FinishReason) -> None:
        self._counts["completed"] += 1
        self._ends.append(time.monotonic())
        self._finish(job, finish)

    def _end_cancelled(self, job: Job) -> None:
        self._counts["cancelled"] += 1
        self._finish(job, FinishReason.CANCEL)

    def _finish(self, job: Job, finish: FinishReason) -> None:
        turn = job.turn
        result = TurnResult(
            finish=finish,
            worker=-1 if turn.worker is None else turn.worker,
            prompt_tokens=len(turn.request.prompt),
            cached_tokens=min(job.cached_tokens, len(turn.request.prompt)),
            generated=len(turn.ids) + job.unread,
            queue_ms=turn.queue_ms,
            prompt_ms=job.prompt_us / 1000,
            decode_ms=job.decode_us / 1000,
            drafts_accepted=job.drafts_accepted,
            drafts_offered=job.drafts_offered,
            moves=turn.moves,
        )
        if turn.started_s is not None:
            self._counts["prompt_tokens"] += result.prompt_tokens
            self._counts["cached_tokens"] += result.cached_tokens
        self._counts["generated_tokens"] += result.generated
        self._forget(job)
        turn.end(result=result)

    def _end_with(self, job: Job, error: RingfenceError) -> None:
        self._counts["failed"] += 1
        self._counts["generated_tokens"] += len(job.turn.ids)
        self._forget(job)
        job.turn.end(error=error)

    def _forget(self, job: Job) -> None:
        job.forget_deadline()
        self._jobs.pop(job.turn, None)
        if not self._jobs:
            self._idle.set()

    def _fits(self, job: Job) -> bool:
        tokens = len(job.turn.request.prompt) + len(job.turn.ids)
        return tokens < self.settings.context

    # ---- readings --------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return sum(replica.running for replica in self.replicas)

    def _free_capacity(self) -> int:
        free = 0
        for replica in self.replicas:
            free += replica.free_capacity
        return free

    @property
    def is_ready(self) -> bool:
        """Whether a request would be served: not draining, and a worker serves or can be loaded on demand."""
        return not self.is_draining and any(replica.is_serving or replica.is_asleep for replica in self.replicas)

    @property
    def context(self) -> int:
        """Longest prompt plus output in tokens that a ready worker takes; of the settings while none is ready."""
        contexts = [replica.context for replica in self.replicas if replica.is_serving]
        return min(max(contexts), self.settings.context) if contexts else self.settings.context

    @property
    def capabilities(self) -> Capabilities:
        """What the first ready decoder announced; all run the same command."""
        replica = next((replica for replica in self.replicas if replica.is_serving), None)
        if replica is None or replica.incarnation is None:
            return _capabilities(self._info[1])
        text = replica.incarnation.board.info.read()
        if text != self._info[0]:
            self._info = (text, Info().merged(words_of(text.encode())))
        return _capabilities(self._info[1])

    def retry_after_s(self) -> float:
        """When a place may be free, from the rate at which turns ended lately."""
        if len(self._ends) < 2:
            return _RETRY_LEAST_S
        rate = (len(self._ends) - 1) / max(1e-3, time.monotonic() - self._ends[0])
        return min(_RETRY_MOST_S, max(_RETRY_LEAST_S, (len(self._queue) + self._queue.reserved + 1) / rate))

    def incidents(self) -> list[dict[str, Any]]:
        """Deaths of workers and decoders, newest first."""
        return self._incidents.newest()

    def snapshot(self) -> PoolSnapshot:
        now = time.monotonic()
        counts = {
            **self._counts,
            "rejected": self._queue.rejected,
            "worker_hangs": sum(replica.hangs for replica in self.replicas),
            "stale_records": sum(r.stale_total + (r.incarnation.stale if r.incarnation else 0) for r in self.replicas),
        }
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
            counters=PoolCounters(**counts),
            running=self.running,
            capacity=sum(r.free_capacity + r.running for r in self.replicas if r.is_serving),
            context=self.context,
            capabilities=self.capabilities,
            is_draining=self.is_draining,
            uptime_s=now - self._started_s,
            tokens_per_s=self._tokens_per_s(),
        )

    def _tokens_per_s(self) -> float:
        if len(self._rates) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._rates[0], self._rates[-1]
        return max(0.0, (last - first) / max(1e-3, last_s - first_s))

    # ---- the watchdog's round --------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at every worker, twice a second while turns run, once a second otherwise."""
        while True:
            interval_s = self.settings.watchdog_interval_s if self.running else _IDLE_WATCH_S
            await asyncio.sleep(interval_s)
            try:
                self._watch_once(time.monotonic())
            except Exception:  # noqa: BLE001 a fault in one round must not end the watch
                _log.exception("a round of the watchdog failed; the next one is tried")

    def _watch_once(self, now: float) -> None:
        tokens = sum(r.incarnation.board.snapshot().tokens_out for r in self.replicas if r.incarnation is not None)
        self._rates.append((now, tokens))
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


def _is_chance(death: Death) -> bool:
    """Whether nothing that ran can have brought the death about: somebody stopped it, or killed the worker itself.

    A decoder's SIGKILL is not chance: whoever watches over memory may send it because of what a request needs.
    """
    return death.exit.kind is ExitKind.STOPPED or (death.is_worker and death.exit.is_external)


def _capabilities(info: Info) -> Capabilities:
    return Capabilities(
        logprobs=info.logprobs,
        grammar=info.grammar,
        logit_bias=info.logit_bias,
        embeddings=info.embeddings,
        resume=info.resume,
        vocabulary=info.vocabulary,
    )
