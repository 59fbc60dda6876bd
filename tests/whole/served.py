"""`ringfence serve` as a process of its own, and a small client of it.

with Served("--model", path, "--workers", "2") as server:
    server.post("/v1/completions", {...})
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

START_S = 60.0
STOP_S = 30.0
_LISTENING = re.compile(r"event=listening url=http://[^:]+:(\d+)")


class Served:
    """A running server. Its log is kept and shown when it does not come up."""

    def __init__(self, *options: str, is_ready: Callable[["Served"], bool] | None = None) -> None:
        self._options = options
        self._is_ready = is_ready or Served.all_ready
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by __exit__)
        self.port = 0

    def __enter__(self) -> "Served":
        root = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.cli", "serve", "--port", "0", *self._options],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            self.port = int(self._wait(lambda: self._found_port()))
            self._wait(lambda: self._is_ready(self))
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer. Raises AssertionError for any status but 200."""
        return self._call("POST", path, body)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Every event of a streamed answer, `[DONE]` checked and left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            events = list(_events(connection.getresponse()))
        finally:
            connection.close()
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def all_ready(self) -> bool:
        """Whether every worker serves."""
        try:
            health = self.get("/health")
        except (AssertionError, OSError):
            return False
        return bool(health["workers_serving"] == health["workers"] > 0)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        assert response.status == 200, (response.status, data)
        return json.loads(data)

    def _found_port(self) -> str | None:
        match = _LISTENING.search(self.log())
        return match[1] if match else None

    def _wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + START_S
        while not (found := condition()):
            assert self.process.poll() is None, f"the server ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"the server did not come up:\n{self.log()}"
            time.sleep(0.02)  # polling a process from outside: there is nothing to wait on
        return found


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    assert response.status == 200, (response.status, response.read())
    for line in response:
        if line.startswith(b"data: "):
            yield line[6:].decode().rstrip("\n")


def text_of(events: list[Any]) -> str:
    """The text of a streamed completion with one choice."""
    return "".join(choice["text"] for event in events for choice in event["choices"])
