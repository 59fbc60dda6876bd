"""The eighteen contracts by name, and how one is played."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.contracts import accounts, early_ends, whole_turns
from bench.contracts.adapter import Adapter
from bench.contracts.stage import Stage

Play = Callable[[Stage], None]

WHOLE_TURNS: tuple[Play, ...] = (
    whole_turns.whole_turn,
    whole_turns.decoder_error,
    whole_turns.delayed_done,
    whole_turns.slow_consumer,
    whole_turns.independent_replicas,
    whole_turns.eighty_turns,
    whole_turns.cancel_while_queued,
    whole_turns.nonfinite_forgets,
    whole_turns.real_pipes,
)
EARLY_ENDS: tuple[Play, ...] = (
    early_ends.end_of_turn,
    early_ends.early_close,
    early_ends.stop_string,
    early_ends.consumer_exception,
    early_ends.failed_drain,
    early_ends.late_done,
    early_ends.real_pipes_left,
)
ACCOUNTS: tuple[Play, ...] = (
    accounts.figures_after_hand_over,
    accounts.figures_of_closed_turn,
)
CONTRACTS: tuple[Play, ...] = (*WHOLE_TURNS, *EARLY_ENDS, *ACCOUNTS)


def names_of(contracts: tuple[Play, ...]) -> frozenset[str]:
    return frozenset(contract.__name__ for contract in contracts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a contract ended; `reason` is None if it was kept."""

    contract: str
    reason: str | None
    seconds: float


def play(contract: Play, make_adapter: Callable[[], Adapter]) -> Outcome:
    """Play one contract over a fresh adapter. Whatever it raises is how the scheme broke it."""
    started = time.monotonic()
    reason: str | None = None
    try:
        with Stage(make_adapter()) as stage:
            contract(stage)
    except Exception as error:  # noqa: BLE001  becomes the outcome
        reason = f"{type(error).__name__}: {error}"
    return Outcome(contract.__name__, reason, round(time.monotonic() - started, 3))
