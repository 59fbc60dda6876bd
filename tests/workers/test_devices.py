"""GPUs as drivers list them, and what the visibility variables leave of them."""

from pathlib import Path

import pytest

from workers.devices import Device, DeviceKind, find_devices, nvidia_devices, parse_nvidia_smi

TWO_GPUS = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa0000-1111-2222-3333-444444444444)
GPU 1: NVIDIA RTX 4090 (UUID: GPU-bbbb0000-1111-2222-3333-444444444444)
"""
MIG = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa0000-1111-2222-3333-444444444444)
  MIG 1g.18gb     Device  0: (UUID: MIG-1111aaaa-0000-0000-0000-000000000000)
  MIG 2g.35gb     Device  1: (UUID: MIG-2222aaaa-0000-0000-0000-000000000000)
GPU 1: NVIDIA RTX 4090 (UUID: GPU-bbbb0000-1111-2222-3333-444444444444)
"""


def shown(listing: str, variable: str | None) -> list[str]:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    return [
        dict(device.environment)["CUDA_VISIBLE_DEVICES"]
        for device in nvidia_devices(parse_nvidia_smi(listing), environment)
    ]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["GPU-aaaa0000-1111-2222-3333-444444444444", "GPU-bbbb0000-1111-2222-3333-444444444444"]),
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        ("0,7,1", ["0"]),
        ("0,0", ["0"]),
        ("GPU-bbbb", ["GPU-bbbb"]),
        ("", []),
        ("-1", []),
        ("nonsense", []),
    ],
)
def test_cuda_visible_devices_is_respected_entry_by_entry(variable: str | None, expected: list[str]) -> None:
    assert shown(TWO_GPUS, variable) == expected


def test_mig_instances_count_instead_of_their_gpu() -> None:
    assert [name.split("-")[0] for name in shown(MIG, None)] == ["MIG", "MIG", "GPU"]
    assert parse_nvidia_smi(MIG)[0].name == "NVIDIA H200 MIG 1g.18gb"


def test_a_listing_without_gpus_is_empty() -> None:
    assert parse_nvidia_smi("No devices found.\n") == []


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_proc_is_read_where_nvidia_smi_is_missing(tmp_path: Path) -> None:
    write(
        tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-aaaa\n"
    )
    write(
        tmp_path,
        "proc/driver/nvidia/gpus/0000:02:00.0/information",
        "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-????????\n",
    )
    assert find_devices(root=tmp_path, environment={}) == [
        Device(name="NVIDIA H200", kind=DeviceKind.NVIDIA, environment=(("CUDA_VISIBLE_DEVICES", "GPU-aaaa"),)),
        Device(name="NVIDIA H200", kind=DeviceKind.NVIDIA, environment=(("CUDA_VISIBLE_DEVICES", "1"),)),
    ]


def kfd_tree(root: Path) -> None:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    write(root, f"{nodes}/0/properties", "cpu_cores_count 32\nsimd_count 0\n")
    for node in (1, 2, 10):
        write(root, f"{nodes}/{node}/properties", "cpu_cores_count 0\nsimd_count 304\n")
        write(root, f"{nodes}/{node}/name", f"gfx{node}\n")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["0", "1", "2"]),
        ({"ROCR_VISIBLE_DEVICES": "2,1"}, ["2", "1"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_rocm_devices_are_counted_and_filtered(
    tmp_path: Path, environment: dict[str, str], expected: list[str]
) -> None:
    kfd_tree(tmp_path)
    devices = find_devices(root=tmp_path, environment=environment)
    assert [dict(device.environment)["ROCR_VISIBLE_DEVICES"] for device in devices] == expected
    assert all(dict(device.environment)["HIP_VISIBLE_DEVICES"] == "0" for device in devices)


def test_kfd_nodes_are_in_numeric_order(tmp_path: Path) -> None:
    kfd_tree(tmp_path)
    assert [device.name for device in find_devices(root=tmp_path, environment={})] == ["gfx1", "gfx2", "gfx10"]


def test_without_kfd_amd_cards_with_their_own_memory_count(tmp_path: Path) -> None:
    write(tmp_path, "sys/class/drm/card0/device/vendor", "0x1002\n")
    write(tmp_path, "sys/class/drm/card0/device/mem_info_vram_total", str(512 << 20))
    write(tmp_path, "sys/class/drm/card1/device/vendor", "0x1002\n")
    write(tmp_path, "sys/class/drm/card1/device/mem_info_vram_total", str(24 << 30))
    write(tmp_path, "sys/class/drm/card1-DP-1/device/vendor", "0x1002\n")
    write(tmp_path, "sys/class/drm/card2/device/vendor", "0x10de\n")
    devices = find_devices(root=tmp_path, environment={})
    assert devices == [Device(name="AMD GPU", kind=DeviceKind.AMD, environment=(("GGML_VK_VISIBLE_DEVICES", "0"),))]


def test_a_machine_without_gpus_has_none(tmp_path: Path) -> None:
    assert find_devices(root=tmp_path, environment={}) == []
