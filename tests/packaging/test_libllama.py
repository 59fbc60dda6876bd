"""The installed libllama: portable in its base layer, AVX-512 where the processor has it."""

import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from native.llama.build import AVX512_LAYER, Recipe

PLATLIB = Path(sysconfig.get_path("platlib"))
LOADER = Path("/lib64/ld-linux-x86-64.so.2")
X86_64_V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the layers are for x86-64"),
    pytest.mark.skipif(
        not Recipe.of_this_machine(os.environ).has_avx512_layer, reason="CMAKE_ARGS chose the instruction sets"
    ),
]


def processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).partition(":")[2].split())


def mapped_ggml(*loader: str | Path) -> Path:
    """The libggml-cpu that the Python binding maps in a process of its own, started through `loader`."""
    code = "import llama_cpp; print(*{l.split()[-1] for l in open('/proc/self/maps') if 'libggml-cpu' in l}, sep='\\n')"
    command = [*loader, Path(sys.executable).resolve() if loader else sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(PLATLIB)}
    return Path(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip())


@pytest.mark.skipif(not processor_flags() >= X86_64_V4, reason="the processor has no AVX-512")
def test_avx512_layer_is_loaded_where_the_processor_has_it() -> None:
    assert mapped_ggml() == PLATLIB / "llama_cpp" / "lib" / AVX512_LAYER / "libggml-cpu.so.0"


@pytest.mark.skipif(not LOADER.exists(), reason="needs glibc's loader")
def test_base_layer_is_loaded_on_a_processor_without_avx512() -> None:
    assert mapped_ggml(LOADER, "--glibc-hwcaps-mask", "x86-64-v3") == PLATLIB / "llama_cpp" / "lib" / "libggml-cpu.so.0"


def test_the_decoder_finds_the_layer_beside_the_library_it_links() -> None:
    assert (PLATLIB / "lib" / AVX512_LAYER / "libggml-cpu.so.0").is_file()
