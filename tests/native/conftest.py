"""Fixtures of the tests that run the C++ decoder on the tiny model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.native.decoder_process import DecoderProcess, find_decoder
from tests.tiny_model import build, build_exact

StartDecoder = Callable[..., DecoderProcess]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests of equality: with `--exact`, results don't depend on what runs beside a request."""
    return build_exact(tmp_path_factory.mktemp("model") / "exact.gguf")


@pytest.fixture(scope="session")
def decoder_binary() -> Path:
    binary = find_decoder()
    if binary is None:
        pytest.fail("ringfence-decoder is not built: run `make decoder`, or point RINGFENCE_DECODER at one")
    return binary


@pytest.fixture(scope="session")
def decoder(decoder_binary: Path, exact_model: Path) -> Iterator[DecoderProcess]:
    """One decoder with eight slots that the tests share; each test leaves it idle."""
    with DecoderProcess(decoder_binary, exact_model, "--exact", "--slots", "8", "--context", "1024") as process:
        yield process


@pytest.fixture
def start_decoder(decoder_binary: Path, tiny_model: Path) -> Iterator[StartDecoder]:
    """Starts decoders of the test's own; they are killed at its end."""
    processes: list[DecoderProcess] = []

    def start(*options: str, model: Path = tiny_model, stdout: int | None = None) -> DecoderProcess:
        processes.append(DecoderProcess(decoder_binary, model, *options, stdout=stdout))
        return processes[-1]

    yield start
    for process in processes:
        process.__exit__(None, None, None)
