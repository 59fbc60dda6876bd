"""The server's handle of one worker, through all its incarnations.

Carries out what the supervisor decides and the watchdog finds, and tells the pool what became of turns. Everything about
a worker's present life is in its Incarnation and goes with it; what lasts is here: deaths, backoff, what an operator wants,
what the decoder is believed to have cached.
"""

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from shm.board import BoardSnapshot, Word, WorkerState
from shm.layout import Layout
from shm.orders import Wanted
from shm.slots import Finish, SlotResult
from workers import session
from workers.backoff import Backoff
from workers.exits import STOPPED, Exit, ExitKind, classify, oom_kills
from workers.incarnation import Incarnation, Lease
from workers.job import Job
from workers.prefix import CacheBelief
from workers.settings import PoolSettings, WorkerSettings
from workers.snapshot import WorkerSnapshot
from workers.supervisor import Action, Phase, Supervisor
from workers.watchdog import Limits, Verdict, Watchdog, observe

_log = logging.getLogger("ringfence.workers")
_STDERR_KEPT = 100
_RECORDS_KEPT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker or a decoder ended. `leases` are the turns that it was running."""

    replica: int
    is_worker: bool
    exit: Exit
    status: int
    incarnation: int
    board: BoardSnapshot
    leases: tuple[Lease, ...]
    records: tuple[tuple[int, int], ...]
    stderr: tuple[str, ...]


class Listener(Protocol):
    """The pool, as a replica sees it."""

    def on_turn_ended(self, replica: "Replica", lease: Lease, result: SlotResult) -> None:
        """A turn ended in a way that concerns it alone."""

    def on_death(self, replica: "Replica", death: Death) -> None:
        """Worker or decoder died, and these turns lost it."""

    def on_capacity(self) -> None:
        """A worker may be able to take a turn, or no longer."""


class Replica:
    """One worker of the pool. Its methods are called in the pool's event loop."""

    def __init__(self, settings: WorkerSettings, pool: PoolSettings, listener: Listener, epochs: Iterator[int]) -> None:
        self.settings = settings
        self.index = settings.index
        self.belief = CacheBelief(pool.slots)
        self.incarnation: Incarnation | None = None
        self.is_draining = False
        self.is_cordoned = False
        self.is_waking = False  # a sleeping decoder is being loaded because requests wait
        self.idle_since_s = time.monotonic()
        self.given = 0  # hand-overs
        self.last_run = 0
        self.stderr: deque[str] = deque(maxlen=_STDERR_KEPT)
        self.hangs = 0
        self.memory_bytes = 0  # of worker and decoder together, as the watchdog last saw it
        self.decoder_deaths = 0
        self.stale_total = 0
        self.supervisor = Supervisor(
            backoff=Backoff(
                first_s=settings.backoff_first_s,
                cap_s=settings.backoff_cap_s,
                stable_after_s=settings.stable_after_s,
                deaths_limit=settings.deaths_limit,
            ),
            start_limit_s=pool.worker_start_limit_s,
            stop_grace_s=settings.kill_grace_s + 1.0,
        )
        self._pool = pool
        self._layout = Layout(slots=pool.slots, context=pool.context, ring_records=pool.ring_records)
        self._listener = listener
        self._epochs = epochs
        self._watchdog = Watchdog(self._limits())
        self._timer: asyncio.TimerHandle | None = None
        self._lost: list[tuple[Lease, SlotResult]] = []
        self._seen_deaths = 0
        self._seen_decoder = 0
        self._seen_state: WorkerState | None = None
        self._condemned: Exit | None = None  # why the worker was ended by us
        self._oom_kills = 0

    def __repr__(self) -> str:
        return f"Replica(index={self.index}, phase={self.supervisor.phase}, state={self.state}, incarnation={self.incarnation!r})"

    # ---- what it is ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> WorkerState:
        """The one word for dashboards, from the present incarnation and nothing remembered."""
        match self.supervisor.phase:
            case Phase.DOWN:
                return WorkerState.FATAL if self.supervisor.backoff.is_exhausted else WorkerState.BACKOFF
            case Phase.STARTING:
                return WorkerState.STARTING
            case Phase.UP if self.incarnation is not None:
                state = self.incarnation.board.state
                is_held = self.is_draining or self.is_cordoned
                return WorkerState.DRAINING if is_held and state is WorkerState.READY else state
            case _:
                return WorkerState.STOPPING

    @property
    def free_capacity(self) -> int:
        """Turns that it can take now."""
        incarnation = self.incarnation
        if incarnation is None or self.supervisor.phase is not Phase.UP or self.is_draining or self.is_cordoned:
            return 0
        return max(0, incarnation.free_capacity)

    @property
    def is_serving(self) -> bool:
        """Whether turns are given to it (it may be full)."""
        incarnation = self.incarnation
        return (
            incarnation is not None
            and self.supervisor.phase is Phase.UP
            and not self.is_draining
            and not self.is_cordoned
            and incarnation.is_ready
        )

    @property
    def context(self) -> int:
        """What its decoder announced, in tokens."""
        return 0 if self.incarnation is None else self.incarnation.board.get(Word.CONTEXT)

    @property
    def is_asleep(self) -> bool:
        """Whether its decoder was unloaded on purpose, and can be loaded on demand."""
        incarnation = self.incarnation
        return (
            incarnation is not None
            and self.supervisor.phase is Phase.UP
            and not self.is_draining
            and not self.is_cordoned
            and (incarnation.orders.wanted is Wanted.UNLOAD or self.is_waking)
        )

    @property
    def running(self) -> int:
        return 0 if self.incarnation is None else self.incarnation.running

    @property
    def tokens_out(self) -> int:
        """Tokens of the present incarnation."""
        return 0 if self.incarnation is None else self.incarnation.board.get(Word.TOKENS_OUT)

    @property
    def stale_records(self) -> int:
        """Records for leases that were over, in all incarnations."""
        return self.stale_total + (0 if self.incarnation is None else self.incarnation.stale)

    @property
    def has_suspect(self) -> bool:
        return self.incarnation is not None and any(
            lease is not None and lease.job.is_suspect for lease in self.incarnation.leases
        )

    def reason(self) -> str:
        """Why it is not serving, in words; empty when it is."""
        if self.supervisor.phase is not Phase.UP or self.incarnation is None:
            return self.supervisor.reason or str(self.supervisor.phase)
        if self.is_cordoned:
            return "cordoned by an operator"
        if self.is_draining:
            return "drained by an operator"
        board = self.incarnation.board
        if board.state is WorkerState.READY:
            return ""
        if board.state is WorkerState.LOADING:
            return f"loading, {board.get(Word.LOAD_PERCENT)} %"
        return board.error.read() or str(board.state)

    def snapshot(self) -> WorkerSnapshot:
        incarnation = self.incarnation
        board = None if incarnation is None else incarnation.board.snapshot()
        now_ns = time.monotonic_ns()
        return WorkerSnapshot(
            index=self.index,
            device=self.settings.device,
            state=self.state,
            reason=self.reason(),
            is_serving=self.is_serving,
            is_cordoned=self.is_cordoned or self.state is WorkerState.FATAL,
            incarnation=0 if incarnation is None else incarnation.number,
            pid=0 if incarnation is None else incarnation.pid,
            decoder_pid=0 if board is None else board.decoder_pid,
            capacity=0 if board is None else board.capacity,
            running=self.running,
            restarts=self.supervisor.restarts,
            progress_age_s=_age_s(now_ns, 0 if board is None else board.progress_ns),
            heartbeat_age_s=_age_s(now_ns, 0 if board is None else board.heartbeat_ns),
            last_error="" if incarnation is None else incarnation.board.error.read(),
            info="" if incarnation is None else incarnation.board.info.read(),
            memory_bytes=0 if incarnation is None else self.memory_bytes,
            board=board,
        )

    # ---- what it is told -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._perform(self.supervisor.tick(time.monotonic()))

    def give(self, job: Job, known_tokens: int) -> None:
        """Hand a turn over; the caller saw `free_capacity`."""
        assert self.incarnation is not None
        self.incarnation.lease(job, known_tokens=known_tokens)

    def cancel(self, job: Job) -> None:
        if self.incarnation is not None:
            self.incarnation.cancel(job.turn)

    def order_restart(self, reason: str) -> None:
        """A new worker process and decoder, without waiting for what runs: that goes on elsewhere."""
        self._perform(self.supervisor.ordered(time.monotonic(), reason))

    def want(self, wanted: Wanted) -> None:
        if self.incarnation is not None:
            self.incarnation.want(wanted)

    def wake(self) -> None:
        """Load the decoder of a sleeping worker, once however often it is asked.

        One that has not heard of its unloading yet stays READY, and never rings: `watch` ends the waking then.
        """
        if self.incarnation is not None and not self.is_waking:
            self.is_waking = True
            self.incarnation.want(Wanted.RUN)

    def stop(self) -> None:
        """The pool ends."""
        self._perform(self.supervisor.stop(time.monotonic()))

    def kill(self) -> None:
        """End it now."""
        if self.incarnation is not None:
            self._act(Action.KILL, time.monotonic())

    @property
    def is_stopped(self) -> bool:
        return self.supervisor.phase is Phase.STOPPED

    def watch(self, now: float) -> None:
        """One look of the watchdog."""
        incarnation = self.incarnation
        if incarnation is None or self.supervisor.phase not in (Phase.STARTING, Phase.UP):
            return
        self.supervisor.backoff.settle(now)
        self.is_waking = self.is_waking and incarnation.board.state is not WorkerState.READY
        leases = incarnation.open_leases()
        oldest_s = now - min((lease.leased_s for lease in leases), default=now)
        observation = observe(
            incarnation.pid,
            incarnation.decoder_pid,
            incarnation.board.snapshot(),
            owed=len(leases),
            prompt_tokens=max((len(lease.turn.request.prompt) for lease in leases), default=0),
            oldest_s=oldest_s,
            now_ns=time.monotonic_ns(),
        )
        self.memory_bytes = observation.memory_bytes
        verdict = self._watchdog.judge(observation)
        if verdict is not None:
            self._condemned = _exit_of(verdict)
            self.hangs += verdict.is_hang
            _log.warning("worker=%d incarnation=%d condemned reason=%r", self.index, incarnation.number, verdict.reason)
            self._perform(self.supervisor.condemned(now, verdict.reason, is_stopped=verdict.is_stopped))
            self._listener.on_capacity()

    # ---- what the incarnation received (Owner) ---------------------------------------------------------------------

    def on_end(self, lease: Lease, result: SlotResult | None) -> None:
        if result is None:
            self.on_fault(f"slot {lease.slot} holds no result of generation {lease.generation}")
            result = SlotResult(finish=Finish.KILLED, error="the worker's result could not be read")
        if self.running == 0:
            self.idle_since_s = time.monotonic()
        if result.finish in (Finish.BROKEN, Finish.KILLED):
            self._lost.append((lease, result))
        else:
            self._listener.on_turn_ended(self, lease, result)

    def on_board(self) -> None:
        incarnation = self.incarnation
        if incarnation is None:
            return
        board = incarnation.board
        if self.supervisor.phase is Phase.STARTING and board.get(Word.HEARTBEAT_NS):
            self._perform(self.supervisor.alive(time.monotonic()))
        if board.get(Word.DECODER_INCARNATION) != self._seen_decoder:
            self._seen_decoder = board.get(Word.DECODER_INCARNATION)
            self.belief.forget()
        state = board.state
        has_died = board.get(Word.DECODER_DEATHS) != self._seen_deaths or self._lost
        if has_died and (not incarnation.running or board.get(Word.DECODER_PID)):  # the ends of all its turns are here
            self._on_decoder_death(incarnation)
        if state is not self._seen_state:
            _log.info("worker=%d incarnation=%d state=%s %s", self.index, incarnation.number, state, self.reason())
            self._seen_state = state
            if state is WorkerState.READY:
                self.idle_since_s = time.monotonic()
                self.belief.resize(board.get(Word.CAPACITY))
        if state is WorkerState.READY:
            self.is_waking = False
        self._listener.on_capacity()

    def on_exit(self) -> None:
        incarnation = self.incarnation
        assert incarnation is not None
        status = incarnation.exit_status() or 0
        reason = classify(status, self.stderr, oom_kills=oom_kills() - self._oom_kills)
        level = logging.INFO if self.supervisor.is_ended_by_us else logging.WARNING
        _log.log(level, "worker=%d incarnation=%d exited reason=%r", self.index, incarnation.number, reason.text)
        self._perform(self.supervisor.exited(time.monotonic(), reason.text))
        self._listener.on_capacity()

    def on_fault(self, reason: str) -> None:
        self._condemned = Exit(ExitKind.BROKEN, reason)
        _log.error("worker=%d fault=%r", self.index, reason)
        self._perform(self.supervisor.condemned(time.monotonic(), reason, is_stopped=True))

    def on_stderr(self, line: str) -> None:
        self.stderr.append(line)
        _log.info("worker=%d stderr %s", self.index, line)

    # ---- carrying out ----------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        now = time.monotonic()
        try:
            for action in actions:
                self._act(action, now)
        finally:
            self._arm()  # whatever happened: without a timer nothing would ever happen again

    def _act(self, action: Action, now: float) -> None:
        incarnation = self.incarnation
        if action is Action.SPAWN:
            self._spawn(now)
        elif incarnation is None:
            return
        elif action is Action.ORDER_STOP:
            incarnation.want(Wanted.STOP)
        elif action is Action.ABORT:
            incarnation.signal(signal.SIGABRT)
        elif action is Action.KILL:
            incarnation.kill_group()
        elif action is Action.RECLAIM:
            self._reclaim(incarnation)
        elif action is Action.SWEEP:
            self._sweep(incarnation, now)
        else:
            _log.error("worker=%d its old processes do not end: %s", self.index, _left_of(incarnation))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.supervisor.due_s is not None:
            delay = max(0.0, self.supervisor.due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._perform(self.supervisor.tick(time.monotonic()))

    def _spawn(self, now: float) -> None:
        self._oom_kills = oom_kills()
        self._seen_deaths = self._seen_decoder = 0
        self._seen_state = None
        self._condemned = None
        self._watchdog = Watchdog(self._limits())
        self.belief.forget()
        self.is_waking = False
        try:
            self.incarnation = Incarnation.spawn(self, self.settings, self._layout, epoch=next(self._epochs))
        except OSError as error:
            _log.error("worker=%d can't be started: %s", self.index, error)
            self.supervisor.spawn_failed(now, f"can't be started: {error}")
            return
        _log.info("worker=%d incarnation=%d started pid=%d", self.index, self.incarnation.number, self.incarnation.pid)

    def _reclaim(self, incarnation: Incarnation) -> None:
        """The worker is dead: what it had published counts, and its other turns have lost it."""
        incarnation.drain()
        incarnation.settle()
        lost = [lease for lease, _ in self._lost] + incarnation.open_leases()
        self._lost = []
        for lease in lost:
            incarnation.leases[lease.slot] = None
        incarnation.running = 0
        self.belief.forget()
        self._tell_death(incarnation, self._worker_exit(incarnation), lost, is_worker=True)

    def _worker_exit(self, incarnation: Incarnation) -> Exit:
        status = incarnation.exit_status() or 0
        if self._condemned is not None:
            return self._condemned
        if self.supervisor.is_stopping or status == 0:
            return Exit(ExitKind.CLEAN, self.supervisor.reason)
        return classify(status, self.stderr, oom_kills=oom_kills() - self._oom_kills)

    def _on_decoder_death(self, incarnation: Incarnation) -> None:
        incarnation.read_stderr()
        board = incarnation.board
        self._seen_deaths = board.get(Word.DECODER_DEATHS)
        self.belief.forget()
        lost, self._lost = self._lost, []
        text = lost[0][1].error if lost else board.error.read()
        exit_ = Exit(list(ExitKind)[board.get(Word.DECODER_EXIT_KIND)], text)
        status = board.get(Word.DECODER_EXIT) - 1024
        self.decoder_deaths += 1
        self._tell_death(incarnation, exit_, [lease for lease, _ in lost], is_worker=False, status=status)

    def _tell_death(
        self, incarnation: Incarnation, exit_: Exit, leases: list[Lease], *, is_worker: bool, status: int | None = None
    ) -> None:
        self._listener.on_death(
            self,
            Death(
                replica=self.index,
                is_worker=is_worker,
                exit=exit_,
                status=(incarnation.exit_status() or 0) if status is None else status,
                incarnation=incarnation.number,
                board=incarnation.board.snapshot(),
                leases=tuple(leases),
                records=tuple(incarnation.reader.last(_RECORDS_KEPT)),
                stderr=tuple(self.stderr),
            ),
        )

    def _sweep(self, incarnation: Incarnation, now: float) -> None:
        """Kill what is left of the session; with nothing left, reap the worker and let go of its memory."""
        try:
            session.kill(incarnation.pid)
            if session.members(incarnation.pid):
                return
        except OSError:  # no descriptor left to look with: the next sweep is due soon, and the alarm tells
            return
        incarnation.reap()
        self.stale_total += incarnation.stale
        incarnation.close()
        self.incarnation = None
        self._perform(self.supervisor.swept(now, is_empty=True))
        self._listener.on_capacity()

    def _limits(self) -> Limits:
        return Limits(
            hang_limit_s=self.settings.hang_limit_s,
            prefill_rate=self.settings.prefill_rate,
            memory_limit_bytes=self._pool.memory_limit_bytes,
        )


def _exit_of(verdict: Verdict) -> Exit:
    """How the end of a worker counts that the watchdog condemned."""
    if verdict.is_stopped:
        return STOPPED
    return Exit(ExitKind.HANG if verdict.is_hang else ExitKind.OUT_OF_MEMORY, verdict.reason)


def _left_of(incarnation: Incarnation) -> str:
    try:
        return str(session.members(incarnation.pid))
    except OSError as error:
        return f"unknown, {error}"


def _age_s(now_ns: int, then_ns: int) -> float | None:
    return None if then_ns == 0 else max(0.0, (now_ns - then_ns) / 1e9)
