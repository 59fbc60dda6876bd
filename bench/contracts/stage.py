"""Where a contract plays: the adapter under test, the decoders it was given, and what most contracts do with both."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from bench.contracts.adapter import LIMIT_S, Adapter, TurnHandle
from bench.contracts.process import ProcessDecoder
from bench.contracts.scripted import ContractBroken, ScriptedDecoder, echo
from bench.schemes.messages import TurnFailed


class Stage:
    """Opens the adapter over the decoders that the contract asks for, and ends all of it."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._changed = threading.Condition()
        self._decoders: list[ScriptedDecoder] = []
        self._processes: list[ProcessDecoder] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.adapter.close()
        for decoder in self._decoders:
            decoder.close()
        for process in self._processes:
            process.close()

    def open_scripted(self, count: int) -> list[ScriptedDecoder]:
        self._decoders = [ScriptedDecoder(self._changed) for _ in range(count)]
        self.adapter.open(self._decoders)
        return self._decoders

    def open_processes(self, count: int) -> None:
        self._processes = [ProcessDecoder() for _ in range(count)]
        self.adapter.open(self._processes)

    def start(self, prompt: list[int], max_new: int, *, stop_ids: frozenset[int] = frozenset()) -> TurnHandle:
        return self.adapter.start_turn(prompt, max_new, stop_ids=stop_ids)

    def wait_serving(self, prompt: list[int], timeout_s: float = LIMIT_S) -> ScriptedDecoder:
        """The decoder that received the GEN with this prompt."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._serving(prompt) is not None, timeout_s):
                raise ContractBroken("no decoder was given the turn")
            decoder = self._serving(prompt)
        assert decoder is not None
        return decoder

    def other(self, decoder: ScriptedDecoder) -> ScriptedDecoder:
        """The other one of two."""
        return next(candidate for candidate in self._decoders if candidate is not decoder)

    def play_echo(self) -> None:
        for decoder in self._decoders:
            decoder.play_echo()

    def _serving(self, prompt: list[int]) -> ScriptedDecoder | None:
        return next((decoder for decoder in self._decoders if decoder.has_received(prompt)), None)


def prompt_of(turn: int, length: int = 5) -> list[int]:
    """A prompt whose ids no other turn has: a token tells whose it is."""
    return [1000 * (turn + 1) + position for position in range(length)]


def demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ContractBroken(otherwise)


def take(turn: TurnHandle, count: int) -> list[int]:
    """Exactly so many tokens, and no look at what follows."""
    tokens: list[int] = []
    for _ in range(count):
        token = turn.next_token()
        if token is None:
            raise ContractBroken(f"the turn ended after {len(tokens)} of {count} tokens")
        tokens.append(token)
    return tokens


def take_all(turn: TurnHandle) -> list[int]:
    """Every token up to the turn's own end."""
    tokens: list[int] = []
    while (token := turn.next_token()) is not None:
        tokens.append(token)
    return tokens


def demand_tokens(turn: TurnHandle, expected: Sequence[int], whose: str) -> None:
    """The rest of the turn is exactly this."""
    tokens = take_all(turn)
    demand(tokens == list(expected), f"{whose} received {_short(tokens)} in place of {_short(expected)}")


def read_out(turn: TurnHandle) -> None:
    """Read to the end of a turn, however the scheme tells its caller how it ended."""
    try:
        take_all(turn)
    except TurnFailed:
        pass


def demand_echo(turn: TurnHandle, prompt: list[int], max_new: int, whose: str) -> None:
    demand_tokens(turn, echo(prompt, max_new), whose)


def together(plays: Sequence[Callable[[], None]]) -> None:
    """Play all at once, each in a thread, and raise the first failure.

    Turns that wait for one decoder are read like this: no order is promised, and one that runs may wait for its reader.
    """
    failures: list[Exception] = []

    def attempt(play: Callable[[], None]) -> None:
        try:
            play()
        except Exception as error:  # noqa: BLE001  top of a thread: raised below
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(play,)) for play in plays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def demand_echoes(turns: Sequence[tuple[TurnHandle, list[int], int]]) -> None:
    """Of turns that wait together, each given with its prompt and max_new: every one has its own echo."""
    together(
        [
            functools.partial(demand_echo, turn, prompt, max_new, f"turn {number} of those that waited")
            for number, (turn, prompt, max_new) in enumerate(turns, 1)
        ]
    )


def demand_stop(decoder: ScriptedDecoder) -> None:
    """After its GEN the decoder is told to stop, before anything else: what else would come before the DONE it owes."""
    command = decoder.wait_command(1).text
    demand(command == "STOP", f"{command[:20]!r} was written in place of STOP, while the decoder owed a DONE")


def demand_no_error(turn: TurnHandle, whose: str) -> None:
    error = turn.error()
    if error is not None:
        raise ContractBroken(f"{whose} was told of an error that is not its own: {error}")


def demand_nothing(turn: TurnHandle, whose: str) -> None:
    """A turn that never ran ends without a token; whether it ends quietly or with an error is the scheme's choice."""
    try:
        token = turn.next_token()
    except TurnFailed:
        return
    demand(token is None, f"{whose} never ran and received token {token}")


def _short(ids: Sequence[int]) -> str:
    if len(ids) <= 13:
        return f"{list(ids)}"
    return f"{list(ids[:8])} and {len(ids) - 8} more"
