"""A real ringfence-decoder behind pipes, for tests: every read has a deadline, every line is checked by the project's parser."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from native.answers import AnswerParser
from native.dialect import Dialect
from tests.tiny_model import FIRST_BYTE, SPECIALS, VOCAB_SIZE, byte_symbols, merge_pairs

DEADLINE_S = 20.0


def find_decoder() -> Path | None:
    """$RINGFENCE_DECODER, this tree's own, or the installed one; None if there is none."""
    here = Path(__file__).resolve().parents[2] / "native/bin/ringfence-decoder"
    installed = (Path(entry) / "native/bin/ringfence-decoder" for entry in sys.path)
    named = os.environ.get("RINGFENCE_DECODER")
    candidates = [Path(named)] if named else [here, *installed, Path("/tmp/dec/build/ringfence-decoder")]
    return next((path for path in candidates if path.is_file()), None)


def text_of(ids: Iterable[int]) -> str:
    """What the tiny model's tokens spell; special tokens spell nothing."""
    symbols = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    pieces = [*("" for _ in SPECIALS), *symbols, *(left + right for left, right in merge_pairs())]
    return bytes(symbols[symbol] for id_ in ids for symbol in pieces[id_]).decode(errors="replace")


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt of ordinary tokens that differs for each seed."""
    return [FIRST_BYTE + (seed * 7919 + i * i * 31 + i * 17) % (VOCAB_SIZE - FIRST_BYTE) for i in range(length)]


@dataclass
class Answer:
    """All lines of one request, without their tags."""

    lines: list[str] = field(default_factory=list)

    def words(self, name: str) -> list[list[str]]:
        return [line.split()[1:] for line in self.lines if line.split()[0] == name]

    @property
    def tokens(self) -> list[int]:
        return [int(words[0]) for words in self.words("T")]

    @property
    def logprobs(self) -> list[float]:
        return [float(words[1]) for words in self.words("T")]

    @property
    def alternatives(self) -> list[list[tuple[int, float]]]:
        pairs = ([pair.split(":") for pair in words[2].split(",")] for words in self.words("T"))
        return [[(int(id_), float(logprob)) for id_, logprob in pair] for pair in pairs]

    @property
    def done(self) -> list[str]:
        assert self.lines[-1].startswith("DONE"), self.lines[-1]
        return self.lines[-1].split()[1:]

    @property
    def finish(self) -> str:
        return self.done[4]

    @property
    def error(self) -> str:
        assert self.lines[-1].startswith("ERR "), self.lines[-1]
        return self.lines[-1][4:]

    @property
    def reused(self) -> int:
        return int(self.done[7])

    @property
    def prompt_read(self) -> int:
        return int(self.done[13])


class DecoderProcess:
    """Starts the decoder and waits for READY. As a context manager it is killed at the end."""

    def __init__(self, binary: Path, model: Path, *options: str, stdout: int | None = None) -> None:
        self.process = subprocess.Popen(
            [binary, "--model", model, "--threads", "1", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self.info: dict[str, str] = {}
        self.untagged: list[str] = []
        self._parser = AnswerParser(Dialect.TAGGED, VOCAB_SIZE)
        self._buffer = b""
        self._answers: dict[int, Answer] = {}
        self._last_rid = 0
        if stdout is None:
            while not (line := self.read_line()).startswith("READY"):
                self.info.update(dict(word.split("=", 1) for word in line.split()[1:]))
            self.ready = line

    def __enter__(self) -> DecoderProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def send(self, *lines: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(line + "\n" for line in lines).encode())

    def read_line(self, timeout_s: float = DEADLINE_S) -> str:
        """The next line. Raises TimeoutError, or EOFError when the decoder has gone."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no line within {timeout_s} s")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise EOFError("the decoder closed its output")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        self._parser.parse(line)  # raises ProtocolViolation
        return line.decode()

    def read_answer_line(self) -> tuple[int, str]:
        """The next tagged line, as request id and text; it is also kept for `answer`."""
        while True:
            text, separator, tag = self.read_line().rpartition(" #")
            if separator:
                self._answers.setdefault(int(tag), Answer()).lines.append(text)
                return int(tag), text
            self.untagged.append(tag)

    def begin(self, max_new: int, ids: Sequence[int], **keys: object) -> int:
        """Sends a GEN and returns its request id."""
        self._last_rid += 1
        options = "".join(f" {key}={value}" for key, value in keys.items())
        self.send(f"GEN {self._last_rid} {max_new}{options} {','.join(map(str, ids))}")
        return self._last_rid

    def embed(self, ids: Sequence[int]) -> int:
        self._last_rid += 1
        self.send(f"EMB {self._last_rid} {','.join(map(str, ids))}")
        return self._last_rid

    def answer(self, rid: int) -> Answer:
        """Waits until the request is over."""
        while True:
            answer = self._answers.get(rid)
            if answer is not None and answer.lines[-1].startswith(("DONE ", "ERR ")):
                return answer
            self.read_answer_line()

    def generate(self, max_new: int, ids: Sequence[int], **keys: object) -> Answer:
        return self.answer(self.begin(max_new, ids, **keys))

    def wait_for(self, rid: int, word: str, count: int = 1) -> None:
        """Until the request has sent so many lines that begin with the word."""
        while rid not in self._answers or len(self._answers[rid].words(word)) < count:
            self.read_answer_line()

    def wait_for_exit(self, timeout_s: float = DEADLINE_S) -> int:
        return self.process.wait(timeout_s)

    def cpu_s(self) -> float:
        """Processor time of all threads."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
