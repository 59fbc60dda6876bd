"""From configuration and machine to the pool's settings: which worker gets which device, which cores, which decoder
command.

One worker per GPU, or on CPUs a few with the cores split evenly. Cores that share a physical core (hyper-threads)
stay together, so that two decoders never compete for one.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from native.binary import decoder_path
from server.config import Config, ConfigError
from shm.layout import MIN_RING_RECORDS
from workers.devices import Device
from workers.settings import PoolSettings, WorkerSettings

CPU_WORKERS = 2
_GPU_THREADS = 8  # a decoder on a GPU computes little on the CPU
_HIDE_GPUS = (("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", ""))


def usable_cores(*, root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """The cores this process may run on, as groups that share a physical core, in order."""
    allowed = set(psutil.Process().cpu_affinity() or range(psutil.cpu_count() or 1))
    groups: list[tuple[int, ...]] = []
    for core in sorted(allowed):
        if any(core in group for group in groups):
            continue
        siblings = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        try:
            shared = parse_core_list(siblings.read_text())
        except (OSError, ValueError):
            shared = {core}
        groups.append(tuple(sorted((shared | {core}) & allowed)))
    return tuple(groups)


def parse_core_list(text: str) -> set[int]:
    """A kernel core list such as `0,32` or `0-3`. Raises ValueError."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def split_cores(groups: Sequence[tuple[int, ...]], parts: int) -> list[tuple[int, ...]]:
    """Disjoint shares, as equal as whole physical cores allow; single threads if those are too few; all to each if
    not even that."""
    units = list(groups) if len(groups) >= parts else [(core,) for group in groups for core in group]
    if len(units) < parts:
        return [tuple(core for unit in units for core in unit)] * parts
    bounds = [len(units) * part // parts for part in range(parts + 1)]
    return [tuple(core for unit in units[first:last] for core in unit) for first, last in pairwise(bounds)]


def choose_devices(config: Config, devices: Sequence[Device]) -> list[Device]:
    """The devices that `gpus` selects. Raises ConfigError for a number that no device has."""
    if config.gpus is None:
        return list(devices)
    chosen = []
    for word in config.gpus:
        if int(word) >= len(devices):
            have = f"has {len(devices)}, numbered from 0" if devices else "has none that this process can see"
            raise ConfigError(f"`gpus` can't hold {word}: this machine {have}. `ringfence check` lists devices.")
        chosen.append(devices[int(word)])
    return chosen


def pool_settings(
    config: Config,
    devices: Sequence[Device],
    *,
    cores: Sequence[tuple[int, ...]] | None = None,
    end_ids: Iterable[int] = (),
) -> PoolSettings:
    """Settings of the pool. devices: all that the machine has. end_ids: tokens that end a generation.

    Raises ConfigError, and DecoderMissing without a decoder."""
    groups = usable_cores() if cores is None else tuple(cores)
    chosen = choose_devices(config, devices)
    total = sum(len(group) for group in groups)
    count = config.workers or (len(chosen) if chosen else min(CPU_WORKERS, max(1, total)))
    shares = split_cores(groups, count)
    return PoolSettings(
        workers=tuple(_worker(config, index, chosen, shares[index]) for index in range(count)),
        slots=config.slots,
        context=config.context,
        ring_records=_ring_records(config),
        queue_requests=config.queue_requests,
        queue_tokens=config.queue_tokens,
        wait_for_workers_s=config.wait_for_workers_s,
        end_ids=tuple(sorted(end_ids)),
        poison_limit=config.poison_limit,
        memory_limit_bytes=config.memory_limit,
        watchdog_interval_s=config.watchdog_interval_s,
        incidents_dir=config.incidents_dir,
        incidents_kept=config.incidents_kept,
        incidents_with_content=config.incidents_with_content,
    )


def _ring_records(config: Config) -> int:
    """As configured, rounded up to a power of two that a ring can have; by default half a thousand for each slot."""
    return _power_of_two(max(config.ring_records or max(1024, config.slots * 512), MIN_RING_RECORDS))


def _worker(config: Config, index: int, devices: Sequence[Device], share: tuple[int, ...]) -> WorkerSettings:
    device = devices[index % len(devices)] if devices else None
    if device is not None:
        environment = device.environment
    else:
        environment = _HIDE_GPUS if config.gpus == () else ()
    return WorkerSettings(
        index=index,
        decoder_command=_command(config, on_gpu=device is not None, cores=len(share)),
        environment=environment,
        cores=() if device is not None else share,
        device=f"{device.name} ({device.environment[0][1]})" if device is not None else "cpu",
        start_limit_s=config.start_limit_s,
        hang_limit_s=config.hang_limit_s,
        stall_limit_s=config.stall_limit_s,
        kill_grace_s=config.kill_grace_s,
        backoff_first_s=config.backoff_first_s,
        backoff_cap_s=config.backoff_cap_s,
        stable_after_s=config.stable_after_s,
        deaths_limit=config.deaths_limit,
        unload_idle_s=config.unload_idle_s,
    )


def _command(config: Config, *, on_gpu: bool, cores: int) -> tuple[str, ...]:
    if config.decoder_command:
        return config.decoder_command
    threads = config.threads or (min(cores, _GPU_THREADS) if on_gpu else cores)
    return (
        str(decoder_path()),
        "--model",
        str(Path(config.model).expanduser().resolve()),
        "--context",
        str(config.context),
        "--slots",
        str(config.slots),
        "--threads",
        str(max(1, threads)),
        "--gpu-layers",
        str(config.gpu_layers if on_gpu else 0),
        "--kv-type",
        config.kv_type,
        *config.decoder_options,
    )


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
