"""A decoder of the solo dialect as a program of its own: answers with its prompt, repeated up to max_new tokens.

Each token is one write, and commands are looked for between tokens, so a STOP takes effect in the middle of a turn
and a GEN that comes too early waits. Run by path, as `python -I -S echo_decoder.py`.
"""

from __future__ import annotations

import os
import select
from collections import deque

CONTEXT = 32768


class EchoDecoder:
    def __init__(self) -> None:
        self._pending: deque[bytes] = deque()
        self._partial = b""
        self._is_open = True

    def run(self) -> None:
        os.write(1, f"INFO vocab=151936 model=echo engine=echo-1\nREADY {CONTEXT} stop\n".encode())
        while self._is_open or self._pending:
            while self._pending:
                command = self._pending.popleft()
                if command == b"QUIT":
                    return
                if command.startswith(b"GEN "):
                    self._generate(command)
            self._read_commands()

    def _generate(self, command: bytes) -> None:
        words = command.split(b" ")
        max_new, prompt = int(words[1]), words[-1].split(b",")
        os.write(1, b"REUSED 0\n")
        generated, finish = 0, b"length"
        while generated < max_new:
            os.write(1, b"T " + prompt[generated % len(prompt)] + b"\n")
            generated += 1
            if self._is_stopped():
                finish = b"cancel"
                break
        os.write(1, b"DONE %d %d 0.100 0.200 %s\n" % (generated, len(prompt), finish))

    def _is_stopped(self) -> bool:
        if select.select([0], [], [], 0)[0]:
            self._read_commands()
        if self._pending and self._pending[0] == b"STOP":
            self._pending.popleft()
            return True
        return not self._is_open

    def _read_commands(self) -> None:
        chunk = os.read(0, 1 << 16)
        if not chunk:
            self._is_open = False
            return
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        self._pending.extend(lines)


if __name__ == "__main__":
    try:
        EchoDecoder().run()
    except BrokenPipeError:
        pass
