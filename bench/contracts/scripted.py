"""A decoder whose every line a contract decides and whose every command it sees, in this process or in another.

In this process `connect()` makes two OS pipes. For another process `command` is the relay's argv; it connects to an
abstract Unix socket of ours and carries its stdin and stdout over it. Either way a session thread reads commands and
appends them to `log`, and lines are written by `emit` on the contract's thread, or by `play_echo` on the session's.
All decoders of one contract share one condition, so a contract can wait for whichever of them is chosen. It is held
while lines are written: what a contract leaves unread must fit a pipe (64 KiB).
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bench.contracts.adapter import LIMIT_S
from bench.schemes.messages import Pipes

CONTEXT = 32768
GREETING = f"INFO vocab=151936 model=scripted engine=scripted-1\nREADY {CONTEXT} stop\n".encode()
RELAY = Path(__file__).with_name("relay.py")


class ContractBroken(AssertionError):
    """The scheme did what the contract forbids, or did not do what it demands."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line between scheme and decoder, in the order in which the decoder saw it."""

    incarnation: int
    is_command: bool
    text: str


@dataclass(frozen=True, slots=True)
class Gen:
    """A GEN as the decoder understood it."""

    incarnation: int
    max_new: int
    prompt: list[int]

    @classmethod
    def parse(cls, command: Line) -> Gen:
        words = command.text.split(" ")
        return cls(command.incarnation, int(words[1]), [int(word) for word in words[-1].split(",")])


def echo(prompt: list[int], max_new: int) -> list[int]:
    """What a decoder answers that repeats its prompt."""
    return [prompt[position % len(prompt)] for position in range(max_new)]


class ScriptedDecoder:
    """A decoder played by a contract. `changed` is shared by the contract's decoders and guards all their state."""

    def __init__(self, changed: threading.Condition) -> None:
        self.log: list[Line] = []
        self._changed = changed
        self._incarnations = 0
        self._answers: BinaryIO | None = None
        self._is_echoing = False
        self._listener: socket.socket | None = None
        self._name = f"ringfence-contract-{secrets.token_hex(8)}"

    @property
    def command(self) -> list[str]:
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind("\0" + self._name)
            self._listener.listen()
            threading.Thread(target=self._accept, args=(self._listener,), name="decoder-listener", daemon=True).start()
        return [sys.executable, "-I", "-S", str(RELAY), self._name]

    def connect(self) -> Pipes:
        commands_out, commands_in = os.pipe()
        answers_out, answers_in = os.pipe()
        self._begin_session(os.fdopen(commands_out, "rb"), os.fdopen(answers_in, "wb"))
        return Pipes(stdin=os.fdopen(commands_in, "wb"), stdout=os.fdopen(answers_out, "rb"))

    def close(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    # What the contract sees

    def commands(self) -> list[Line]:
        """Every command received, of all incarnations, in order."""
        with self._changed:
            return self._commands()

    def gens(self) -> list[Gen]:
        with self._changed:
            return self._gens()

    def wait_command(self, index: int, timeout_s: float = LIMIT_S) -> Line:
        """The command with this index, counted over all incarnations from 0."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._commands()) > index, timeout_s):
                raise ContractBroken(f"command {index} never reached the decoder")
            return self._commands()[index]

    def wait_gen(self, index: int, timeout_s: float = LIMIT_S) -> Gen:
        """The GEN with this index, counted over all incarnations from 0."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._gens()) > index, timeout_s):
                raise ContractBroken(f"GEN {index} never reached the decoder")
            return self._gens()[index]

    def has_received(self, prompt: list[int]) -> bool:
        """Whether a GEN with exactly this prompt came, in any incarnation."""
        return any(gen.prompt == prompt for gen in self.gens())

    # What the contract decides

    def emit(self, *lines: str) -> None:
        """Write lines in one write, by the present incarnation."""
        with self._changed:
            self._emit(lines)

    def emit_tokens(self, *ids: int) -> None:
        self.emit(*(f"T {token}" for token in ids))

    def emit_done(self, gen: Gen, generated: int, finish: str = "stop", *, reused: int = 0) -> None:
        self.emit(done_line(gen, generated, finish, reused))

    def play_echo(self) -> None:
        """From the next GEN on, answer each at once with its own prompt, repeated up to max_new tokens."""
        with self._changed:
            self._is_echoing = True

    # Sessions

    def _commands(self) -> list[Line]:
        return [line for line in self.log if line.is_command]

    def _gens(self) -> list[Gen]:
        return [Gen.parse(line) for line in self._commands() if line.text.startswith("GEN ")]

    def _emit(self, lines: tuple[str, ...]) -> None:
        if self._answers is None:
            raise ContractBroken("the scheme has let go of the decoder while it owed an answer")
        self.log.extend(Line(self._incarnations, False, line) for line in lines)
        try:
            self._answers.write("".join(f"{line}\n" for line in lines).encode())
            self._answers.flush()
        except OSError as error:
            raise ContractBroken("the scheme does not read the decoder's answer") from error

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            self._begin_session(link.makefile("rb"), link.makefile("wb"))
            link.close()  # the two files hold it open

    def _begin_session(self, commands: BinaryIO, answers: BinaryIO) -> None:
        with self._changed:
            self._incarnations += 1
            self._answers = answers
            answers.write(GREETING)
            answers.flush()
            arguments = (self._incarnations, commands, answers)
        threading.Thread(target=self._session, args=arguments, name="decoder", daemon=True).start()

    def _session(self, incarnation: int, commands: BinaryIO, answers: BinaryIO) -> None:
        with commands, answers:
            try:
                for raw in commands:
                    text = raw.decode().rstrip("\r\n")
                    if text == "QUIT":
                        break
                    self._receive(Line(incarnation, True, text))
            except OSError:
                pass
            finally:
                with self._changed:
                    if self._answers is answers:
                        self._answers = None

    def _receive(self, command: Line) -> None:
        with self._changed:
            self.log.append(command)
            if self._is_echoing and command.text.startswith("GEN "):
                gen = Gen.parse(command)
                ids = echo(gen.prompt, gen.max_new)
                lines = ["REUSED 0", *(f"T {token}" for token in ids), done_line(gen, len(ids), "length", 0)]
                try:
                    self._emit(tuple(lines))
                except ContractBroken:
                    pass  # the scheme was closed meanwhile
            self._changed.notify_all()


def done_line(gen: Gen, generated: int, finish: str, reused: int) -> str:
    return f"DONE {generated} {len(gen.prompt)} 1.500 2.500 {finish} 0 0 {reused}"
