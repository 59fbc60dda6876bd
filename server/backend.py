"""What HTTP needs of a pool of workers. workers/pool.py is the real one; tests use tests/fakes/pool.py."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from workers.request import GenerationRequest
from workers.snapshot import Capabilities, PoolSnapshot
from workers.turn import Turn


class Reservation(Protocol):
    """A place in the queue, held while a prompt is being tokenised."""

    def release(self) -> None:
        """Give the place back. Harmless when it was given back or used."""

    def resize(self, tokens: int, /) -> None:
        """The prompt's size is known now. May raise Overloaded."""


class Operations(Protocol):
    """What an operator can ask. Each call waits until it has happened; False: its limit passed before that."""

    async def restart(self, index: int) -> bool: ...

    async def restart_all(self) -> bool: ...

    async def drain(self, index: int) -> bool: ...

    async def resume(self, index: int) -> bool: ...

    async def cordon(self, index: int) -> bool: ...

    async def uncordon(self, index: int) -> bool: ...

    async def unload(self, index: int) -> bool: ...

    async def load(self, index: int) -> bool: ...


class Backend(Protocol):
    """A pool of workers. All of it is called from the event loop that started it."""

    @property
    def context(self) -> int: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def operations(self) -> Operations: ...

    def reserve(self, *, prompt_tokens: int) -> Reservation:
        """Take a place in the queue. Raises Overloaded, ShuttingDown, NoWorkers."""

    def submit(self, request: GenerationRequest, reservation: Any = None) -> Turn:
        """Queue a request. Raises PromptTooLong, Unsupported, Overloaded, ShuttingDown."""

    def snapshot(self) -> PoolSnapshot: ...

    def begin_drain(self) -> None:
        """Take nothing new; what runs goes on."""

    async def start(self) -> None: ...

    async def stop(self, *, drain_s: float) -> None:
        """Let what runs end within drain_s, end the rest with ShuttingDown, and every process with it."""

    def stop_now(self) -> None:
        """End the drain of a stop that is under way."""

    def incidents(self) -> Sequence[Mapping[str, Any]]: ...
