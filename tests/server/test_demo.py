"""Putting the demo model together, with a package made up here."""

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from server.demo import PACKAGE, DemoError, demo_model_path

CHUNKS = [b"GGUF" * 1000, b"part two", b"end"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    paths = [tmp_path / f"model.gguf.part{number:02}" for number in range(len(CHUNKS))]
    for path, chunk in zip(paths, CHUNKS, strict=True):
        path.write_bytes(chunk)
    fake = SimpleNamespace(
        MODEL_NAME="model.gguf",
        EXPECTED_SHA256=hashlib.sha256(b"".join(CHUNKS)).hexdigest(),
        chunk_paths=lambda: paths,
    )
    monkeypatch.setitem(sys.modules, PACKAGE, fake)
    return fake


def test_model_is_put_together_with_progress(package: SimpleNamespace, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    path = demo_model_path(lambda done, total: steps.append((done, total)), cache=tmp_path / "cache")
    assert path == tmp_path / "cache" / "model.gguf"
    assert path.read_bytes() == b"".join(CHUNKS)
    assert steps[-1] == (4011, 4011)
    assert [entry.name for entry in path.parent.iterdir()] == ["model.gguf"]


def test_model_is_put_together_once(package: SimpleNamespace, tmp_path: Path) -> None:
    first = demo_model_path(cache=tmp_path).stat()
    second = demo_model_path(lambda done, total: pytest.fail("assembled again"), cache=tmp_path).stat()
    assert first.st_ino == second.st_ino


def test_truncated_file_is_replaced(package: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert demo_model_path(cache=tmp_path).read_bytes() == b"".join(CHUNKS)


def test_cache_is_where_xdg_says(package: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo_model_path() == tmp_path / "xdg" / "ringfence" / "model.gguf"


def test_damaged_package_leaves_nothing_behind(package: SimpleNamespace, tmp_path: Path) -> None:
    package.EXPECTED_SHA256 = "0" * 64
    with pytest.raises(DemoError, match="SHA-256"):
        demo_model_path(cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_part_is_named_with_the_remedy(package: SimpleNamespace, tmp_path: Path) -> None:
    package.chunk_paths()[1].unlink()
    with pytest.raises(DemoError, match=r"part01.*pip install"):
        demo_model_path(cache=tmp_path)


def test_package_that_is_not_installed_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(DemoError, match=r"not installed.*pip install"):
        demo_model_path()


def test_cache_that_can_t_be_written_is_an_error_with_the_remedy(package: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DemoError, match="XDG_CACHE_HOME"):
        demo_model_path(cache=tmp_path / "file" / "cache")


@pytest.mark.model
def test_real_package_has_the_interface_that_is_used_here() -> None:
    package = pytest.importorskip(PACKAGE)
    assert package.MODEL_NAME.endswith(".gguf")
    assert len(package.EXPECTED_SHA256) == 64
    assert all(path.is_file() for path in package.chunk_paths())
