"""A decoder that is silent for long: headers in time, signs of life, and what clients and proxies make of them."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.fakes.echo import echo_prompt
from tests.fakes.stage import until
from tests.whole.peer import Peer
from tests.whole.scripted import KEY, Scripted, new_marker, text_of

COMPLETIONS = "/v1/completions"
PREFILL_MS = 1_800  # the shared server's keepalive_s is 0.3


async def test_headers_come_within_a_second_and_comments_follow(server: Scripted) -> None:
    marker = new_marker()
    async with server.peer() as peer:
        began = time.monotonic()
        body = {"prompt": echo_prompt(marker, prefill_ms=PREFILL_MS), "max_tokens": 3, "stream": True}
        peer.ask("POST", COMPLETIONS, body, "accept-encoding: gzip\r\n")
        status, headers = await peer.head()
        assert status == 200 and time.monotonic() - began < 1.5  # a second, and what a busy machine adds
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["x-accel-buffering"] == "no" and headers["cache-control"] == "no-cache"
        assert "content-encoding" not in headers
        times = [time.monotonic()]
        while (event := await peer.event()) == ": keep-alive":
            times.append(time.monotonic())
        rest = await peer.events()
    assert len(times) > 2
    assert rest[-1] == "[DONE]"
    texts = [choice["text"] for each in (event, *rest[:-1]) for choice in each["choices"]]
    assert "".join(texts) == text_of(marker, 3)


@pytest.mark.parametrize("error", ["device error", "grammar: no such rule"])
async def test_an_error_after_early_headers_is_an_event(server: Scripted, error: str) -> None:
    marker = new_marker()
    server.stage.script(rules=[{"when": {"marker": marker}, "error": error, "error_at": 0}])
    async with server.peer() as peer:
        body = {"prompt": echo_prompt(marker, prefill_ms=1_200), "stream": True}
        peer.ask("POST", COMPLETIONS, body)
        assert (await peer.head())[0] == 200
        events = [event for event in await peer.events() if event != ": keep-alive"]
    assert len(events) == 1 and set(events[0]) == {"error"}


async def sdk_text(port: int, marker: int) -> str:
    """A silent stream, as the SDK reads it."""

    def ask() -> str:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
            prompt = echo_prompt(marker, prefill_ms=PREFILL_MS)
            chunks = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks)

    return await asyncio.to_thread(ask)


async def test_the_sdk_completes_a_silent_stream(server: Scripted) -> None:
    marker = new_marker()
    assert await sdk_text(server.port, marker) == text_of(marker, 4)


async def test_curl_reads_a_silent_stream(server: Scripted) -> None:
    if (curl := shutil.which("curl")) is None:
        pytest.skip("curl is not installed")
    marker = new_marker()
    words = ",".join(map(str, echo_prompt(marker, prefill_ms=1_200)))
    process = await asyncio.create_subprocess_exec(
        curl, "-sN", f"http://127.0.0.1:{server.port}{COMPLETIONS}", "-H", f"Authorization: Bearer {KEY}",
        "-H", "Content-Type: application/json", "-d", f'{{"prompt": [{words}], "max_tokens": 2, "stream": true}}',
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert out.startswith(b": keep-alive\n\n") and out.endswith(b"data: [DONE]\n\n")


# ---- through nginx -------------------------------------------------------------------------------------------------

NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    server {{
        listen unix:{folder}/socket;
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://127.0.0.1:{upstream};
            proxy_http_version {version};
            proxy_read_timeout {read_timeout};
        }}
    }}
}}
"""


@pytest.fixture(params=["1.0", "1.1"])
def nginx(server: Scripted, tmp_path: Path, free_port: int, request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of an nginx before the server that gives up after a second without a byte; its defaults otherwise. (It asks
    in HTTP/1.0 by default.)"""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    config = tmp_path / "nginx.conf"
    values = {"folder": tmp_path, "port": free_port, "upstream": server.port, "read_timeout": "1s"}
    config.write_text(NGINX.format(**values, version=request.param))
    process = subprocess.Popen([program, "-c", str(config), "-e", str(tmp_path / "error.log")])
    try:
        until(lambda: os.path.exists(tmp_path / "socket"), what="nginx listens")
        yield free_port
    finally:
        process.terminate()
        process.wait(10)


async def test_a_silent_stream_gets_through_nginx_as_it_comes(server: Scripted, nginx: int) -> None:
    marker = new_marker()
    assert await sdk_text(nginx, marker) == text_of(marker, 4)
    async with Peer(nginx, key=KEY) as peer:
        marker = new_marker()
        body = {"prompt": echo_prompt(marker, token_delay_ms=200), "max_tokens": 8, "stream": True}
        peer.ask("POST", COMPLETIONS, body)
        assert (await peer.head())[0] == 200
        began = time.monotonic()
        await peer.event()
        assert time.monotonic() - began < 1.0, "nginx holds the stream back"
        assert len(await peer.events()) == 9  # seven tokens, the finish reason and [DONE]


async def test_leaving_nginx_stops_the_generation(server: Scripted, nginx: int) -> None:
    marker = new_marker()
    async with Peer(nginx, key=KEY) as peer:
        peer.ask("POST", COMPLETIONS, {"prompt": echo_prompt(marker, prefill_ms=60_000), "stream": True})
        gens = await server.running(marker)
        peer.leave()
        await server.stops(gens)
