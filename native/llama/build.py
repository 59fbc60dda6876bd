"""Builds the wheel of llama-cpp-python, which carries libllama, once per machine and options, and prints its path.

    python native/llama/build.py          the wheel's path on stdout, progress on stderr
    python native/llama/build.py --key    the name of its place in the cache; builds nothing, needs no installed package

The wheel has two layers:

    lib/libggml-cpu.so.0                               any x86-64 processor with AVX2
    lib/glibc-hwcaps/x86-64-v4/libggml-cpu.so.0        the same sources with AVX-512 (F, BW, CD, DQ, VL)

and both again under llama_cpp/lib/, where the Python binding loads them from. The dynamic loader (glibc 2.33 and newer)
looks into glibc-hwcaps/x86-64-v4 of each RUNPATH directory first, on processors that have that level, so one wheel is
portable and fast without a line of our own. See ld.so(8), "glibc-hwcaps".

Refused:
- GGML_NATIVE, upstream's default: the wheel dies with SIGILL on an older processor; and on one with AMX, gcc 12 builds
  a ggml that crashes at its first matrix product.
- GGML_CPU_ALL_VARIANTS: selects at run time too, but compiles 14 variants, one with AMX, and needs a loader call.
- AVX-512 VNNI in the second layer: 10 % faster in prefill, but x86-64-v4 does not promise it (Skylake has none).
- pip's own wheel cache: it knows an sdist by its name and would hand over a wheel built with other CMAKE_ARGS.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SDIST = HERE / "sdist.txt"
RECIPE = 1
"""Raise when the same inputs must give another wheel: it is part of the key."""

ENVIRONMENT = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAFLAGS", "CUDAARCHS", "CMAKE_PREFIX_PATH")
"""Variables that change what CMake builds, and so are part of the key."""

INSTRUCTION_SETS = re.compile(
    r"GGML_(SSE42|AVX.*|AMX.*|FMA|F16C|BMI2|CPU_ALL_VARIANTS|BACKEND_DL)|LLAMA_USE_SYSTEM_GGML"
)
"""Definitions by which a user chooses instruction sets or loading himself; there is no second layer beside them."""

AVX512_LAYER = Path("glibc-hwcaps", "x86-64-v4")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
PROGRESS_S = 20.0
LOG_TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides what the wheel contains. `key` names its place in the cache.

    The Python version is no part of it: the binding is ctypes, its wheel is tagged py3-none.
    """

    version: str
    machine: str
    libc: str
    cmake_args: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str]) -> Recipe:
        libc, libc_version = platform.libc_ver()
        return cls(
            version=sdist_version(),
            machine=platform.machine(),
            libc=f"{libc}{libc_version}",
            cmake_args=("-DGGML_NATIVE=OFF", "-DLLAVA_BUILD=OFF", *shlex.split(environ.get("CMAKE_ARGS", ""))),
            environment=tuple((name, environ[name]) for name in ENVIRONMENT if environ.get(name)),
        )

    @property
    def key(self) -> str:
        parts = [RECIPE, self.version, self.machine, self.libc, self.cmake_args, self.environment]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return f"{self.version}-{self.machine}-{self.libc}-{digest[:12]}"

    @property
    def definitions(self) -> dict[str, str]:
        """The -D arguments by name; the last one counts, as in CMake."""
        found = (re.fullmatch(r"-D(\w+)(?::\w+)?=(.*)", arg) for arg in self.cmake_args)
        return {match[1]: match[2] for match in found if match}

    @property
    def is_native(self) -> bool:
        return is_on(self.definitions["GGML_NATIVE"])

    @property
    def has_avx512_layer(self) -> bool:
        if self.machine != "x86_64" or self.is_native:
            return False
        if not is_on(self.definitions.get("BUILD_SHARED_LIBS", "ON")):
            return False
        return not any(INSTRUCTION_SETS.fullmatch(name) for name in self.definitions)


def is_on(value: str) -> bool:
    return value.upper() in {"1", "ON", "YES", "TRUE", "Y"}


