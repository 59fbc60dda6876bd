"""Turns and jobs for the tables: nothing of them runs."""

import itertools

from workers.job import Job
from workers.prefix import PrefixChain
from workers.request import GenerationRequest
from workers.turn import Turn

_numbers = itertools.count()


def make_request(tokens: int = 4, max_new: int = 8) -> GenerationRequest:
    return GenerationRequest(id=f"r{next(_numbers)}", prompt=list(range(10, 10 + tokens)), max_new=max_new)


def make_job(tokens: int = 4, *, submitted_s: float | None = None) -> Job:
    request = make_request(tokens)
    turn = Turn(request)
    if submitted_s is not None:
        turn.submitted_s = submitted_s
    return Job(turn, b"", PrefixChain(request.prompt))
