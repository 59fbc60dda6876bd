"""/metrics of the real server, scraped while it works and its decoders and workers are killed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.echo import echo_prompt
from tests.whole.scripted import Scripted, new_marker, scripted, text_of

LABELS = {
    "worker": {"0", "1"},
    "state": {"starting", "loading", "ready", "draining", "unloaded", "backoff", "fatal", "stopping"},
    "model": {"tiny"},
    "quantile": {"0.99", "1"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("pair"), "--workers", "2", "--watchdog-interval-s", "0.1") as server:
        yield server


class Scrapes:
    """Every series by name and labels, and which of them may only grow."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self.types: dict[str, str] = {}
        self.labels: dict[str, set[str]] = {}

    def add(self, text: str) -> None:
        values = {}
        for family in text_string_to_metric_families(text):
            assert family.documentation, family.name
            for sample in family.samples:
                name = sample.name + str(sorted(sample.labels.items()))
                values[name] = sample.value
                self.types[name] = "gauge" if sample.name.endswith("_created") else family.type
                for label, value in sample.labels.items():
                    self.labels.setdefault(label, set()).add(value)
        self.values.append(values)

    def falls(self) -> list[str]:
        """Counters and histograms that went back or away."""
        found = []
        for before, after in zip(self.values, self.values[1:], strict=False):
            for name, value in before.items():
                if self.types[name] in ("counter", "histogram") and after.get(name, -1.0) < value:
                    found.append(f"{name}: {value} -> {after.get(name)}")
        return found


async def test_no_counter_goes_back_whoever_is_killed(pair: Scripted) -> None:
    """B79: three decoders and two workers killed under load, ten scrapes a second."""
    pair.stage.script(token_delay_s=0.01)
    is_over = asyncio.Event()
    scrapes = Scrapes()

    async def load() -> None:
        while not is_over.is_set():
            marker = new_marker()
            status, answer = await pair.call(
                "POST", "/v1/completions", {"prompt": echo_prompt(marker), "max_tokens": 20, "stream": False}
            )
            assert status in (200, 503), answer
            if status == 200:
                assert answer["choices"][0]["text"] == text_of(marker, 20)

    async def scrape() -> None:
        while not is_over.is_set():
            scrapes.add(await pair.metrics())
            await asyncio.sleep(0.1)

    async def kill(index: int, what: str) -> None:
        """Kill a worker or its decoder, once it serves, and wait until another has taken its place."""
        status = await pair.until_status(lambda status: is_serving(status["workers"][index]), f"worker {index} serves")
        pid = status["workers"][index][what]
        os.kill(pid, signal.SIGKILL)
        await pair.until_status(lambda status: status["workers"][index][what] not in (pid, 0), "its replacement")

    tasks = [asyncio.create_task(each) for each in (load(), load(), load(), load(), scrape())]
    for index, what in ((0, "decoder_pid"), (1, "pid"), (1, "decoder_pid"), (0, "pid"), (0, "decoder_pid")):
        await kill(index, what)
    await pair.until_status(lambda status: all(map(is_serving, status["workers"])), "both serve")
    is_over.set()
    await asyncio.gather(*tasks)
    scrapes.add(await pair.metrics())
    assert len(scrapes.values) > 5
    assert scrapes.falls() == []
    last = scrapes.values[-1]
    assert last["ringfence_worker_deaths_total[]"] == 2 and last["ringfence_decoder_deaths_total[]"] == 3
    assert last["ringfence_worker_restarts_total[('worker', '0')]"] == 1
    assert last["ringfence_running[]"] == last["ringfence_queue_requests[]"] == 0
    for label, allowed in LABELS.items():
        assert scrapes.labels[label] <= allowed
    assert set(scrapes.labels) <= {*LABELS, "endpoint", "status", "code", "reason", "le"}


def is_serving(worker: Any) -> bool:
    return bool(worker["state"] == "ready" and worker["decoder_pid"])


async def test_labels_are_bounded_whatever_is_asked(pair: Scripted) -> None:
    for number in range(20):
        await pair.call("GET", f"/v1/unknown/{number}")
        await pair.call("POST", "/v1/completions", {"prompt": "x", "model": f"model-{number}"})
        await pair.call("GET", f"/v1/models/model-{number}")
        await pair.call("POST", f"/admin/workers/{number}/restart")
    scrapes = Scrapes()
    scrapes.add(await pair.metrics())
    assert not {value for values in scrapes.labels.values() for value in values if value.endswith(("-7", "/7"))}
    assert "unmatched" in scrapes.labels["endpoint"]
