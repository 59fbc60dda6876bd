"""The pool's workers taken together: what they can take, what they have announced, and whether anybody serves.

Readings only, each from the present state of the replicas; the one thing done here is to wake a sleeping decoder.
"""

import logging
from collections.abc import Iterator

from native.dialect import Info, words_of
from workers.errors import NoWorkers, Unsupported
from workers.replica import Replica
from workers.request import GenerationRequest, RequestKind
from workers.settings import PoolSettings
from workers.snapshot import Capabilities

_log = logging.getLogger("ringfence.pool")
_NO_WORKERS_RETRY_S = 2.0


class Roster:
    """All replicas. Indexes are those of the workers."""

    def __init__(self, replicas: tuple[Replica, ...], settings: PoolSettings) -> None:
        self.replicas = replicas
        self._settings = settings
        self._announced: tuple[str, Capabilities] = ("", Capabilities())

    def __repr__(self) -> str:
        return f"Roster(workers={len(self.replicas)}, running={self.running}, free_capacity={self.free_capacity})"

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas)

    def __getitem__(self, index: int) -> Replica:
        return self.replicas[index]

    @property
    def running(self) -> int:
        return sum(replica.running for replica in self.replicas)

    @property
    def free_capacity(self) -> int:
        """Turns that could be given to workers now."""
        free = 0
        for replica in self.replicas:
            free += replica.free_capacity
        return free

    @property
    def is_serving(self) -> bool:
        return any(replica.is_serving for replica in self.replicas)

    @property
    def is_reachable(self) -> bool:
        """Whether a worker serves, or sleeps and can be loaded on demand."""
        return any(replica.is_serving or replica.is_asleep for replica in self.replicas)

    @property
    def is_waking(self) -> bool:
        return any(replica.is_waking for replica in self.replicas)

    @property
    def context(self) -> int:
        """Longest prompt plus output in tokens that a ready worker takes; of the settings while none is ready."""
        contexts = [replica.context for replica in self.replicas if replica.is_serving]
        return min(max(contexts), self._settings.context) if contexts else self._settings.context

    @property
    def capabilities(self) -> Capabilities:
        """What the first ready decoder announced (all run the same command), or the last one that did."""
        replica = next((replica for replica in self.replicas if replica.is_serving), None)
        if replica is not None and replica.incarnation is not None:
            text = replica.incarnation.board.info.read()
            if text != self._announced[0]:
                self._announced = (text, _capabilities(Info().merged(words_of(text.encode()))))
        return self._announced[1]

    @property
    def tokens_out(self) -> int:
        """Tokens of the present incarnations: it falls when a worker is replaced."""
        return sum(replica.tokens_out for replica in self.replicas)

    def wake_sleeper(self, waiting: int) -> bool:
        """Load one sleeping decoder, if there is one. True when it can take turns at once.

        That is so when it had not heard of its unloading yet; it has nothing to tell then, and will not ring.
        """
        sleeper = next((replica for replica in self.replicas if replica.is_asleep), None)
        if sleeper is None:
            return False
        _log.info("worker=%d loading its decoder on demand waiting=%d", sleeper.index, waiting)
        sleeper.wake()
        return sleeper.free_capacity > 0

    def require_workers(self) -> None:
        """Raise NoWorkers when nobody serves or sleeps, and requests are not to wait for that."""
        if not self.is_reachable and self._settings.wait_for_workers_s <= 0:
            reasons = tuple(f"worker {replica.index}: {replica.state}, {replica.reason()}" for replica in self.replicas)
            raise NoWorkers(reasons, _NO_WORKERS_RETRY_S)

    def require_capabilities(self, request: GenerationRequest) -> None:
        """Raise Unsupported for what the decoders have not announced. While none has spoken the worker will say."""
        sampling, is_embedding = request.sampling, request.kind is RequestKind.EMBED
        wants = is_embedding or sampling.grammar is not None or sampling.logprobs is not None or sampling.logit_bias
        if not wants:
            return
        able = self.capabilities
        if not able.vocabulary and not self.is_serving:
            return
        if is_embedding and not able.embeddings:
            raise Unsupported("embeddings")
        if sampling.grammar is not None and not able.grammar:
            raise Unsupported("grammar")
        if sampling.logit_bias and not able.logit_bias:
            raise Unsupported("logit_bias")
        if sampling.logprobs is not None and not 0 < able.logprobs >= sampling.logprobs:
            raise Unsupported("logprobs")


def _capabilities(info: Info) -> Capabilities:
    return Capabilities(
        logprobs=info.logprobs,
        grammar=info.grammar,
        logit_bias=info.logit_bias,
        embeddings=info.embeddings,
        resume=info.resume,
        vocabulary=info.vocabulary,
    )
