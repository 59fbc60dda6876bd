"""What became of one request, and the sum over many."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.chaos.answers import Answer
from bench.chaos.comparison import Difference

_KEPT = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer, judged. ties: 1 if it parts from the recorded one where two candidates' logits are as good as equal."""

    checked: int = 0
    difference: Difference = field(default_factory=Difference)
    ties: int = 0
    unchecked: int = 0
    fault: str = ""


@dataclass(slots=True)
class Tally:
    """Sums over a run. Times in seconds."""

    requests: int = 0
    left: int = 0
    failed: int = 0
    checked: int = 0
    unchecked: int = 0
    ties: int = 0
    moves: int = 0
    difference: Difference = field(default_factory=Difference)
    longest_gap_s: float = 0.0
    longest_wait_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    @property
    def is_lossless(self) -> bool:
        return not (self.failed or self.difference)

    def add(self, name: str, answer: Answer, verdict: Verdict) -> None:
        """Count one request."""
        fault = verdict.fault or answer.fault
        if answer.id and answer.id in self.ids:
            fault = f"the id {answer.id} was used before"
        self.ids.add(answer.id)
        self.requests += 1
        self.left += answer.has_left
        self.failed += bool(fault)
        self.checked += verdict.checked
        self.unchecked += verdict.unchecked
        self.ties += verdict.ties
        self.moves += answer.moves
        self.difference += verdict.difference
        self.longest_gap_s = max(self.longest_gap_s, answer.longest_gap_s)
        self.longest_wait_s = max(self.longest_wait_s, answer.first_s)
        if fault or verdict.difference:
            self.faults.append(f"{name}: {fault or verdict.difference}")
            del self.faults[_KEPT:]
