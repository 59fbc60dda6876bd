"""Tests of the HTTP side run on asyncio, the only event loop there is in production."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
