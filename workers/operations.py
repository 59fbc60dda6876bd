"""What an operator can ask of a running pool. Each call waits until it has happened, or a limit has passed.

None of them loses a request: a worker is drained before it is touched, and what does not end within `drain_limit_s` goes
on elsewhere.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from shm.board import WorkerState
from shm.orders import Wanted
from workers.replica import Replica

_POLL_S = 0.02
_RESPAWN_LIMIT_S = 60.0


class Operations:
    """Administration of one pool. Indexes are those of the workers; an unknown one is an IndexError."""

    def __init__(
        self, replicas: Sequence[Replica], on_capacity: Callable[[], None], *, drain_limit_s: float = 300.0
    ) -> None:
        self._replicas = replicas
        self._on_capacity = on_capacity
        self._drain_limit_s = drain_limit_s
        self._rolling = asyncio.Lock()

    def __repr__(self) -> str:
        return f"Operations(workers={len(self._replicas)}, is_rolling={self._rolling.locked()})"

    async def restart(self, index: int) -> bool:
        """A new process and decoder; True once it serves again."""
        replica = self._replica(index)
        await self.drain(index)
        epoch = 0 if replica.incarnation is None else replica.incarnation.epoch
        replica.order_restart("restarted by an operator")
        await _until(lambda: replica.incarnation is not None and replica.incarnation.epoch != epoch, _RESPAWN_LIMIT_S)
        replica.is_draining = False
        return await _until(lambda: replica.is_serving, replica.settings.start_limit_s)

    async def restart_all(self) -> bool:
        """One worker after the other, so that the others serve meanwhile. Stops at the first that does not come back."""
        async with self._rolling:
            for replica in self._replicas:
                if not await self.restart(replica.index):
                    return False
        return True

    async def drain(self, index: int) -> bool:
        """Give it nothing new and wait for what it has; True when it has nothing left."""
        replica = self._replica(index)
        replica.is_draining = True
        return await _until(lambda: replica.running == 0, self._drain_limit_s)

    async def resume(self, index: int) -> bool:
        """End a drain; True when it serves."""
        replica = self._replica(index)
        replica.is_draining = False
        self._on_capacity()
        return replica.is_serving

    async def cordon(self, index: int) -> bool:
        """Give it nothing new until uncordoned; what it has goes on."""
        self._replica(index).is_cordoned = True
        return True

    async def uncordon(self, index: int) -> bool:
        """Lift a cordon, whoever put it: a worker or decoder that died too often is started at once."""
        replica = self._replica(index)
        replica.is_cordoned = False
        if replica.state in (WorkerState.FATAL, WorkerState.BACKOFF):
            if replica.incarnation is not None:
                replica.incarnation.replace_decoder()
            else:
                replica.order_restart("uncordoned by an operator")
        self._on_capacity()
        return replica.is_serving

    async def unload(self, index: int) -> bool:
        """Drain it and free its decoder's memory; it loads again on demand or by `load`."""
        replica = self._replica(index)
        await self.drain(index)
        replica.want(Wanted.UNLOAD)
        replica.is_draining = False
        return await _until(lambda: replica.state is WorkerState.UNLOADED, replica.settings.kill_grace_s + 5.0)

    async def load(self, index: int) -> bool:
        """Load an unloaded decoder; True when it serves."""
        replica = self._replica(index)
        replica.is_draining = False
        if not replica.is_serving:
            replica.wake()
        return await _until(lambda: replica.is_serving, replica.settings.start_limit_s)

    def _replica(self, index: int) -> Replica:
        if not 0 <= index < len(self._replicas):
            raise IndexError(f"there is no worker {index}; there are {len(self._replicas)}.")
        return self._replicas[index]


async def _until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition of the pool's own state; False when the limit passed first."""
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_POLL_S)
    return True
