"""The demo model through two workers: what `make run` serves."""

from collections.abc import Iterator

import pytest

from tests.whole.served import Served, text_of

pytestmark = [pytest.mark.model, pytest.mark.slow]

REQUEST = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served("--demo", "--workers", "2") as running:
        yield running


def test_it_continues_a_text_as_the_model_does_streamed_and_not(server: Served) -> None:
    whole = server.post("/v1/completions", REQUEST)
    assert whole["choices"][0]["text"].startswith(", there was a little girl named Lily.")
    assert whole["usage"]["completion_tokens"] == 24
    events = server.stream("/v1/completions", REQUEST)
    assert text_of(events).encode() == whole["choices"][0]["text"].encode()


def test_status_shows_two_ready_workers_with_two_decoders_and_figures(server: Served) -> None:
    server.post("/v1/completions", REQUEST)
    workers = server.get("/status")["workers"]
    assert [worker["state"] for worker in workers] == ["ready", "ready"]
    assert len({worker["decoder_pid"] for worker in workers} - {0}) == 2
    assert sum(worker["board"]["tokens_out"] for worker in workers) >= 24
