"""`python -m bench.prefix`: prompt tokens that are read again, beside one infinitely large cache.

Eight conversations of 20 turns over two workers, tiny model, real decoders. A conversation's next prompt is all that was
said before plus new words; all begin with the same system prompt. Twice: in turn (each round in an order of its own), and all
eight at once (after their first turns: a prefix that nobody has read yet can't be shared). The infinite cache is reckoned
beside it: it holds every sequence that has been computed so far (prompt and output but its last token, which no decoder has
in its cache), in one place, and gives each prompt its longest common prefix.

Answers are held to capital letters by `logit_bias`: the tiny vocabulary has no merges of them, so that a text's ids are known.
"""

from __future__ import annotations

import argparse
import http.client
import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from bench.http_client import LIMIT_S
from bench.http_servers import Server, ServerFailed, start_ringfence
from bench.models import model_path
from tests.tiny_model import FIRST_BYTE, VOCAB_SIZE

CONVERSATIONS = 8
TURNS, QUICK_TURNS = 20, 10
WORKERS, SLOTS, CONTEXT = 2, 4, 4096
SYSTEM_TOKENS = 192
TURN_TOKENS = (20, 100)
ANSWER_TOKENS = (16, 64)
MOST_EXTRA = 0.05

_CAPITALS = {str(FIRST_BYTE + byte): 100 for byte in range(ord("A"), ord("Z") + 1)}
_FIRST_WORD = FIRST_BYTE + 256  # ids from here on are pairs of letters


class InfiniteCache:
    """Every prefix of every sequence that was computed, as a trie of ids."""

    def __init__(self) -> None:
        self._root: dict[int, dict[int, object]] = {}

    def known(self, ids: Sequence[int]) -> int:
        """How many leading ids need not be read; the last must be, since it makes the first logits."""
        node: dict[int, dict[int, object]] = self._root
        for count, token in enumerate(ids[:-1]):
            following = node.get(token)
            if following is None:
                return count
            node = following  # type: ignore[assignment]
        return len(ids) - 1

    def hold(self, ids: Sequence[int]) -> None:
        node: dict[int, dict[int, object]] = self._root
        for token in ids:
            node = node.setdefault(token, {})  # type: ignore[assignment]


@dataclass(slots=True)
class Reading:
    """Prompt tokens of all turns of a way: how many there were, were read, and would have been with the infinite
    cache. moved: turns that went to another worker than their predecessor."""

    prompt: int = 0
    read: int = 0
    ideal: int = 0
    moved: int = 0
    turns: int = 0
    worst: list[int] = field(default_factory=list)

    @property
    def extra(self) -> float:
        return self.read / self.ideal - 1


class Conversation:
    """One client: its history of ids, its connection, its own random words."""

    def __init__(self, server: Server, number: int, system: Sequence[int]) -> None:
        self._connection = http.client.HTTPConnection(server.address, server.port, timeout=LIMIT_S)
        self._random = random.Random(number)
        self.history = list(system)
        self.worker: int | None = None

    def turn(self, cache: InfiniteCache, reading: Reading, lock: threading.Lock) -> None:
        """Say something, take the answer, and enter what it cost."""
        self.history += self._random.choices(range(_FIRST_WORD, VOCAB_SIZE), k=self._random.randint(*TURN_TOKENS))
        with lock:
            ideal = len(self.history) - cache.known(self.history)
            cache.hold(self.history)  # at once, as if it were read in no time
        text, timings = self._ask(self._random.randint(*ANSWER_TOKENS))
        with lock:
            reading.turns += 1
            reading.prompt += len(self.history)
            reading.read += timings["prompt_n"]
            reading.ideal += ideal
            reading.worst.append(timings["prompt_n"] - ideal)
            reading.moved += self.worker is not None and self.worker != timings["worker"]
            self.worker = timings["worker"]
            self.history += [FIRST_BYTE + byte for byte in text.encode()]
            cache.hold(self.history[:-1])

    def close(self) -> None:
        self._connection.close()

    def _ask(self, tokens: int) -> tuple[str, dict[str, int]]:
        body = {
            "prompt": self.history,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": _CAPITALS,
        }
        self._connection.request(
            "POST", "/v1/completions", msgspec.json.encode(body), {"content-type": "application/json"}
        )
        response = self._connection.getresponse()
        answer = msgspec.json.decode(response.read())
        if response.status != 200:
            raise ServerFailed(f"{response.status}: {answer}")
        text: str = answer["choices"][0]["text"]
        if len(text) != tokens or not text.isupper():
            raise ServerFailed(f"{tokens} capital letters were asked for, {text!r} came")
        return text, answer["timings"]


def converse(turns: int, *, is_concurrent: bool) -> Reading:
    """All conversations, on a server of their own."""
    order = random.Random(turns)
    system = order.choices(range(_FIRST_WORD, VOCAB_SIZE), k=SYSTEM_TOKENS)
    cache, reading, lock = InfiniteCache(), Reading(), threading.Lock()
    with start_ringfence(model_path("tiny"), slots=SLOTS, context=CONTEXT, threads=1, workers=WORKERS) as server:
        conversations = [Conversation(server, number, system) for number in range(CONVERSATIONS)]
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(CONVERSATIONS) as many:
            for number in range(turns):
                order.shuffle(conversations)
                threads = many if is_concurrent and number > 0 else one
                for done in [threads.submit(each.turn, cache, reading, lock) for each in conversations]:
                    done.result()
        for each in conversations:
            each.close()
    return reading


def print_readings(readings: dict[str, Reading], turns: int) -> None:
    print(f"{CONVERSATIONS} conversations of {turns} turns, {WORKERS} workers of {SLOTS} slots, "
          f"system prompt of {SYSTEM_TOKENS} tokens")  # fmt: skip
    print(f"{'':<12}{'prompt tokens':>15}{'read':>9}{'infinite cache':>16}{'more':>8}{'moved':>7}{'worst turn':>12}")
    for way, reading in readings.items():
        print(f"{way:<12}{reading.prompt:>15,}{reading.read:>9,}{reading.ideal:>16,}{reading.extra:>8.1%}"
              f"{reading.moved:>7}{max(reading.worst):>12}")  # fmt: skip
    for way, reading in readings.items():
        verdict = "met" if reading.extra <= MOST_EXTRA else "MISSED"
        print(f"{way}: {reading.extra:.1%} more than an infinite cache (target <= {MOST_EXTRA:.0%}) {verdict}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TURNS} turns in place of {TURNS}")
    options = parser.parse_args(arguments)
    turns = QUICK_TURNS if options.quick else TURNS
    readings = {
        "in turn": converse(turns, is_concurrent=False),
        "at once": converse(turns, is_concurrent=True),
    }
    if options.json:
        print(msgspec.json.encode({"turns": turns, "prefix": readings}).decode())
    else:
        print_readings(readings, turns)
    return 1 if options.check and any(reading.extra > MOST_EXTRA for reading in readings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
