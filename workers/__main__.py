"""`python -m workers`: a worker process, started by the server with its descriptors (workers/incarnation.py)."""

import argparse
import faulthandler
import gc
import os
import sys

import msgspec

from shm.doorbell import Doorbell
from shm.segment import Segment, SegmentMismatch
from workers.process import WorkerProcess, install_signals
from workers.settings import WorkerSettings

BAD_START = 3  # exit code of a worker that could not begin


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers", description="A ringfence worker; started by the server.")
    for name in ("epoch", "segment-fd", "bell-fd", "server-bell-fd", "lifeline-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--settings", required=True)
    arguments = parser.parse_args()
    faulthandler.enable()
    os.set_blocking(2, False)
    for fd in (arguments.segment_fd, arguments.bell_fd, arguments.server_bell_fd, arguments.lifeline_fd):
        os.set_inheritable(fd, False)  # the decoder must not hold them
    try:
        settings = msgspec.json.decode(arguments.settings, type=WorkerSettings)
        segment = Segment.attach(arguments.segment_fd, epoch=arguments.epoch)
    except (msgspec.MsgspecError, SegmentMismatch) as error:
        sys.stderr.write(f"worker cannot start: {error}\n")
        return BAD_START
    worker = WorkerProcess(
        settings,
        segment,
        bell=Doorbell(arguments.bell_fd),
        server_bell=Doorbell(arguments.server_bell_fd),
        lifeline_fd=arguments.lifeline_fd,
    )
    install_signals(worker)
    gc.collect()
    gc.freeze()  # what the start made is never garbage; collections stay short
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
