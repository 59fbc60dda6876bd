"""How turns end, and which of them go on elsewhere.

its own DONE or ERR      result or error to the caller
NaN before any token     once more
its decoder died         to the front of the queue with what it has received, unless it is cancelled, was complete
                         already, is to blame (blame.py), or has outgrown what another decoder takes
"""

import asyncio
import logging
import time
from collections.abc import Callable

from shm.slots import Finish, SlotResult
from workers.blame import accuse
from workers.errors import (
    DeadlineExceeded,
    DecoderRefused,
    EngineFailed,
    NonFinite,
    NoWorkers,
    PoisonRequest,
    RingfenceError,
    SlowClient,
    Unsupported,
    WorkerLost,
)
from workers.exits import ExitKind
from workers.incarnation import Lease
from workers.incidents import IncidentLog
from workers.job import Job
from workers.ledger import Ledger
from workers.replica import Death, Replica
from workers.request import FinishReason, RequestKind, TurnResult
from workers.roster import Roster
from workers.settings import PoolSettings
from workers.turn import Turn, TurnState
from workers.waiting import WaitingQueue

_log = logging.getLogger("ringfence.pool")

_FINISHES = {
    Finish.STOP: FinishReason.STOP,
    Finish.LENGTH: FinishReason.LENGTH,
    Finish.CANCEL: FinishReason.CANCEL,
}
_BUSY_TRIES = 3
_UNLOADED_RETRY_S = 5.0


