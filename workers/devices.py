"""GPUs of this machine, each with the environment that shows it, and it alone, to one decoder.

NVIDIA: what `nvidia-smi -L` lists (MIG instances count instead of the GPU they are cut from), or, where that program
is missing, /proc/driver/nvidia/gpus. CUDA_VISIBLE_DEVICES is respected entry by entry, as the CUDA Programming Guide
defines it: the list ends at the first entry that names nothing. Entries are passed on as they were given, because
CUDA's own numbering need not be nvidia-smi's; without the variable, UUIDs are used, which have no order.

AMD: nodes of /sys/class/kfd that have SIMD units (ROCm); where there is no kfd, cards of /sys/class/drm by AMD with
at least 1 GiB of their own memory (Vulkan). ROCR_VISIBLE_DEVICES filters first, HIP_VISIBLE_DEVICES counts within
what is left.

Parsing is pure; only `find_devices` reads files and runs nvidia-smi.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

NVIDIA_SMI_TIMEOUT_S = 15.0
_AMD_VENDOR = "0x1002"
_VRAM_MINIMUM_BYTES = 1 << 30

_GPU_LINE = re.compile(r"^GPU \d+: (?P<name>.+?) \(UUID: (?P<uuid>GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"^\s+(?P<name>MIG .+?)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")


class DeviceKind(StrEnum):
    NVIDIA = "nvidia"
    AMD = "amd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU. name: as its driver calls it. environment: variables that make it the only visible one."""

    name: str
    kind: DeviceKind
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A GPU as a driver lists it, before the environment has filtered it. id: what the visibility variable accepts."""

    id: str
    name: str


def parse_nvidia_smi(listing: str) -> list[Found]:
    """GPUs of `nvidia-smi -L`; the MIG instances of a GPU that has any, instead of it."""
    found: list[Found] = []
    parent: Found | None = None
    for line in listing.splitlines():
        if gpu := _GPU_LINE.match(line):
            parent = Found(gpu["uuid"], gpu["name"])
            found.append(parent)
        elif mig := _MIG_LINE.match(line):
            if parent is not None and found and found[-1] is parent:
                found.pop()
            found.append(Found(mig["uuid"], f"{parent.name} {mig['name']}" if parent else mig["name"]))
    return found


def parse_nvidia_information(texts: Sequence[str]) -> list[Found]:
    """GPUs of /proc/driver/nvidia/gpus/*/information, given in the order of their bus addresses."""
    found: list[Found] = []
    for index, text in enumerate(texts):
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        uuid = fields.get("GPU UUID", "").strip()
        found.append(
            Found(
                uuid if uuid.startswith("GPU-") and "?" not in uuid else str(index),
                fields.get("Model", "NVIDIA").strip(),
            )
        )
    return found


def visible(found: Sequence[Found], variable: str | None) -> list[Found]:
    """What a visibility variable leaves of the devices: its entries in its order, up to the first that names none."""
    if variable is None:
        return list(found)
    chosen: list[Found] = []
    for entry in (part.strip() for part in variable.split(",")):
        device = _named(found, entry)
        if device is None or any(entry == other.id for other in chosen):
            break
        chosen.append(Found(entry, device.name))
    return chosen


def _named(found: Sequence[Found], entry: str) -> Found | None:
    if entry.isdecimal():
        return found[int(entry)] if int(entry) < len(found) else None
    matches = [device for device in found if entry and device.id.startswith(entry)]
    if len(matches) == 1:
        return matches[0]
    # A MIG instance can be named without being in the list when the listing came from /proc.
    return Found(entry, "NVIDIA MIG") if entry.startswith("MIG-") and not matches else None


def nvidia_devices(found: Sequence[Found], environment: Mapping[str, str]) -> list[Device]:
    chosen = visible(found, environment.get("CUDA_VISIBLE_DEVICES"))
    return [
        Device(name=gpu.name, kind=DeviceKind.NVIDIA, environment=(("CUDA_VISIBLE_DEVICES", gpu.id),)) for gpu in chosen
    ]


def amd_devices(found: Sequence[Found], environment: Mapping[str, str]) -> list[Device]:
    by_rocr = visible(found, environment.get("ROCR_VISIBLE_DEVICES"))
    numbered = [Found(str(index), gpu.name) for index, gpu in enumerate(by_rocr)]
    chosen = visible(numbered, environment.get("HIP_VISIBLE_DEVICES"))
    return [
        Device(
            name=gpu.name,
            kind=DeviceKind.AMD,
            environment=(("ROCR_VISIBLE_DEVICES", by_rocr[int(gpu.id)].id), ("HIP_VISIBLE_DEVICES", "0")),
        )
        for gpu in chosen
    ]


def read_kfd(root: Path) -> list[Found]:
    """AMD GPUs that ROCm can use, numbered in the order of their topology nodes."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    found: list[Found] = []
    for node in sorted(_entries(nodes), key=lambda path: (len(path.name), path.name)):
        fields = dict(line.split(None, 1) for line in _text(node / "properties").splitlines() if " " in line)
        if fields.get("simd_count", "0").strip() not in ("", "0"):
            found.append(Found(str(len(found)), _text(node / "name").strip() or "AMD GPU"))
    return found


def read_drm(root: Path) -> list[Found]:
    """AMD cards with memory of their own, numbered as Vulkan counts them."""
    found: list[Found] = []
    for card in sorted(_entries(root / "sys/class/drm"), key=lambda path: (len(path.name), path.name)):
        if not re.fullmatch(r"card\d+", card.name) or _text(card / "device/vendor").strip() != _AMD_VENDOR:
            continue
        memory = _text(card / "device/mem_info_vram_total").strip()
        if memory.isdecimal() and int(memory) >= _VRAM_MINIMUM_BYTES:
            found.append(Found(str(len(found)), _text(card / "device/product_name").strip() or "AMD GPU"))
    return found


def find_devices(*, root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> list[Device]:
    """GPUs that this process may use, NVIDIA's first. root: where /proc and /sys are, for tests."""
    variables = os.environ if environment is None else environment
    devices = nvidia_devices(_find_nvidia(root), variables)
    kfd = read_kfd(root)
    devices += amd_devices(kfd, variables)
    if not kfd:
        devices += [
            Device(name=gpu.name, kind=DeviceKind.AMD, environment=(("GGML_VK_VISIBLE_DEVICES", gpu.id),))
            for gpu in visible(read_drm(root), variables.get("GGML_VK_VISIBLE_DEVICES"))
        ]
    return devices


def _find_nvidia(root: Path) -> list[Found]:
    if root == Path("/") and (program := shutil.which("nvidia-smi")) is not None:
        listing = _run_nvidia_smi(program)
        if listing is not None:
            return parse_nvidia_smi(listing)
    gpus = sorted(_entries(root / "proc/driver/nvidia/gpus"))
    return parse_nvidia_information([_text(gpu / "information") for gpu in gpus])


def _run_nvidia_smi(program: str) -> str | None:
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
