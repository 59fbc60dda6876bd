"""Which request is at fault when a decoder dies. Pure.

A decoder's death by its own doing (a crash, an assertion, a hang) accuses every turn it was running, and most of them are
innocent. Three rules find the guilty one at its second death and spare the others:

1. The first such death makes each of its turns a *suspect*, until it has made CLEARED_TOKENS more tokens elsewhere.
2. No two suspects share a decoder (the pool asks `may_join`).
3. When a decoder dies that ran exactly one turn with a death on its record, that turn is convicted and the rest are not even
   suspects. With several on record (cleared ones met again) all of those are suspects anew.

A death from outside (SIGKILL or SIGSTOP by somebody, a worker's own death) accuses nobody. But a turn that loses
IDLE_LOSSES decoders in a row that way without having gained a token in between is refused too: something about it kills
quietly, and it would go on for ever.
"""

from collections.abc import Iterable
from dataclasses import dataclass

CLEARED_TOKENS = 16
IDLE_LOSSES = 4


@dataclass(slots=True)
class Record:
    """What a turn has been present at. `tokens_at_loss`: how many it had received at its last death."""

    deaths: int = 0
    idle_losses: int = 0
    tokens_at_loss: int = 0

    def is_suspect(self, tokens: int) -> bool:
        return self.deaths > 0 and tokens < self.tokens_at_loss + CLEARED_TOKENS


def may_join(is_suspect: bool, running: Iterable[bool]) -> bool:
    """Whether a turn may run beside others, given which of them are suspects."""
    return not (is_suspect and any(running))


def accuse(present: list[tuple[Record, int]], *, is_external: bool, limit: int) -> list[bool]:
    """A decoder died while these turns (record, tokens received) ran on it: which of them are refused from now on."""
    if is_external:
        return [_lose(record, tokens) for record, tokens in present]
    on_record = [record for record, _ in present if record.deaths]
    refused = []
    for record, tokens in present:
        guilty = len(on_record) == 1 and record is on_record[0]
        if guilty or not on_record:
            record.deaths += 1
        if guilty or not on_record or record.deaths:
            record.tokens_at_loss = tokens
        refused.append(record.deaths >= limit)
    return refused


def _lose(record: Record, tokens: int) -> bool:
    record.idle_losses = record.idle_losses + 1 if record.idle_losses and tokens == record.tokens_at_loss else 1
    record.tokens_at_loss = tokens
    return record.idle_losses >= IDLE_LOSSES
