"""Which worker gets which device, cores and command."""

from pathlib import Path
from typing import Any

import pytest

from server import fleet
from server.config import Config, ConfigError
from server.fleet import parse_core_list, pool_settings, split_cores
from workers.devices import Device, DeviceKind

GPUS = [
    Device(
        name=f"NVIDIA H200 #{index}", kind=DeviceKind.NVIDIA, environment=(("CUDA_VISIBLE_DEVICES", f"GPU-{index}"),)
    )
    for index in range(3)
]
FOUR = ((0,), (1,), (2,), (3,))


@pytest.fixture(autouse=True)
def decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "decoder_path", lambda: Path("/bin/decoder"))


def config(**values: Any) -> Config:
    return Config(**{"model": "/models/m.gguf", **values})


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.parametrize(
    ("groups", "parts", "shares"),
    [
        (FOUR, 2, [(0, 1), (2, 3)]),
        (((0, 4), (1, 5), (2, 6), (3, 7)), 2, [(0, 4, 1, 5), (2, 6, 3, 7)]),
        (FOUR, 3, [(0,), (1,), (2, 3)]),
        (((0, 1),), 2, [(0,), (1,)]),
        (((0,),), 2, [(0,), (0,)]),
        (FOUR, 1, [(0, 1, 2, 3)]),
    ],
)
def test_cores_are_split_evenly_and_by_physical_core(groups: Any, parts: int, shares: Any) -> None:
    assert split_cores(groups, parts) == shares


@pytest.mark.parametrize(
    ("text", "cores"), [("0", {0}), ("0,32", {0, 32}), ("0-3", {0, 1, 2, 3}), ("0-1,4\n", {0, 1, 4})]
)
def test_core_lists_of_the_kernel(text: str, cores: set[int]) -> None:
    assert parse_core_list(text) == cores


def test_the_cores_of_this_process_are_found() -> None:
    groups = fleet.usable_cores()
    assert groups and len({core for group in groups for core in group}) == sum(map(len, groups))


def test_without_gpus_two_workers_share_the_cores() -> None:
    settings = pool_settings(config(), [], cores=FOUR)
    assert [worker.cores for worker in settings.workers] == [(0, 1), (2, 3)]
    assert [option(worker.decoder_command, "--threads") for worker in settings.workers] == ["2", "2"]
    assert option(settings.workers[0].decoder_command, "--gpu-layers") == "0"
    assert settings.workers[0].decoder_command[:3] == ("/bin/decoder", "--model", "/models/m.gguf")


def test_one_core_gets_one_worker() -> None:
    assert len(pool_settings(config(), [], cores=((0,),)).workers) == 1


def test_each_gpu_gets_a_worker_that_sees_it_alone() -> None:
    settings = pool_settings(config(), GPUS, cores=FOUR)
    assert [worker.environment for worker in settings.workers] == [gpu.environment for gpu in GPUS]
    assert all(worker.cores == () for worker in settings.workers)
    assert option(settings.workers[0].decoder_command, "--gpu-layers") == "-1"
    assert settings.workers[1].device == "NVIDIA H200 #1 (GPU-1)"


def test_gpus_can_be_chosen_shared_and_refused() -> None:
    chosen = pool_settings(config(gpus=("2", "0"), workers=3), GPUS, cores=FOUR)
    assert [dict(worker.environment)["CUDA_VISIBLE_DEVICES"] for worker in chosen.workers] == [
        "GPU-2",
        "GPU-0",
        "GPU-2",
    ]
    none = pool_settings(config(gpus=()), GPUS, cores=FOUR)
    assert [worker.device for worker in none.workers] == ["cpu", "cpu"]
    assert dict(none.workers[0].environment)["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(ConfigError, match="numbered from 0"):
        pool_settings(config(gpus=("3",)), GPUS, cores=FOUR)
    with pytest.raises(ConfigError, match="none that this process can see"):
        pool_settings(config(gpus=("0",)), [], cores=FOUR)


def test_a_foreign_decoder_is_started_as_configured() -> None:
    settings = pool_settings(config(decoder_command=("strata", "--serve"), workers=1), [], cores=FOUR)
    assert settings.workers[0].decoder_command == ("strata", "--serve")


def test_bounds_reach_the_pool() -> None:
    values = {
        "slots": 8, "context": 512, "queue_requests": 9, "queue_tokens": 99, "poison_limit": 3, "memory_limit": 1 << 30,
        "hang_limit_s": 5.0, "start_limit_s": 6.0, "stall_limit_s": 7.0, "unload_idle_s": 8.0, "wait_for_workers_s": 1.0,
        "threads": 3, "kv_type": "q8_0", "decoder_options": ("--pace", "2"),
    }  # fmt: skip
    settings = pool_settings(config(**values), [], cores=FOUR, end_ids={7, 2})
    worker = settings.workers[0]
    assert (settings.slots, settings.context, settings.queue_requests, settings.queue_tokens) == (8, 512, 9, 99)
    assert (settings.poison_limit, settings.memory_limit_bytes, settings.end_ids) == (3, 1 << 30, (2, 7))
    assert (worker.hang_limit_s, worker.start_limit_s, worker.stall_limit_s, worker.unload_idle_s) == (
        5.0,
        6.0,
        7.0,
        8.0,
    )
    assert settings.wait_for_workers_s == 1.0
    assert settings.ring_records >= 8 * 512 and settings.ring_records & (settings.ring_records - 1) == 0
    assert option(worker.decoder_command, "--threads") == "3" and option(worker.decoder_command, "--kv-type") == "q8_0"
    assert worker.decoder_command[-2:] == ("--pace", "2")
