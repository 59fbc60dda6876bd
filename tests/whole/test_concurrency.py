"""Requests beside others answer as they do alone, through HTTP, two workers and the real decoder."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.tiny_model import build_exact
from tests.whole.served import Served, text_of

TOKENS = 48
NEAR = 1e-3  # logits nearer than this may come out either way beside others


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = build_exact(tmp_path_factory.mktemp("model") / "exact.gguf")
    options = ("--workers", "2", "--slots", "4", "--context", "1024", "--threads", "1", "--decoder-options=--exact")
    with Served("--model", str(model), *options) as running:
        yield running


def requests(**sampling: Any) -> list[dict[str, Any]]:
    """32 mixed requests: texts and ids, short and long, some with a common beginning."""
    story = "once upon a time there was a queue of requests that nobody lost. "
    made = []
    for number in range(32):
        prompt: Any = story * (number % 4) + f"request {number} says"
        if number % 5 == 0:
            prompt = [1, *range(300, 300 + 8 * (number + 1))]
        seed = {"seed": sampling["seed"] + number} if "seed" in sampling else {}
        made.append({"prompt": prompt, "max_tokens": TOKENS, "logprobs": 5, **sampling, **seed})
    return made


def ask(server: Served, number: int, request: dict[str, Any]) -> tuple[str, list[Any], list[Any]]:
    """Text, tokens and alternatives of an answer; every other one is streamed."""
    if number % 2:
        events = server.stream("/v1/completions", request)
        logprobs = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
        tokens = [token for part in logprobs for token in part["tokens"]]
        return text_of(events), tokens, [top for part in logprobs for top in part["top_logprobs"] or []]
    choice = server.post("/v1/completions", request)["choices"][0]
    return choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"]


def is_near_tie(alone: tuple[str, list[Any], list[Any]], beside: tuple[str, list[Any], list[Any]]) -> bool:
    """Whether the first difference is between two candidates whose logits differ by less than NEAR."""
    at = next(at for at, (one, other) in enumerate(zip(alone[1], beside[1], strict=False)) if one != other)
    top = alone[2][at]
    one, other = top.get(alone[1][at]), top.get(beside[1][at])
    return one is not None and other is not None and abs(one - other) < NEAR


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 7},
        {"temperature": 1, "seed": 11, "top_p": 0.9, "frequency_penalty": 0.5},
    ],
    ids=["greedy", "seeded", "seeded-with-penalties"],
)
def test_32_concurrent_requests_answer_as_each_does_alone(server: Served, sampling: dict[str, Any]) -> None:
    made = list(enumerate(requests(**sampling)))
    alone = [ask(server, number, request) for number, request in made]
    with ThreadPoolExecutor(32) as threads:
        beside = list(threads.map(lambda item: ask(server, *item), made))
    different = [number for number, _ in made if alone[number] != beside[number]]
    texts = [number for number in different if alone[number][:2] != beside[number][:2]]
    assert [number for number in texts if not is_near_tie(alone[number], beside[number])] == []
    assert len({answer[0] for answer in alone}) == len(made), "the requests must be told apart by their answers"


def test_both_workers_took_part_and_figures_moved(server: Served) -> None:
    status = server.get("/status")
    assert [worker["state"] for worker in status["workers"]] == ["ready", "ready"]
    assert all(worker["board"]["tokens_out"] > 0 for worker in status["workers"])
    assert len({worker["decoder_pid"] for worker in status["workers"]}) == 2
    assert status["counters"]["generated_tokens"] > 0


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_streamed_and_whole_answers_are_the_same_text_and_usage(server: Served, tokens: int) -> None:
    for seed in range(1, 26):
        request = {"prompt": f"seed {seed}", "max_tokens": tokens, "temperature": 1, "seed": seed}
        whole = server.post("/v1/completions", request)
        events = server.stream("/v1/completions", {**request, "stream_options": {"include_usage": True}})
        assert text_of(events) == whole["choices"][0]["text"]
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == [whole["choices"][0]["finish_reason"]]
        usage = [event["usage"] for event in events if event.get("usage")]
        assert len(usage) == 1
        assert usage[0]["completion_tokens"] == whole["usage"]["completion_tokens"] == tokens
