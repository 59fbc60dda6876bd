"""Fixtures of every test."""

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Async tests run as the server does: asyncio on uvloop."""
    return "asyncio", {"use_uvloop": True}