class Settlement:
    """Every turn that has not ended, and what is done when one does. `on_capacity` is called when one waits again."""

    def __init__(
        self,
        settings: PoolSettings,
        roster: Roster,
        queue: WaitingQueue,
        ledger: Ledger,
        on_capacity: Callable[[], None],
    ) -> None:
        self.jobs: dict[Turn, Job] = {}
        self.idle = asyncio.Event()  # set each time the last open turn has ended
        self.incidents = IncidentLog(
            settings.incidents_dir, kept=settings.incidents_kept, with_content=settings.incidents_with_content
        )
        self._settings = settings
        self._roster = roster
        self._queue = queue
        self._ledger = ledger
        self._on_capacity = on_capacity

    def __repr__(self) -> str:
        return f"Settlement(open={len(self.jobs)})"

    # ---- ends of single turns --------------------------------------------------------------------------------------

    def on_turn_ended(self, replica: Replica, lease: Lease, result: SlotResult) -> None:
        """A turn's own end."""
        job, turn = lease.job, lease.turn
        _account(job, result)
        if turn.state is TurnState.ENDED:
            return
        if turn.is_cancelled or result.finish is Finish.CANCEL:
            if turn.request.kind is RequestKind.GENERATE:  # of an embedding, `generated` counts its numbers
                job.unread = max(0, lease.first_token + result.generated - len(turn.ids))
            self.end_cancelled(job)
        elif result.finish in _FINISHES:
            _learn(replica, lease, result)
            self._complete(job, _FINISHES[result.finish])
        elif result.finish is Finish.REJECTED or (result.error.startswith("busy") and job.runs < _BUSY_TRIES):
            self._again(job)
        elif result.finish is Finish.NONFINITE:
            self._on_nonfinite(replica, lease)
        else:
            self.end_with(job, self._error(replica, result))

    def _error(self, replica: Replica, result: SlotResult) -> RingfenceError:
        if result.finish is Finish.STALLED:
            self._ledger.add("slow_clients")
            return SlowClient(replica.settings.stall_limit_s)
        if result.finish is Finish.ENGINE:
            return EngineFailed(replica.index, result.error)
        if result.error.startswith("unsupported "):
            return Unsupported(result.error.split()[1].rstrip(":"))
        return DecoderRefused(result.error)

    def _on_nonfinite(self, replica: Replica, lease: Lease) -> None:
        self._ledger.add("nonfinite")
        replica.belief.forget()
        lease.job.nonfinite += 1
        if len(lease.turn.ids) == lease.first_token and lease.job.nonfinite < 2:
            self._again(lease.job)
        else:
            self.end_with(lease.job, NonFinite())

    # ---- deaths ----------------------------------------------------------------------------------------------------

    def on_death(self, replica: Replica, death: Death) -> None:
        """A worker or decoder died: its turns go on elsewhere, but for a guilty one."""
        if not replica.supervisor.is_stopping and (death.exit.kind is not ExitKind.CLEAN or death.leases):
            self._ledger.add("worker_deaths" if death.is_worker else "decoder_deaths")
            self.incidents.record(death)
        live = [lease for lease in death.leases if lease.turn.state is not TurnState.ENDED]
        refused = [False] * len(live)
        if not _is_chance(death):
            refused = accuse(
                [(lease.job.record, len(lease.turn.ids)) for lease in live],
                is_external=death.exit.is_external or death.is_worker,
                limit=self._settings.poison_limit,
            )
        for lease, is_refused in zip(live, refused, strict=True):
            self._on_lost(lease, death, is_refused=is_refused)
        if not death.is_worker and replica.is_waking and not self._roster.is_serving:
            self._give_up_waking(replica)

    def _on_lost(self, lease: Lease, death: Death, *, is_refused: bool) -> None:
        job, turn = lease.job, lease.turn
        if turn.is_cancelled and death.exit.kind is ExitKind.BROKEN:
            self.end_with(job, WorkerLost(death.replica, death.exit.text))
        elif turn.is_cancelled:
            self.end_cancelled(job)
        elif turn.ids and turn.ids[-1] in self._settings.end_ids:
            self._complete(job, FinishReason.STOP)
        elif len(turn.ids) >= turn.request.max_new:
            self._complete(job, FinishReason.LENGTH)
        elif is_refused:
            self._refuse(job)
        elif len(turn.request.prompt) + len(turn.ids) >= self._settings.context:
            reason = f"{death.exit.text}; it has grown too long to go on elsewhere"
            self.end_with(job, WorkerLost(death.replica, reason))
        else:
            self._ledger.add("moved")
            turn.requeue()
            self._again(job)

    def _refuse(self, job: Job) -> None:
        deaths = max(job.record.deaths, job.record.idle_losses)
        _log.error("request=%s refused: it was running when %d decoders died", job.turn.request.id, deaths)
        self._ledger.add("poisoned")
        self.end_with(job, PoisonRequest(deaths))

    def _give_up_waking(self, replica: Replica) -> None:
        replica.is_waking = False
        reason = f"worker {replica.index}: its decoder could not be loaded, {replica.reason()}"
        for job in self._queue:
            self._queue.remove(job)
            self.end_with(job, NoWorkers((reason,), _UNLOADED_RETRY_S))

    # ---- what follows ----------------------------------------------------------------------------------------------

    def expire(self, job: Job) -> None:
        """Its time in the queue is over; nothing, if it is running.

        A turn that came while no worker served was given less (`wait_for_workers_s`): with workers back it has the rest.
        """
        waited_s = time.monotonic() - job.turn.submitted_s
        left_s = job.turn.request.deadline_s - waited_s
        if left_s > 0 and self._roster.is_serving:
            job.deadline = asyncio.get_running_loop().call_later(left_s, self.expire, job)
        elif self._queue.remove(job):
            self._ledger.add("expired")
            self.end_with(job, DeadlineExceeded(waited_s))

    def end_cancelled(self, job: Job) -> None:
        """Its caller wanted no more."""
        self._ledger.add("cancelled")
        self._finish(job, FinishReason.CANCEL)

    def end_with(self, job: Job, error: RingfenceError) -> None:
        """It failed."""
        self._ledger.add("failed")
        self._ledger.add("generated_tokens", len(job.turn.ids))
        self._forget(job)
        job.turn.end(error=error)

    def _again(self, job: Job) -> None:
        """To the front of the queue, with a new deadline."""
        loop = asyncio.get_running_loop()
        job.turn.state = TurnState.QUEUED
        self._queue.put_back(job)
        job.deadline = loop.call_later(job.turn.request.deadline_s, self.expire, job)
        loop.call_soon(self._on_capacity)

    def _complete(self, job: Job, finish: FinishReason) -> None:
        self._ledger.completed(time.monotonic())
        self._finish(job, finish)

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
            self._ledger.add("prompt_tokens", result.prompt_tokens)
            self._ledger.add("cached_tokens", result.cached_tokens)
        self._ledger.add("generated_tokens", result.generated)
        self._forget(job)
        turn.end(result=result)

    def _forget(self, job: Job) -> None:
        job.forget_deadline()
        self.jobs.pop(job.turn, None)
        if not self.jobs:
            self.idle.set()


def _account(job: Job, result: SlotResult) -> None:
    if job.runs == 1:
        job.cached_tokens = result.cached_tokens
    job.prompt_us += result.prompt_us
    job.decode_us += result.decode_us
    job.drafts_accepted += result.drafts_accepted
    job.drafts_offered += result.drafts_offered


def _learn(replica: Replica, lease: Lease, result: SlotResult) -> None:
    """What the result says of the decoder's cache; that of an embedding says nothing."""
    if lease.turn.request.kind is RequestKind.EMBED:
        return
    replica.belief.correct(known_tokens=lease.known_tokens, cached_tokens=result.cached_tokens)
    if len(lease.turn.ids) > 1:  # the last token was drawn and never read
        replica.belief.hold(lease.job.chain.extended(lease.turn.ids[:-1]))


def _is_chance(death: Death) -> bool:
    """Whether nothing that ran can have brought the death about: somebody stopped it, or killed the worker itself.

    A decoder's SIGKILL is not chance: whoever watches over memory may send it because of what a request needs.
    """
    return death.exit.kind is ExitKind.STOPPED or (death.is_worker and death.exit.is_external)
