"""The real server as a process, over scripted decoders and the tiny model's vocabulary.

with scripted(folder, "--slots", "4", decoder={"burst": 10}) as server:
    server.stage.script(token_delay_s=0.01)
    ...
    await server.clean()

The decoders answer in tokens of two letters each, so that every token shows in the text. Prompts of `echo_prompt` are
ids that the vocabulary has.
"""

import asyncio
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests import tiny_model
from tests.fakes.echo import echo_prompt, expected
from tests.fakes.http import tiny_tokenizer
from tests.fakes.stage import Stage
from tests.whole.peer import Peer, call
from tests.whole.served import Served

KEY, ADMIN_KEY = "client-key-0", "admin-key-00"
ECHO_BASE, ECHO_SPAN = tiny_model.FIRST_BYTE + 256, 26 * 26
CONTEXT = 1024
STOP_S = 1.0
"""From a client's leaving to STOP in the decoder."""

_markers = itertools.count(1)


class Scripted:
    """A server whose decoders' journal and script are at hand."""

    def __init__(self, served: Served, stage: Stage) -> None:
        self.served = served
        self.stage = stage
        self.process = psutil.Process(served.process.pid)
        self._base_files = self.process.num_fds()
        self._base_children = self._children()

    @property
    def port(self) -> int:
        return self.served.port

    def peer(self) -> Peer:
        return Peer(self.port, key=KEY)

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return await call(self.port, method, path, body, key=KEY)

    async def status(self) -> Any:
        return (await self.call("GET", "/status"))[1]

    async def metrics(self) -> str:
        text: bytes = (await self.call("GET", "/metrics"))[1]
        return text.decode()

    async def tokens_out(self) -> int:
        """Tokens that decoders have made so far."""
        return sum(worker["board"]["tokens_out"] for worker in (await self.status())["workers"])

    def gens(self, marker: int) -> list[dict[str, Any]]:
        """GENs of the prompts with this marker that reached a decoder."""
        head = echo_prompt(marker)[:6]
        return [event for event in self.stage.events("GEN") if event["ids"][:6] == head]

    async def running(self, marker: int, count: int = 1) -> list[dict[str, Any]]:
        """Wait for the GENs of a marker."""
        await self.until(lambda: len(self.gens(marker)) >= count, f"{count} GEN of marker {marker}")
        return self.gens(marker)

    async def stops(self, gens: list[dict[str, Any]]) -> list[float]:
        """Wait until a STOP has reached each of these turns, and return when the first ones did."""

        def times() -> list[float]:
            found: dict[tuple[int, int], float] = {}
            for event in self.stage.events("STOP"):
                found.setdefault((event["pid"], event["rid"]), event["time"])
            return [found[key] for gen in gens if (key := (gen["pid"], gen["rid"])) in found]

        await self.until(lambda: len(times()) == len(gens), f"a STOP for each of {len(gens)} turns")
        return times()

    async def until(self, condition: Callable[[], Any], what: str, *, limit_s: float = 10.0) -> None:
        until_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < until_s, f"not within {limit_s} s: {what}\n{self.served.log()[-2000:]}"
            await asyncio.sleep(0.005)

    async def until_status(self, condition: Callable[[Any], Any], what: str, *, limit_s: float = 10.0) -> Any:
        until_s = time.monotonic() + limit_s
        while not condition(status := await self.status()):
            assert time.monotonic() < until_s, f"not within {limit_s} s: {what}: {status}"
            await asyncio.sleep(0.01)
        return status

    async def clean(self, *, limit_s: float = 10.0) -> None:
        """Nothing runs or waits, nothing was leaked, and a fresh request is served."""
        await self.until_status(_is_idle, "idle", limit_s=limit_s)
        await self.until(lambda: self.process.num_fds() <= self._base_files, "its descriptors back", limit_s=limit_s)
        assert self._children() == self._base_children, "children of the server"
        marker = new_marker()
        status, answer = await self.call("POST", "/v1/completions", {"prompt": echo_prompt(marker), "max_tokens": 3})
        assert status == 200, answer
        assert answer["choices"][0]["text"] == text_of(marker, 3)

    def _children(self) -> int:
        return len(self.process.children(recursive=True))


def _is_idle(status: Any) -> bool:
    queue = status["queue"]
    boards = [worker["board"] for worker in status["workers"]]
    return status["running"] == queue["requests"] == queue["reserved"] == queue["tokens"] == 0 and not any(
        board["running"] or board["parked"] for board in boards if board
    )


def new_marker() -> int:
    """One that no other request of this test run has."""
    return next(_markers)


def text_of(marker: int, tokens: int) -> str:
    """What the scripted decoders answer to `echo_prompt(marker)`."""
    ids = expected(echo_prompt(marker), tokens, base=ECHO_BASE, span=ECHO_SPAN)
    return tiny_tokenizer().decode(ids, special=False)


@contextmanager
def scripted(folder: Path, *options: str, decoder: dict[str, Any] | None = None, slots: int = 4) -> Iterator[Scripted]:
    """A running server with all middleware on."""
    model = tiny_model.build(folder / "tiny.gguf")
    stage = Stage(folder)
    keys = {"vocab": tiny_model.VOCAB_SIZE, "echo_base": ECHO_BASE, "echo_span": ECHO_SPAN, "context": CONTEXT}
    command = stage.command(**{**keys, "slots": slots, **(decoder or {})})
    given = {
        "--workers": "1",
        "--slots": str(slots),
        "--context": str(CONTEXT),
        "--api-key": KEY,
        "--admin-key": ADMIN_KEY,
    }
    given |= {"--cors-origins": "*", "--model-name": "tiny", "--backoff-first-s": "0.05"}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    words = [word for pair in given.items() for word in pair]
    with Served("--decoder-command", shlex.join(command), "--tokenizer", str(model), *words) as served:
        yield Scripted(served, stage)
    assert served.process.returncode == 0


_VISITOR = """
import socket, sys, time
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
    peer.sendall(sys.stdin.buffer.read())
    print(flush=True)
    while peer.recv(65536):
        pass
"""


async def visit(server: Scripted, body: Any) -> asyncio.subprocess.Process:
    """A client that is a process of its own, to be killed."""
    data = json.dumps(body).encode()
    head = Peer(server.port, key=KEY).head_of("POST", "/v1/completions", f"content-length: {len(data)}\r\n")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-E", "-c", _VISITOR, str(server.port), stdin=pipe, stdout=pipe, env={**os.environ}
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(head + data)
    process.stdin.close()
    await process.stdout.readline()
    return process
