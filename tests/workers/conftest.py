"""What the tests of the pool share."""

from pathlib import Path

import pytest

from tests.fakes.stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, "$FD_NAME")
