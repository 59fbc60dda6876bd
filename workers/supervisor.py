"""The life of one worker, decided. Pure: events in, actions out; no clock, process or socket inside.

            spawn               board lives
    DOWN ----------> STARTING ---------------> UP
     ^  delay over      |                      |   hung, over its memory, operator: order, SIGABRT or SIGKILL
     |                  |     exited           v
     |                  +------------------- ENDING
     |                  |     exited           |
     |                  v                      v
     +------------- SWEEPING <-----------------+        sweep: SIGKILL to what is left of the worker's session,
      nothing left                                      repeated until nothing is left; only then a new one starts

`STOPPED` is reached from SWEEPING (or DOWN) once the pool stops, and is the only final phase.

The worker restarts its own decoder; here are only deaths of the worker itself. Both wait by `Backoff`; neither ever gives up.
"""

from dataclasses import dataclass
from enum import StrEnum

from workers.backoff import Backoff

ABORT_GRACE_S = 1.0  # from SIGABRT (a traceback is written) to SIGKILL
KILL_REPEAT_S = 1.0
SWEEP_REPEAT_S = 0.1
SWEEP_ALARM_S = 10.0  # something of the old worker is still there: say so, loudly


class Phase(StrEnum):
    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    ENDING = "ending"
    SWEEPING = "sweeping"
    STOPPED = "stopped"


class Action(StrEnum):
    """What the replica has to do, in the order given."""

    SPAWN = "spawn"
    ORDER_STOP = "order_stop"  # ask: finish the decoder, exit
    ABORT = "abort"  # SIGABRT to the worker: faulthandler writes where it was
    KILL = "kill"  # SIGKILL to the worker's group; the kernel then kills its decoder
    RECLAIM = "reclaim"  # take what the ring still holds, give the turns back to the queue
    SWEEP = "sweep"  # SIGKILL to the rest of the session, report with `swept`
    ALARM = "alarm"  # sweeping does not end: log the pids


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """One worker's phase. Every method takes the time (monotonic seconds) and returns the actions due."""

    backoff: Backoff
    start_limit_s: float
    stop_grace_s: float
    phase: Phase = Phase.DOWN
    reason: str = "not started"
    due_s: float | None = 0.0  # when `tick` has something to do
    is_stopping: bool = False
    restarts: int = 0
    deaths: int = 0
    _is_ordered: bool = False
    _sweep_since: float = 0.0

    @property
    def is_ended_by_us(self) -> bool:
        """Whether its end is what the pool or an operator asked for."""
        return self.is_stopping or self._is_ordered

    def tick(self, now: float) -> list[Action]:
        """Time has passed: what is due."""
        if self.due_s is None or now < self.due_s:
            return []
        match self.phase:
            case Phase.DOWN:
                self.phase, self.due_s = Phase.STARTING, now + self.start_limit_s
                return [Action.SPAWN]
            case Phase.STARTING:
                return self.condemned(now, f"silent for {self.start_limit_s:.0f} s after its start", is_stopped=False)
            case Phase.ENDING:
                self.due_s = now + KILL_REPEAT_S
                return [Action.KILL]
            case Phase.SWEEPING:
                self.due_s = now + SWEEP_REPEAT_S
                if now - self._sweep_since < SWEEP_ALARM_S:
                    return [Action.SWEEP]
                self._sweep_since = now
                return [Action.ALARM, Action.SWEEP]
            case _:
                self.due_s = None
                return []

    def alive(self, now: float) -> list[Action]:
        """The worker's board lives."""
        if self.phase is Phase.STARTING:
            self.phase, self.due_s, self.reason = Phase.UP, None, ""
            self.backoff.ready(now)
        return []

    def condemned(self, now: float, reason: str, *, is_stopped: bool) -> list[Action]:
        """The watchdog's verdict. A stopped process can't run a SIGABRT handler, so it is killed at once."""
        if self.phase not in (Phase.STARTING, Phase.UP):
            return []
        self.phase, self.reason = Phase.ENDING, reason
        if is_stopped:
            self.due_s = now + KILL_REPEAT_S
            return [Action.KILL]
        self.due_s = now + ABORT_GRACE_S
        return [Action.ABORT]

    def ordered(self, now: float, reason: str) -> list[Action]:
        """An operator wants a new worker: ask it to stop, kill it after the grace; no backoff follows."""
        if self.phase is Phase.DOWN:
            self.backoff.forgive()
            self.due_s = now
            return self.tick(now)
        if self.phase not in (Phase.STARTING, Phase.UP):
            return []
        self.phase, self.reason, self._is_ordered = Phase.ENDING, reason, True
        self.due_s = now + self.stop_grace_s
        return [Action.ORDER_STOP]

    def exited(self, now: float, reason: str) -> list[Action]:
        """The process ended (it is not reaped yet); `reason` is used unless we ended it ourselves."""
        if self.phase in (Phase.SWEEPING, Phase.STOPPED, Phase.DOWN):
            return []
        if self.phase is not Phase.ENDING:
            self.reason = reason
        if not self._is_ordered and not self.is_stopping:
            self.deaths += 1
        self.phase, self.due_s, self._sweep_since = Phase.SWEEPING, now + SWEEP_REPEAT_S, now
        return [Action.RECLAIM, Action.SWEEP]

    def swept(self, now: float, *, is_empty: bool) -> list[Action]:
        """Result of a sweep: only when nothing of the old worker is left may another start."""
        if self.phase is not Phase.SWEEPING or not is_empty:
            return []
        if self.is_stopping:
            self.phase, self.due_s = Phase.STOPPED, None
            return []
        delay = 0.0 if self._is_ordered else self.backoff.died(now)
        self._is_ordered = False
        self.restarts += 1
        self.phase, self.due_s = Phase.DOWN, now + delay
        return self.tick(now)

    def spawn_failed(self, now: float, reason: str) -> list[Action]:
        """The process could not be started at all."""
        self.deaths += 1
        self.reason = reason
        self.phase, self.due_s = Phase.DOWN, now + self.backoff.died(now)
        return []

    def stop(self, now: float) -> list[Action]:
        """The pool ends."""
        if self.is_stopping:
            return []
        self.is_stopping = True
        if self.phase is Phase.DOWN:
            self.phase, self.due_s = Phase.STOPPED, None
            return []
        if self.phase in (Phase.STARTING, Phase.UP):
            self.phase, self.reason, self.due_s = Phase.ENDING, "the server is stopping", now + self.stop_grace_s
            return [Action.ORDER_STOP]
        return []
