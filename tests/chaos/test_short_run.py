"""The short form of `python -m bench.chaos`: nothing is lost, and nothing is left."""

from __future__ import annotations

import pytest

from bench.chaos.__main__ import STAGES, table
from bench.chaos.stages import Plan, run


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.timeout(300)
def test_killed_workers_and_decoders_cost_no_token(stage: str) -> None:
    plan = Plan(kills=20, streams=16, seed=0, limit_s=240.0, questions=12, longest=200)
    report = run(stage, plan)
    assert report.is_good, table([report])
    assert report.tally.moves > 0, "no kill met a request"