def sdist_version() -> str:
    match = re.search(r"^llama-cpp-python==(\S+)", SDIST.read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{SDIST} names no version; restore its line `llama-cpp-python==VERSION --hash=sha256:...`.")
    return match[1]


def cache_dir(environ: Mapping[str, str]) -> Path:
    root = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    return Path(root) / "ringfence" / "wheels"


def say(text: str) -> None:
    print(f"ringfence: {text}", file=sys.stderr, flush=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive flock on `path`. The kernel drops it with the process, so a killed build blocks nobody."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building libllama; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Build:
    """One build in a scratch directory: download, base layer, AVX-512 layer."""

    def __init__(self, recipe: Recipe, scratch: Path) -> None:
        self.recipe = recipe
        self.scratch = scratch
        self.log = scratch / "build.log"
        self.started_s = time.monotonic()

    def __repr__(self) -> str:
        return f"<Build {self.recipe.key} in {self.scratch}>"

    def run(self) -> Path:
        """Returns the directory with the finished wheel and the log, on the file system of the cache."""
        source = self.unpack(self.download())
        wheel = self.base_layer(source)
        if self.recipe.has_avx512_layer:
            self.add_avx512_layer(wheel, self.avx512_layer(source))
        done = self.scratch / "done"
        done.mkdir()
        shutil.move(wheel, done / wheel.name)
        shutil.copy(self.log, done / self.log.name)
        return done

    def download(self) -> Path:
        sdists = self.scratch / "sdist"
        options = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes"]
        self.step("downloading the sources", *PIP, "download", *options, "-r", SDIST, "-d", sdists)
        return only(sdists, "*.tar.gz")

    def unpack(self, sdist: Path) -> Path:
        with tarfile.open(sdist) as archive:
            archive.extractall(self.scratch, filter="data")
        return only(self.scratch, "llama_cpp_python-*")

    def base_layer(self, source: Path) -> Path:
        args = [*self.recipe.cmake_args, f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={HERE / 'trim.cmake'}"]
        wheels = self.scratch / "wheel"
        options = ["-v", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
        self.step("compiling libllama", *PIP, "wheel", *options, "-w", wheels, source, CMAKE_ARGS=shlex.join(args))
        return only(wheels, "*.whl")

    def avx512_layer(self, source: Path) -> Path:
        build = self.scratch / "avx512"
        args = [
            "-DCMAKE_BUILD_TYPE=Release",
            "-DBUILD_SHARED_LIBS=ON",
            *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")),
            *self.recipe.cmake_args,
            "-DGGML_AVX512=ON",
            "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
            "-DCMAKE_INSTALL_RPATH=$ORIGIN:$ORIGIN/../..",
        ]
        llama = source / "vendor" / "llama.cpp"
        self.step("configuring the AVX-512 layer", "cmake", "-G", "Ninja", "-S", llama, "-B", build, *args)
        self.step("compiling the AVX-512 layer", "cmake", "--build", build, "--target", "ggml-cpu")
        return only(build / "bin", "libggml-cpu.so.?")

    def add_avx512_layer(self, wheel: Path, library: Path) -> None:
        """Puts `library` into the wheel, beside each copy of the base layer, and writes the wheel's RECORD anew."""
        unpacked = self.scratch / "unpacked"
        self.step("packing the wheel", sys.executable, "-m", "wheel", "unpack", "-d", unpacked, wheel)
        root = only(unpacked, "*")
        for base in sorted(root.rglob(library.name)):
            layer = base.parent / AVX512_LAYER
            layer.mkdir(parents=True)
            shutil.copy(library, layer / library.name)
        self.step("packing the wheel", sys.executable, "-m", "wheel", "pack", "-d", wheel.parent, root)

    def step(self, what: str, *command: str | Path, **environment: str) -> None:
        """Runs `command` with its output in the log, and says how far it is. Raises SystemExit when it fails."""
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environment}
        with self.log.open("a") as log:
            print(f"\n$ {shlex.join(map(str, command))}", file=log, flush=True)
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
            try:
                while (code := self.wait(process)) is None:
                    say(f"{what} {self.position()}, {time.monotonic() - self.started_s:.0f} s")
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # pip, CMake and ninja below it
                raise
        if code != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise SystemExit(f"{tail}\nringfence: {what} failed with exit status {code}; the whole log is {self.log}")

    def wait(self, process: subprocess.Popen[bytes]) -> int | None:
        try:
            return process.wait(PROGRESS_S)
        except subprocess.TimeoutExpired:
            return None

    def position(self) -> str:
        """The last `[12/345]` that ninja wrote."""
        seen = re.findall(r"\[\d+/\d+\]", self.log.read_text(errors="replace"))
        return seen[-1] if seen else "..."


def only(directory: Path, pattern: str) -> Path:
    found = [path for path in directory.glob(pattern) if path.suffix != ".log"]
    if len(found) != 1:
        raise SystemExit(f"ringfence: expected one {pattern} in {directory}, found {len(found)}")
    return found[0]


def cached_wheel(place: Path) -> Path | None:
    return next(iter(place.glob("llama_cpp_python-*.whl")), None)


def warn_of_amx(recipe: Recipe) -> None:
    if recipe.is_native and "amx_tile" in Path("/proc/cpuinfo").read_text():
        say("warning: this processor has AMX; with GGML_NATIVE, gcc 12 builds a libllama that crashes")


def provide(recipe: Recipe, cache: Path) -> Path:
    """The wheel of `recipe`, from the cache, or built and left there for every other clone."""
    place = cache / recipe.key
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{recipe.key}.lock"):
        if wheel := cached_wheel(place):
            return wheel
        warn_of_amx(recipe)
        say(f"building libllama once, about 3 minutes on two cores, cached in {place}")
        scratch = cache / f".{recipe.key}"  # stays when the build fails, for its log; the next try begins anew
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        build = Build(recipe, scratch)
        build.run().rename(place)
        shutil.rmtree(scratch)
        say(f"built libllama in {time.monotonic() - build.started_s:.0f} s")
    wheel = cached_wheel(place)
    assert wheel is not None
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the wheel that carries libllama, once, and prints its path.")
    parser.add_argument("--key", action="store_true", help="print the wheel's key in the cache, and build nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    recipe = Recipe.of_this_machine(os.environ)
    print(recipe.key if options.key else provide(recipe, cache_dir(os.environ)))


if __name__ == "__main__":
    main()
