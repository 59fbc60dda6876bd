"""Which request is at fault when a decoder dies. Pure.

A decoder's death by its own doing (a crash, an assertion, a hang) accuses every turn it was running, and most of them are
innocent. These rules find the guilty one, mostly at its second death, and spare the others:

1. A death without a suspect makes each of its turns one, until it has made CLEARED_TOKENS more tokens elsewhere.
2. No two suspects share a decoder (the pool asks `may_join`).
3. When a decoder dies that ran a suspect, the suspect is convicted, and the rest are not even suspects. Cleared turns beside
   it count with the rest: they have shown that they can run.
4. Poison that works slowly is cleared each time. A turn that was cleared and dies alone is convicted too; one that dies in
   company is a suspect anew, and refused at its `limit`th relapse.

A death from outside (SIGKILL by somebody, a worker's own death) accuses nobody. But a turn that loses IDLE_LOSSES decoders
in a row that way without having gained a token in between is refused too: something about it kills quietly, and it would
go on for ever. What no request can bring about (SIGSTOP, a worker killed by somebody) does not count at all: settlement.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass

CLEARED_TOKENS = 16
IDLE_LOSSES = 4


@dataclass(slots=True, eq=False)
class Record:
    """What a turn has been present at. `tokens_at_loss`: how many it had received when it was last accused."""

    deaths: int = 0
    relapses: int = 0
    idle_losses: int = 0
    tokens_at_loss: int = 0
    tokens_at_idle_loss: int = 0

    def is_suspect(self, tokens: int) -> bool:
        return self.deaths > 0 and tokens < self.tokens_at_loss + CLEARED_TOKENS


def may_join(is_suspect: bool, running: Iterable[bool]) -> bool:
    """Whether a turn may run beside others, given which of them are suspects."""
    return not (is_suspect and any(running))


def accuse(present: list[tuple[Record, int]], *, is_external: bool, limit: int) -> list[bool]:
    """A decoder died while these turns (record, tokens received) ran on it: which of them are refused from now on."""
    if is_external:
        return [_lose(record, tokens) for record, tokens in present]
    suspects = [record for record, tokens in present if record.is_suspect(tokens)]
    refused = []
    for record, tokens in present:
        is_alone = len(suspects) == 1 if suspects else len(present) == 1
        if suspects and record not in suspects:
            refused.append(False)
            continue
        if is_alone or not record.deaths:
            record.deaths += 1
        else:
            record.relapses += 1
        record.tokens_at_loss = tokens
        refused.append(record.deaths >= limit or record.relapses >= limit)
    return refused


def _lose(record: Record, tokens: int) -> bool:
    is_idle = record.idle_losses > 0 and tokens == record.tokens_at_idle_loss
    record.idle_losses = record.idle_losses + 1 if is_idle else 1
    record.tokens_at_idle_loss = tokens
    return record.idle_losses >= IDLE_LOSSES
