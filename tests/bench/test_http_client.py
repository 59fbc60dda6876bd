"""The C client against a server that cuts its bytes where it hurts; and what is made of its trace. No times are asserted."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from bench.http_client import Call, ClientFailed, does_keep_alive, drive

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="bench/http_client.c needs a C compiler")

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = {"prompt": "x"}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def text(word: str) -> bytes:
    return f'data: {{"choices":[{{"index":0,"text":"{word}"}}],"usage":null}}\n\n'.encode()


def usage(tokens: int, prompt: int = 3) -> bytes:
    return f'data: {{"choices":[],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{tokens}}}}}\n\n'.encode()


def timings(cached: int) -> bytes:
    return f'data: {{"choices":[{{"text":"","finish_reason":"length"}}],"timings":{{"cache_n":{cached}}}}}\n\n'.encode()


def answer(*events: bytes) -> bytes:
    return HEAD + b"".join(map(chunk, events)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


GOOD = answer(text("a"), text("b") + text("c"), text(""), timings(7), usage(5))


class Peer:
    """A server that sends prepared pieces for each request. requests: the heads and bodies it was sent."""

    def __init__(self, pieces: Callable[[int], list[bytes]], *, closes: bool = False) -> None:
        self.requests: list[bytes] = []
        self._pieces = pieces
        self._closes = closes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while request := self._read(connection):
                self.requests.append(request)
                for piece in self._pieces(len(self.requests)):
                    connection.sendall(piece)
                if self._closes:
                    return

    @staticmethod
    def _read(connection: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data or not data.endswith(b"}"):
            piece = connection.recv(65536)
            if not piece:
                return b""
            data += piece
        return data


@pytest.fixture
def serve() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(pieces: Callable[[int], list[bytes]], *, closes: bool = False) -> Peer:
        peers.append(Peer(pieces, closes=closes))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


def test_counts_tokens_from_usage_and_events_with_text(serve: Callable[..., Peer]) -> None:
    peer = serve(lambda _: [GOOD])
    trace = drive(peer.port, [Call(0, BODY)])
    (one,) = trace.answers
    assert (one.tokens, one.texts, one.prompt_tokens, one.cached_tokens) == (5, 3, 3, 7)
    assert len(one.gaps_ms) == one.tokens - 1
    assert trace.tokens == 5


def test_pieces_may_end_anywhere(serve: Callable[..., Peer]) -> None:
    peer = serve(lambda _: [GOOD[at : at + 1] for at in range(len(GOOD))])
    trace = drive(peer.port, [Call(0, BODY)])
    assert [(one.tokens, one.texts) for one in trace.answers] == [(5, 3)]


def test_requests_of_a_connection_follow_each_other_on_it(serve: Callable[..., Peer]) -> None:
    peer = serve(lambda number: [answer(text("a"), usage(number))])
    trace = drive(peer.port, [Call(0, {"prompt": str(number)}) for number in range(4)])
    assert [one.tokens for one in trace.answers] == [1, 2, 3, 4]
    assert trace.reconnects == 0
    assert all(request.startswith(b"POST /v1/completions HTTP/1.1\r\n") for request in peer.requests)
    sent, ended = [one.sent_ms for one in trace.answers], [one.end_ms for one in trace.answers]
    assert all(end <= following for end, following in zip(ended, sent[1:], strict=False))


def test_connections_run_side_by_side(serve: Callable[..., Peer]) -> None:
    peer = serve(lambda _: [GOOD])
    trace = drive(peer.port, [Call(connection, BODY) for connection in range(20) for _ in range(3)])
    assert len(trace.answers) == 60
    assert {one.connection for one in trace.answers} == set(range(20))


def test_a_server_that_closes_after_each_answer_is_known_and_served(serve: Callable[..., Peer]) -> None:
    assert does_keep_alive(serve(lambda _: [GOOD]).port)
    peer = serve(lambda _: [GOOD], closes=True)
    assert not does_keep_alive(peer.port)
    trace = drive(peer.port, [Call(0, BODY) for _ in range(3)], keeps_alive=False)
    assert [one.tokens for one in trace.answers] == [5, 5, 5]
    assert trace.reconnects == 2


def test_a_server_that_says_that_it_closes_gets_a_new_connection(serve: Callable[..., Peer]) -> None:
    peer = serve(lambda _: [GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)], closes=True)
    trace = drive(peer.port, [Call(0, BODY) for _ in range(3)])
    assert (len(trace.answers), trace.reconnects) == (3, 2)


@pytest.mark.parametrize(
    "bad",
    [
        b'HTTP/1.1 429 Too Many Requests\r\ncontent-length: 11\r\n\r\n{"error":1}',
        answer(text("a"), b'data: {"error":{"message":"gone"}}\n\n'),
        answer(usage(3)),
    ],
    ids=["status", "error event", "no text"],
)
def test_an_answer_that_is_none_fails_the_drive(serve: Callable[..., Peer], bad: bytes) -> None:
    peer = serve(lambda number: [bad if number == 2 else GOOD])
    with pytest.raises(ClientFailed):
        drive(peer.port, [Call(0, BODY), Call(0, BODY)])


def test_a_server_that_breaks_off_fails_the_drive(serve: Callable[..., Peer]) -> None:
    peer = serve(lambda _: [GOOD[:-40]], closes=True)
    with pytest.raises(ClientFailed):
        drive(peer.port, [Call(0, BODY)])


def test_a_server_that_is_silent_fails_the_drive(serve: Callable[..., Peer]) -> None:
    peer = serve(lambda _: [HEAD])
    with pytest.raises(ClientFailed, match="not finished in time"):
        drive(peer.port, [Call(0, BODY)], limit_s=0.2)
