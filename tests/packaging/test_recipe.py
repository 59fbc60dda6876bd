"""The recipe of the libllama wheel: what it is built with, and which builds may share a cached wheel."""

import platform
import threading
import tomllib
from pathlib import Path

import pytest

from native.llama.build import Recipe, cache_dir, cached_wheel, locked, provide, sdist_version

ROOT = Path(__file__).parents[2]


def recipe(cmake_args: str = "", **environ: str) -> Recipe:
    return Recipe.of_this_machine({"CMAKE_ARGS": cmake_args, **environ})


def test_key_depends_on_cmake_args() -> None:
    assert recipe("-DGGML_CUDA=on").key != recipe().key
    assert recipe("-DGGML_CUDA=on").key == recipe("  -DGGML_CUDA=on ").key


def test_key_depends_on_the_compiler_named_by_the_environment() -> None:
    assert recipe(CXX="clang++").key != recipe().key
    assert recipe(EDITOR="vi").key == recipe().key


def test_cmake_args_of_the_user_come_after_the_defaults_and_win() -> None:
    built = recipe("-DGGML_CUDA=on -DGGML_NATIVE=ON")
    assert built.cmake_args[-2:] == ("-DGGML_CUDA=on", "-DGGML_NATIVE=ON")
    assert built.definitions["GGML_CUDA"] == "on"
    assert built.is_native


def test_default_build_is_not_native() -> None:
    assert not recipe().is_native


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the layer is for x86-64")
@pytest.mark.parametrize(
    ("cmake_args", "has_layer"),
    [
        ("", True),
        ("-DGGML_CUDA=on", True),
        ("-DGGML_NATIVE:BOOL=OFF", True),
        ("-DGGML_NATIVE=ON", False),
        ("-DGGML_AVX512=ON", False),
        ("-DGGML_AVX2=OFF -DGGML_FMA=OFF", False),
        ("-DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON", False),
        ("-DBUILD_SHARED_LIBS=OFF", False),
    ],
)
def test_avx512_layer_is_left_out_only_where_the_user_chose_instruction_sets(cmake_args: str, has_layer: bool) -> None:
    assert recipe(cmake_args).has_avx512_layer is has_layer


def test_other_machines_get_the_default_flags_alone() -> None:
    arm = Recipe(version="1", machine="aarch64", libc="glibc2.36", cmake_args=("-DGGML_NATIVE=OFF",))
    assert not arm.has_avx512_layer


def test_cached_wheel_is_handed_over_without_a_build(tmp_path: Path) -> None:
    wheel = tmp_path / recipe().key / "llama_cpp_python-1-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    assert provide(recipe(), tmp_path) == wheel
    assert cached_wheel(tmp_path / recipe("-DGGML_CUDA=on").key) is None


def test_a_second_build_waits_for_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    entered = threading.Event()

    def second() -> None:
        with locked(tmp_path / "lock"):
            entered.set()

    thread = threading.Thread(target=second)
    with locked(tmp_path / "lock"):
        thread.start()
        assert not entered.wait(0.1)
    thread.join(10)
    assert entered.is_set()
    assert "waiting" in capfd.readouterr().err


def test_cache_lies_where_xdg_says() -> None:
    assert cache_dir({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/ringfence/wheels")
    assert cache_dir({"HOME": "/h"}) == Path("/h/.cache/ringfence/wheels")


def test_built_version_is_the_required_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pin = f"llama-cpp-python=={sdist_version()}"
    assert pin in project["project"]["dependencies"]
    assert pin in project["build-system"]["requires"]
