"""The supervisor's table: every event in every phase, and what no order of events may bring about."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.backoff import Backoff
from workers.supervisor import (
    ABORT_GRACE_S,
    KILL_REPEAT_S,
    SWEEP_ALARM_S,
    SWEEP_REPEAT_S,
    Action,
    Phase,
    Supervisor,
)

NOW = 1000.0
START_LIMIT_S = 30.0
STOP_GRACE_S = 6.0
Event = Callable[[Supervisor], list[Action]]


def make(seed: int = 0) -> Supervisor:
    backoff = Backoff(first_s=1.0, cap_s=60.0, stable_after_s=60.0, deaths_limit=5, jitter=random.Random(seed))
    return Supervisor(backoff=backoff, start_limit_s=START_LIMIT_S, stop_grace_s=STOP_GRACE_S)


def in_phase(phase: Phase) -> Supervisor:
    """A supervisor brought there by events, just before NOW."""
    supervisor = make()
    if phase is Phase.DOWN:
        supervisor.due_s = NOW + 5.0
        return supervisor
    if phase is Phase.STOPPED:
        supervisor.stop(NOW - 3)
        return supervisor
    supervisor.tick(NOW - 3)
    if phase is not Phase.STARTING:
        supervisor.alive(NOW - 2)
    if phase is Phase.ENDING:
        supervisor.condemned(NOW - 0.5, "hung", is_stopped=False)
    if phase is Phase.SWEEPING:
        supervisor.exited(NOW - 0.05, "died")
    assert supervisor.phase is phase
    return supervisor


EVENTS: dict[str, Event] = {
    "tick early": lambda s: s.tick(NOW),
    "tick due": lambda s: s.tick(max(NOW, s.due_s or NOW)),
    "alive": lambda s: s.alive(NOW),
    "hung": lambda s: s.condemned(NOW, "hung", is_stopped=False),
    "stopped from outside": lambda s: s.condemned(NOW, "stopped", is_stopped=True),
    "ordered": lambda s: s.ordered(NOW, "operator"),
    "exited": lambda s: s.exited(NOW, "died"),
    "something left": lambda s: s.swept(NOW, is_empty=False),
    "nothing left": lambda s: s.swept(NOW, is_empty=True),
    "stop": lambda s: s.stop(NOW),
}
D, S, U, E, W, X = Phase.DOWN, Phase.STARTING, Phase.UP, Phase.ENDING, Phase.SWEEPING, Phase.STOPPED
A = Action
# Rows: events. Columns: phases. Each cell: the actions, and the phase after them.
TABLE: dict[str, dict[Phase, tuple[list[Action], Phase]]] = {
    "tick early": {D: ([], D), S: ([], S), U: ([], U), E: ([], E), W: ([], W), X: ([], X)},
    "tick due": {
        D: ([A.SPAWN], S), S: ([A.ABORT], E), U: ([], U), E: ([A.KILL], E), W: ([A.SWEEP], W), X: ([], X),
    },
    "alive": {D: ([], D), S: ([], U), U: ([], U), E: ([], E), W: ([], W), X: ([], X)},
    "hung": {D: ([], D), S: ([A.ABORT], E), U: ([A.ABORT], E), E: ([], E), W: ([], W), X: ([], X)},
    "stopped from outside": {
        D: ([], D), S: ([A.KILL], E), U: ([A.KILL], E), E: ([], E), W: ([], W), X: ([], X),
    },
    "ordered": {
        D: ([A.SPAWN], S), S: ([A.ORDER_STOP], E), U: ([A.ORDER_STOP], E), E: ([], E), W: ([], W), X: ([], X),
    },
    "exited": {
        D: ([], D), S: ([A.RECLAIM, A.SWEEP], W), U: ([A.RECLAIM, A.SWEEP], W), E: ([A.RECLAIM, A.SWEEP], W),
        W: ([], W), X: ([], X),
    },
    "something left": {D: ([], D), S: ([], S), U: ([], U), E: ([], E), W: ([], W), X: ([], X)},
    "nothing left": {D: ([], D), S: ([], S), U: ([], U), E: ([], E), W: ([], D), X: ([], X)},
    "stop": {
        D: ([], X), S: ([A.ORDER_STOP], E), U: ([A.ORDER_STOP], E), E: ([], E), W: ([], W), X: ([], X),
    },
}  # fmt: skip


@pytest.mark.parametrize("event", TABLE)
@pytest.mark.parametrize("phase", Phase)
def test_every_event_in_every_phase_does_what_the_table_says(phase: Phase, event: str) -> None:
    supervisor = in_phase(phase)
    assert (EVENTS[event](supervisor), supervisor.phase) == TABLE[event][phase]


@pytest.mark.parametrize("phase", Phase)
def test_a_stop_in_any_phase_ends_in_stopped_and_starts_nothing(phase: Phase) -> None:
    supervisor = in_phase(phase)
    actions = supervisor.stop(NOW)
    actions += supervisor.tick(supervisor.due_s or NOW)
    actions += supervisor.exited(NOW + 1, "ended")
    actions += supervisor.swept(NOW + 2, is_empty=True)
    actions += supervisor.tick(NOW + 1000)
    actions += supervisor.ordered(NOW + 1001, "too late")
    assert supervisor.phase is Phase.STOPPED
    assert Action.SPAWN not in actions
    assert supervisor.due_s is None


def test_an_empty_sweep_starts_the_next_worker_only_after_the_backoff() -> None:
    supervisor = in_phase(Phase.SWEEPING)
    assert supervisor.swept(NOW, is_empty=True) == []
    assert supervisor.due_s is not None
    assert NOW + 0.75 <= supervisor.due_s <= NOW + 1.0
    assert supervisor.tick(supervisor.due_s - 0.01) == []
    assert supervisor.tick(supervisor.due_s) == [Action.SPAWN]


def test_an_ordered_restart_has_no_backoff_and_counts_no_death() -> None:
    supervisor = in_phase(Phase.UP)
    supervisor.ordered(NOW, "operator")
    supervisor.exited(NOW + 1, "exited")
    assert supervisor.swept(NOW + 1, is_empty=True) == [Action.SPAWN]
    assert (supervisor.deaths, supervisor.backoff.deaths, supervisor.restarts) == (0, 0, 1)


def test_an_order_counts_once_and_the_next_death_waits_again() -> None:
    supervisor = in_phase(Phase.UP)
    supervisor.ordered(NOW, "operator")
    supervisor.exited(NOW + 1, "exited")
    supervisor.swept(NOW + 1, is_empty=True)
    supervisor.alive(NOW + 2)
    supervisor.exited(NOW + 3, "crashed")
    assert supervisor.swept(NOW + 3, is_empty=True) == []
    assert (supervisor.deaths, supervisor.phase) == (1, Phase.DOWN)


def test_a_worker_that_does_not_go_after_its_order_is_killed_again_and_again() -> None:
    supervisor = in_phase(Phase.UP)
    supervisor.ordered(NOW, "operator")
    assert supervisor.tick(NOW + STOP_GRACE_S - 0.1) == []
    assert supervisor.tick(NOW + STOP_GRACE_S) == [Action.KILL]
    assert supervisor.tick(NOW + STOP_GRACE_S + KILL_REPEAT_S) == [Action.KILL]


def test_an_abort_that_does_not_end_the_worker_is_followed_by_a_kill() -> None:
    supervisor = in_phase(Phase.UP)
    supervisor.condemned(NOW, "hung", is_stopped=False)
    assert supervisor.tick(NOW + ABORT_GRACE_S - 0.01) == []
    assert supervisor.tick(NOW + ABORT_GRACE_S) == [Action.KILL]


def test_a_worker_whose_board_never_lives_is_ended_at_the_start_limit() -> None:
    supervisor = make()
    assert supervisor.tick(NOW) == [Action.SPAWN]
    assert supervisor.tick(NOW + START_LIMIT_S - 0.1) == []
    assert supervisor.tick(NOW + START_LIMIT_S) == [Action.ABORT]
    assert "silent" in supervisor.reason


def test_the_reason_of_our_own_ending_outlives_the_exit_that_it_causes() -> None:
    supervisor = in_phase(Phase.UP)
    supervisor.condemned(NOW, "its loop has not moved", is_stopped=False)
    supervisor.exited(NOW + 1, "died of SIGABRT")
    assert supervisor.reason == "its loop has not moved"


def test_a_sweep_that_does_not_end_alarms_once_per_interval_and_starts_nothing() -> None:
    supervisor = in_phase(Phase.SWEEPING)
    seen: list[Action] = []
    now = NOW
    for _ in range(int(2.5 * SWEEP_ALARM_S / SWEEP_REPEAT_S)):
        now += SWEEP_REPEAT_S
        seen += supervisor.tick(max(now, supervisor.due_s or now))
        seen += supervisor.swept(now, is_empty=False)
    assert seen.count(Action.ALARM) == 2
    assert Action.SPAWN not in seen


def test_a_spawn_that_fails_is_tried_again_after_a_growing_delay() -> None:
    supervisor = make()
    now, waits = NOW, []
    for _ in range(4):
        assert supervisor.tick(now) == [Action.SPAWN]
        supervisor.spawn_failed(now, "no memory")
        assert supervisor.due_s is not None
        waits.append(supervisor.due_s - now)
        now = supervisor.due_s
    assert waits == sorted(waits)
    assert waits[-1] > 4 * waits[0]
    assert supervisor.deaths == 4


def test_an_operator_restarts_a_failed_worker_at_once_and_it_is_forgiven() -> None:
    supervisor = in_phase(Phase.DOWN)
    supervisor.backoff.deaths = 9
    assert supervisor.ordered(NOW, "uncordoned") == [Action.SPAWN]
    assert not supervisor.backoff.is_exhausted


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*EVENTS, "spawn failed"]),
            st.floats(min_value=0, max_value=40, allow_nan=False),
        ),
        max_size=60,
    )
)
@settings(max_examples=300, deadline=None)
def test_no_order_of_events_makes_two_workers_or_starts_one_beside_leftovers(events: list[tuple[str, float]]) -> None:
    supervisor = make()
    now = NOW
    exists = False  # something of a worker is there: spawned, and not yet swept
    has_stopped = False
    for name, passed_s in events:
        now += passed_s
        if name == "spawn failed":
            if supervisor.phase is not Phase.STARTING or not exists:
                continue
            supervisor.spawn_failed(now, "no memory")
            exists, actions = False, []
        elif name == "nothing left":
            if supervisor.phase is Phase.SWEEPING:
                exists = False
            actions = supervisor.swept(now, is_empty=True)
        elif name == "stop":
            actions, has_stopped = supervisor.stop(now), True
        else:
            actions = {
                "tick early": lambda: supervisor.tick(now),  # noqa: B023
                "tick due": lambda: supervisor.tick(now),  # noqa: B023
                "alive": lambda: supervisor.alive(now),  # noqa: B023
                "hung": lambda: supervisor.condemned(now, "hung", is_stopped=False),  # noqa: B023
                "stopped from outside": lambda: supervisor.condemned(now, "stopped", is_stopped=True),  # noqa: B023
                "ordered": lambda: supervisor.ordered(now, "operator"),  # noqa: B023
                "exited": lambda: supervisor.exited(now, "died") if exists else [],  # noqa: B023
                "something left": lambda: supervisor.swept(now, is_empty=False),  # noqa: B023
            }[name]()
        assert actions.count(Action.SPAWN) <= 1
        if Action.SPAWN in actions:
            assert not exists
            assert not has_stopped
            exists = True
        assert (supervisor.phase in (Phase.STARTING, Phase.UP, Phase.ENDING, Phase.SWEEPING)) == exists
        if supervisor.phase is Phase.STOPPED:
            assert not exists
        elif supervisor.phase is not Phase.UP:
            assert supervisor.due_s is not None, "nothing would ever happen again"
