"""One life of one worker process, seen from the server: its segment, its doorbells, its leases.

An incarnation is used for one process and thrown away with it, so nothing of a dead worker can reach its successor: not
memory, not a position, not a generation. It only moves data; what a death means is decided in replica.py and settlement.py.

Rules
- A lease joins a slot, a generation and a turn. A record is delivered only when all three agree; anything else is counted
  as stale and dropped.
- A slot returns to the free list with the END record of its lease's own generation, never before.
- The bell is cleared before the ring is read. A drain of a ring that was half full or more rings back, because the worker may
  be holding records for want of room.
- A full ring is delivered in portions, so that it holds up nobody else's request.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from shm.board import Board, Word
from shm.doorbell import Doorbell, lifeline
from shm.layout import Layout
from shm.orders import Orders, Wanted
from shm.ring import Kind, RingReader, bits_float
from shm.segment import Segment
from shm.slots import SlotLessor, SlotResult
from workers.job import Job
from workers.request import RequestKind
from workers.settings import WorkerSettings
from workers.turn import Turn

_ROOT = Path(__file__).resolve().parent.parent
PORTION = 2048  # records delivered without a pause: 1 to 2 ms of the event loop
_STDERR_READ_BYTES = 65536


class Lease(msgspec.Struct, eq=False, kw_only=True):
    """A turn in a slot. `first_token` is how many ids the turn had when it came: its earlier output, elsewhere."""

    slot: int
    generation: int
    tag: int  # of its records: the generation's 32 lower bits
    job: Job
    turn: Turn  # the job's, at hand for the hot path
    known_tokens: int
    first_token: int
    leased_s: float
    wants_logprobs: bool
    alternatives: list[tuple[int, float]]
    is_cancelled: bool = False


class Owner(Protocol):
    """Who hears of what the incarnation received."""

    def on_end(self, lease: Lease, result: SlotResult | None) -> None:
        """A turn's END arrived; None when the slot holds another generation's result (a fault of the worker)."""

    def on_board(self) -> None:
        """The worker rang: its board may say something new."""

    def on_exit(self) -> None:
        """The process ended and can be reaped."""

    def on_fault(self, reason: str) -> None:
        """The ring holds what no worker may write."""

    def on_stderr(self, line: str) -> None:
        """A line of the worker's stderr, its decoder's lines among them."""


class Incarnation:
    """A spawned worker process. Create it with `spawn`, in the main thread, inside a running event loop."""

    def __init__(
        self,
        *,
        owner: Owner,
        epoch: int,
        segment: Segment,
        process: "subprocess.Popen[bytes]",
        bells: tuple[Doorbell, Doorbell],
        lifeline_fd: int,
    ) -> None:
        self.epoch = epoch
        self.segment = segment
        self.board = Board(segment)
        self.orders = Orders(segment)
        self.lessor = SlotLessor(segment)
        self.reader = RingReader(segment)
        self.leases: list[Lease | None] = [None] * segment.layout.slots
        self.free = list(range(segment.layout.slots - 1, -1, -1))
        self.running = 0
        self._ended: list[Lease] = []
        self._seen_changes = -1
        self.stale = 0
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self._owner = owner
        self._process = process
        self._to_worker, self._from_worker = bells
        self._lifeline_fd = lifeline_fd
        self._stderr_partial = b""
        self._loop = asyncio.get_running_loop()
        assert process.stderr is not None
        self._stderr_fd = process.stderr.fileno()
        os.set_blocking(self._stderr_fd, False)
        self._loop.add_reader(self._from_worker.fd, self.on_bell)
        self._loop.add_reader(self.pidfd, self._on_exit)
        self._loop.add_reader(self._stderr_fd, self.read_stderr)

    def __repr__(self) -> str:
        return f"Incarnation(epoch={self.epoch}, pid={self.pid}, running={self.running}, board={self.board!r})"

    @classmethod
    def spawn(cls, owner: Owner, settings: WorkerSettings, layout: Layout, *, epoch: int) -> "Incarnation":
        """Start a worker process. Raises OSError when segment, pipes or process can't be had; nothing is left then."""
        opened: list[Callable[[], None]] = []
        try:
            segment = Segment.create(layout, epoch=epoch)
            opened.append(segment.close)
            to_worker = Doorbell.create()
            opened.append(to_worker.close)
            from_worker = Doorbell.create()
            opened.append(from_worker.close)
            ours, theirs = lifeline()
            opened += [ours.close, theirs.close]
            fds = {
                "segment": segment.fd,
                "bell": to_worker.fd,
                "server-bell": from_worker.fd,
                "lifeline": theirs.fileno(),
            }
            process = _start(settings, fds, epoch)
            opened.append(lambda: _abandon(process))
            incarnation = cls(
                owner=owner,
                epoch=epoch,
                segment=segment,
                process=process,
                bells=(to_worker, from_worker),
                lifeline_fd=ours.fileno(),
            )
        except BaseException:
            for close in reversed(opened):
                close()
            raise
        theirs.close()
        ours.detach()
        return incarnation

    @property
    def is_ready(self) -> bool:
        """Whether its decoder is ready and wanted."""
        return self.board.is_ready and self.orders.is_run

    @property
    def free_capacity(self) -> int:
        """Turns that it can take now."""
        return self.board.ready_capacity - self.running if self.orders.is_run else 0

    # ---- turns -----------------------------------------------------------------------------------------------------

    def lease(self, job: Job, *, known_tokens: int) -> Lease:
        """Put a turn into a free slot and ring. The caller has seen that one is free and that the request fits."""
        turn = job.turn
        request, received = turn.request, len(turn.ids)
        slot = self.free[-1]
        generation = self.lessor.publish(
            slot,
            kind=request.kind,
            prompt=job.prompt_text(),
            prompt_tokens=len(request.prompt) + received,
            max_new=request.max_new - received,
            resume=received,
            options=job.options,
        )
        self._to_worker.ring()
        self.free.pop()
        self.running += 1
        lease = Lease(
            slot=slot,
            generation=generation,
            tag=generation & 0xFFFFFFFF,
            job=job,
            turn=turn,
            known_tokens=known_tokens,
            first_token=received,
            leased_s=time.monotonic(),
            wants_logprobs=request.sampling.logprobs is not None,
            alternatives=[],
        )
        self.leases[slot] = lease
        return lease

    def cancel(self, turn: Turn) -> None:
        """Tell the worker to stop a turn, if it is here."""
        for lease in self.leases:
            if lease is not None and lease.turn is turn and not lease.is_cancelled:
                lease.is_cancelled = True
                self.lessor.cancel(lease.slot, lease.generation)
                self._to_worker.ring()

    def want(self, wanted: Wanted) -> None:
        """Change the worker's orders, and ring."""
        self.orders.wanted = wanted
        self._to_worker.ring()

    def replace_decoder(self) -> None:
        self.orders.replace_decoder()
        self._to_worker.ring()

    def on_bell(self) -> None:
        """The worker rang."""
        self._from_worker.clear()
        self._deliver()

    def _deliver(self) -> None:
        """A portion of what the ring holds; the loop runs others in between when there is more."""
        if self.pidfd < 0:
            return
        self.drain(PORTION)
        if self.reader.fill:
            self._loop.call_soon(self._deliver)
        if self._ended or self.board.get(Word.CHANGES) != self._seen_changes:
            # After those who were just woken have run: a token is waited for, the bookkeeping of an end is not.
            self._loop.call_soon(self._after_bell)

    def _after_bell(self) -> None:
        if self.pidfd < 0:
            return
        self._seen_changes = self.board.get(Word.CHANGES)
        self.settle()
        self._owner.on_board()

    def settle(self) -> None:
        """End the turns whose END was read."""
        ended, self._ended = self._ended, []
        for lease in ended:
            self._end(lease)

    def drain(self, limit: int = 1 << 62) -> None:
        """Deliver published records, at most `limit`."""
        is_worker_short = 2 * self.reader.fill >= self.reader.capacity
        try:
            records = self.reader.drain(limit)
        except ValueError as error:
            self._owner.on_fault(str(error))
            return
        if is_worker_short:
            self._to_worker.ring()
        leases = self.leases
        words = iter(records)
        for head, payload in zip(words, words, strict=True):
            slot = head >> 16 & 0xFFFF
            lease = leases[slot] if slot < len(leases) else None
            if lease is None or lease.tag != head >> 32:
                self.stale += 1
                continue
            kind = head & 0xFFFF
            if kind == Kind.TOKEN:
                turn = lease.turn
                if lease.wants_logprobs:
                    turn.logprobs.append(bits_float(payload & 0xFFFFFFFF))
                    turn.alternatives.append(lease.alternatives)
                    lease.alternatives = []
                turn.ids.append(payload >> 32)
                turn.wake()
            elif kind == Kind.END:
                self._ended.append(lease)
            elif kind == Kind.PROGRESS:
                lease.turn.prefilled = payload >> 32
            elif kind == Kind.ALTERNATIVE:
                lease.alternatives.append((payload >> 32, bits_float(payload & 0xFFFFFFFF)))
            else:
                self._owner.on_fault(f"record of unknown kind {kind}")

    def _end(self, lease: Lease) -> None:
        self.leases[lease.slot] = None
        self.free.append(lease.slot)
        self.running -= 1
        result = self.lessor.result(lease.slot, lease.generation)
        if lease.turn.request.kind is RequestKind.EMBED and result is not None:  # before the slot is used again
            lease.turn.embedding = self.lessor.payload(lease.slot, 4 * result.generated)
        self._owner.on_end(lease, result)

    def open_leases(self) -> list[Lease]:
        """Turns that have not ended here, oldest lease first."""
        return sorted((lease for lease in self.leases if lease is not None), key=lambda lease: lease.generation)

    # ---- the process -----------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Signal the worker itself. It is not reaped while this object is in use, so the pid is its own."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            pass

    def kill_group(self) -> None:
        """SIGKILL to the worker's process group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    @property
    def number(self) -> int:
        """The epoch as people read it: counted from 1 over all workers of this server."""
        return self.epoch & 0xFFFFF

    @property
    def decoder_pid(self) -> int:
        return self.board.get(Word.DECODER_PID)

    def reap(self) -> int:
        """Collect the ended process: its status, negative for a signal. Call after its session is known to be empty."""
        return self._process.wait()

    def exit_status(self) -> int | None:
        """The status of the ended process without reaping it, None while it runs."""
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def close(self) -> None:
        """Forget the process and free everything; idempotent."""
        if self.pidfd < 0:
            return
        self._loop.remove_reader(self._from_worker.fd)
        self._loop.remove_reader(self.pidfd)
        self._loop.remove_reader(self._stderr_fd)
        assert self._process.stderr is not None
        self._process.stderr.close()
        for fd in (self.pidfd, self._lifeline_fd):
            os.close(fd)
        self.pidfd = -1
        self._to_worker.close()
        self._from_worker.close()
        self.segment.close()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self.pidfd)
        self.read_stderr()
        self._owner.on_exit()

    def read_stderr(self) -> None:
        """Take what the worker and its decoder have written to stderr; also called before a death is judged."""
        try:
            data = os.read(self._stderr_fd, _STDERR_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._stderr_fd)
            return
        *lines, self._stderr_partial = (self._stderr_partial + data).split(b"\n")
        if len(self._stderr_partial) > _STDERR_READ_BYTES:
            lines.append(self._stderr_partial)
            self._stderr_partial = b""
        for line in lines:
            self._owner.on_stderr(line.decode("utf-8", "replace"))


def _abandon(process: "subprocess.Popen[bytes]") -> None:
    """End a worker that could not be taken into use."""
    assert process.stderr is not None
    process.kill()
    process.wait()
    process.stderr.close()


def _start(settings: WorkerSettings, fds: dict[str, int], epoch: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "workers", "--epoch", str(epoch)]
    for name, fd in fds.items():
        command += [f"--{name}-fd", str(fd)]
    command += ["--settings", msgspec.json.encode(settings).decode()]
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        bufsize=0,
        pass_fds=tuple(fds.values()),
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
