"""The worker process: one thread, one epoll loop, sole owner of one decoder.

    doorbell   new requests, cancellations, orders      -> conversation.py (GEN, STOP on the decoder's stdin)
    stdout     the decoder's answers                     -> conversation.py (ring, results, the server's bell)
    stderr     the decoder's log                         -> keeper.py (the last lines kept, some passed on)
    pidfd      the decoder ended                         -> keeper.py (its turns end, a new one after a backoff)
    lifeline   the server is gone                        -> here: the decoder's group is killed, and we exit
    timer      a second's tick                           -> heartbeat, limits, retries

Nothing waits for anything but epoll, so the board's heartbeat tells whether tokens can move.
"""

import os
import signal
from typing import NoReturn

from shm.board import Board, Word, WorkerState
from shm.doorbell import Doorbell
from shm.orders import Orders, Wanted
from shm.ring import RingWriter
from shm.segment import Segment
from shm.slots import SlotHolder
from workers.conversation import Conversation
from workers.decoder import die_with_parent
from workers.exits import Exit, ExitKind
from workers.keeper import DecoderKeeper, note
from workers.loop import Loop
from workers.running import RunningTurns
from workers.settings import WorkerSettings


class WorkerProcess:
    """Joins the loop, the decoder's keeper and the conversation with it. `run` returns the exit code."""

    def __init__(
        self, settings: WorkerSettings, segment: Segment, *, bell: Doorbell, server_bell: Doorbell, lifeline_fd: int
    ) -> None:
        self.board = Board(segment)
        self.orders = Orders(segment)
        self.loop = Loop()
        self._bell = bell
        self._server_bell = server_bell
        self._holder = SlotHolder(segment)
        self._turns = RunningTurns(self._holder, RingWriter(segment), self.board)
        self._replacements = self.orders.replacements
        self.keeper = DecoderKeeper(settings, self.board, self.loop, bell=server_bell.ring)
        self.conversation = Conversation(
            settings,
            self.board,
            self._holder,
            self._turns,
            write=self.keeper.write,
            condemn=self.keeper.condemn,
            soon=self.loop.soon,
            show=self._show,
            note=lambda text: note(settings.index, text),
        )
        self.keeper.attach(self.conversation, self._on_decoder_ended)
        self.loop.watch(bell.fd, self._on_bell)
        self.loop.watch(lifeline_fd, self.die)

    def __repr__(self) -> str:
        return f"WorkerProcess(state={self.board.state}, keeper={self.keeper!r}, turns={self._turns!r})"

    def run(self) -> int:
        """Serve until told to stop."""
        self.board.state = WorkerState.STARTING
        return self.loop.run(self._tick)

    def die(self) -> NoReturn:
        """The server is gone (its end of the lifeline was closed): nothing may outlive it."""
        self.keeper.kill()
        os._exit(0)

    def _on_bell(self) -> None:
        self._bell.clear()
        for slot, generation in self._holder.arrivals():
            self.conversation.accept(slot, generation)
        if self._turns.by_rid:
            self.conversation.stop_cancelled()
        self._publish()
        self._obey()

    def _obey(self) -> None:
        """Compare what the server wants with what is."""
        orders, keeper, now = self.orders, self.keeper, self.loop.now()
        wanted = orders.wanted
        if wanted is Wanted.STOP:
            keeper.start_at_s = None
            keeper.quit(now)
            if keeper.decoder is None:
                self.loop.exit_code = 0
        elif wanted is Wanted.UNLOAD:
            keeper.start_at_s = None
            if keeper.decoder is not None and not self._turns.by_rid:
                keeper.quit(now)
            elif keeper.decoder is None and self.board.state is not WorkerState.UNLOADED:
                keeper.enter(WorkerState.UNLOADED)
        elif self._replacements != orders.replacements:
            self._replace(now)
        elif keeper.decoder is None and keeper.start_at_s is None:
            self._start(now)

    def _replace(self, now: float) -> None:
        self._replacements = self.orders.replacements
        self.board.set(Word.REPLACEMENTS, self._replacements)
        self.keeper.backoff.forgive()
        if self.keeper.decoder is None:
            self._start(now)
        else:
            self.keeper.condemn(Exit(ExitKind.KILLED, "replaced on order"))

    def _start(self, now: float) -> None:
        self.keeper.start_at_s = now
        self.loop.soon(now)

    def _on_decoder_ended(self) -> WorkerState | None:
        """Where to rest after a decoder's end, or None for another one."""
        if self.orders.wanted is Wanted.STOP:
            self.loop.exit_code = 0
            return WorkerState.STOPPING
        return WorkerState.UNLOADED if self.orders.wanted is Wanted.UNLOAD else None

    def _tick(self, now: float) -> None:
        """Once a second, or when something asked for it sooner."""
        if not self.board.get(Word.HEARTBEAT_NS):
            self._server_bell.ring()  # the board lives
        self.board.set(Word.HEARTBEAT_NS, int(now * 1e9))
        self.keeper.tick(now)
        self._publish()
        if self.orders.wanted is not Wanted.RUN:
            self._obey()

    def _show(self) -> None:
        if self._turns.publish():
            self._server_bell.ring()

    def _publish(self) -> None:
        if self._turns.has_parked and self.conversation.unpark(self.loop.now()):
            self._server_bell.ring()
        if self._turns.publish():
            self._server_bell.ring()


def install_signals(worker: WorkerProcess) -> None:
    """Signals of a worker.

    TERM, INT and HUP are ignored: a group's TERM must not end what the server is still draining, and the server's own
    orders and lifeline end a worker. When the server dies the kernel sends CONT, which wakes even a stopped worker, so
    that it sees its lifeline's end and can kill its decoder's group (a KILL would leave the decoder's children).
    """
    server = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def on_continue(_signal: int, _frame: object) -> None:
        if os.getppid() != server:
            worker.die()

    signal.signal(signal.SIGCONT, on_continue)
    die_with_parent(signal.SIGCONT)
