"""The token ring under load: one process writes, another reads, each on its own core, and every record is checked.

    python -m bench.ring_soak [--records 10000000] [--ring-records 64] [--seed 1]

Record n says n in both of its words, so a lost, repeated, torn or early record is seen at once. The writer publishes
batches of random size and now and then pauses; so does the reader. The ring is small, so that it wraps and fills all
the time. A reader that waits a second for the doorbell while records are there has lost a wake-up, and that fails too.
"""

import argparse
import os
import random
import select
import subprocess
import sys
import time
from dataclasses import dataclass

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from shm.doorbell import Doorbell
from shm.layout import Layout
from shm.ring import Kind, RingReader, RingWriter, record_head
from shm.segment import Segment

_EPOCH = 7
_LOW = 0xFFFFFFFF
_STALL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What a soak saw. wakeups: times the doorbell was answered."""

    records: int
    seconds: float
    wakeups: int

    def __str__(self) -> str:
        rate = self.records / self.seconds / 1e6
        return f"{self.records} records in {self.seconds:.1f} s ({rate:.2f} M/s), {self.wakeups} wake-ups, no error"


class RingFault(Exception):
    """A record that is not what was written, or a wake-up that never came."""


def heads(start: int, count: int) -> list[int]:
    """Head words of records `start` to `start + count`: the low half of the number is the generation."""
    tail = record_head(0, 0, Kind.TOKEN)
    return [(number & _LOW) << 32 | tail for number in range(start, start + count)]


def soak(records: int, *, ring_records: int = 64, seed: int = 1) -> Soak:
    """Pass `records` records through a ring between two processes. Raises RingFault."""
    segment = Segment.create(Layout(slots=1, context=16, ring_records=ring_records), epoch=_EPOCH)
    bell = Doorbell.create()
    numbers = [segment.fd, bell.fd, records, seed]
    writer = subprocess.Popen(
        [sys.executable, "-S", "-E", os.path.abspath(__file__), "--writer", ",".join(map(str, numbers))],
        pass_fds=[segment.fd, bell.fd],
    )
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[:1])
        os.sched_setaffinity(writer.pid, cores[1:] or cores)
        began_s = time.monotonic()
        wakeups = _read(RingReader(segment), bell, records, random.Random(seed + 1), writer)
        return Soak(records=records, seconds=time.monotonic() - began_s, wakeups=wakeups)
    finally:
        os.sched_setaffinity(0, cores)
        writer.kill()
        writer.wait()
        segment.close()
        bell.close()


def _read(
    reader: RingReader, bell: Doorbell, records: int, chance: random.Random, writer: "subprocess.Popen[bytes]"
) -> int:
    taken = wakeups = 0
    while taken < records:
        if not select.select([bell], (), (), _STALL_S)[0]:
            if reader.fill:
                raise RingFault(f"no wake-up for {_STALL_S} s, with {reader.fill} records waiting after {taken}")
            if writer.poll() is not None:
                raise RingFault(f"the writer ended with status {writer.returncode} after {taken} records")
            continue
        bell.clear()
        wakeups += 1
        words = reader.drain()
        count = len(words) // 2
        if words[1::2] != list(range(taken, taken + count)) or words[::2] != heads(taken, count):
            raise RingFault(f"records {taken} to {taken + count} are not what was written: {words[:8]}")
        taken += count
        if chance.random() < 0.001:
            time.sleep(chance.random() * 0.002)
    return wakeups


def _write(segment_fd: int, bell_fd: int, records: int, seed: int) -> None:
    ring = RingWriter(Segment.attach(segment_fd, epoch=_EPOCH))
    bell = Doorbell(bell_fd)
    chance = random.Random(seed)
    tail = record_head(0, 0, Kind.TOKEN)
    written = 0
    while written < records:
        for number in range(written, min(written + chance.randint(1, ring.capacity), records)):
            while not ring.try_push((number & _LOW) << 32 | tail, number >> 32, number & _LOW):
                if ring.publish():
                    bell.ring()
                os.sched_yield()
            written += 1
        if ring.publish():
            bell.ring()
        if chance.random() < 0.001:
            time.sleep(chance.random() * 0.002)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the token ring between two processes.")
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--ring-records", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--writer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.writer:
        _write(*map(int, options.writer.split(",")))
    else:
        print(soak(options.records, ring_records=options.ring_records, seed=options.seed))


if __name__ == "__main__":
    main()
