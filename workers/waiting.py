"""The one queue of the pool: first come, first served, bounded by requests and by prompt tokens.

A place is reserved before anything expensive (tokenising) is done for a request, and given back whatever becomes of it.
Turns that lost their decoder come back to the front, in the order of their submission: they were here first.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator

from workers.errors import Overloaded
from workers.job import Job


class Reservation:
    """A place in the queue for a request that is still being prepared. `release` may be called any number of times."""

    def __init__(self, queue: "WaitingQueue", tokens: int, retry_after_s: Callable[[], float]) -> None:
        self._queue: WaitingQueue | None = queue
        self._retry_after_s = retry_after_s
        self.tokens = tokens

    def __repr__(self) -> str:
        return f"Reservation(tokens={self.tokens}, is_held={self._queue is not None})"

    @property
    def is_held(self) -> bool:
        return self._queue is not None

    def resize(self, tokens: int) -> None:
        """The prompt turned out to have this many tokens. Raises Overloaded, and holds nothing, when they are too many."""
        queue = self._queue
        if queue is None:
            return
        if tokens > self.tokens and not queue.has_room(tokens, besides=self.tokens):
            self.release()
            raise queue.refusal("prompt tokens", queue.token_limit, self._retry_after_s)
        queue.reserved_tokens += tokens - self.tokens
        self.tokens = tokens

    def release(self) -> None:
        if self._queue is not None:
            self._queue.reserved -= 1
            self._queue.reserved_tokens -= self.tokens
            self._queue = None


class WaitingQueue:
    """Turns that wait for a worker: those that came back, then those that are new."""

    def __init__(self, *, request_limit: int, token_limit: int) -> None:
        self.request_limit = request_limit
        self.token_limit = token_limit
        self.tokens = 0
        self.reserved = 0
        self.reserved_tokens = 0
        self.rejected = 0
        self._returned: list[Job] = []  # by time of submission; at most the running turns of the workers that died
        self._new: OrderedDict[int, Job] = OrderedDict()

    def __repr__(self) -> str:
        return f"WaitingQueue(waiting={len(self)}, reserved={self.reserved}, tokens={self.tokens})"

    def __len__(self) -> int:
        return len(self._returned) + len(self._new)

    def __iter__(self) -> Iterator[Job]:
        """First to last, over a copy: the queue may change meanwhile."""
        return iter([*self._returned, *self._new.values()])

    def reserve(self, tokens: int, *, free_capacity: int, retry_after_s: Callable[[], float]) -> Reservation:
        """Hold a place. Those that a free worker will take at once do not count against the limit.

        Raises Overloaded when the queue is full by requests, or by prompt tokens.
        """
        if len(self) + self.reserved >= self.request_limit + free_capacity:
            raise self.refusal("requests", self.request_limit, retry_after_s)
        if not self.has_room(tokens):
            raise self.refusal("prompt tokens", self.token_limit, retry_after_s)
        self.reserved += 1
        self.reserved_tokens += tokens
        return Reservation(self, tokens, retry_after_s)

    def has_room(self, tokens: int, *, besides: int = 0) -> bool:
        """Whether so many prompt tokens fit, `besides` that many which are their own. A request alone always fits."""
        held = self.tokens + self.reserved_tokens - besides
        return not held or held + tokens <= self.token_limit

    def refusal(self, bound: str, limit: int, retry_after_s: Callable[[], float]) -> Overloaded:
        """The error for a request that found the queue full, counted."""
        self.rejected += 1
        return Overloaded(bound, limit, retry_after_s())

    def append(self, job: Job) -> None:
        """Last in line."""
        self._new[id(job)] = job
        self.tokens += len(job.turn.request.prompt)

    def put_back(self, job: Job) -> None:
        """A turn that had been running: before all new ones."""
        insort(self._returned, job, key=lambda other: other.turn.submitted_s)
        self.tokens += len(job.turn.request.prompt)

    def remove(self, job: Job) -> bool:
        """Take a turn out; False when it was not waiting."""
        if self._new.pop(id(job), None) is None:
            if job not in self._returned:
                return False
            self._returned.remove(job)
        self.tokens -= len(job.turn.request.prompt)
        return True

    def oldest_s(self, now_s: float) -> float:
        """How long the first in line has been with us, 0 when nobody waits."""
        first = next(iter(self), None)
        return 0.0 if first is None else now_s - first.turn.submitted_s
