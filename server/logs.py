"""Log lines: `time level logger message`, where the message is key=value already; or one JSON object each.

They are written by a thread of their own behind a bounded queue: whoever reads our standard error may be slow, and
must not hold the event loop. When the queue is full lines are dropped, and the next one that fits says how many.
"""

import atexit
import logging
import logging.handlers
import queue
import sys
import time

import msgspec

QUEUED_LINES = 10_000
LAST_LINES_S = 1.0  # what a reader that is stuck has at our exit


class TextLines(logging.Formatter):
    """2026-01-31T12:00:00.123Z INFO ringfence.request event=request id=..."""

    converter = time.gmtime  # type: ignore[assignment]
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")


class JsonLines(logging.Formatter):
    """One object per line, with the message as it is."""

    converter = time.gmtime  # type: ignore[assignment]
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class BoundedQueueHandler(logging.handlers.QueueHandler):
    """Hands records to the writing thread; drops them when it is far behind."""

    def __init__(self, records: "queue.Queue[logging.LogRecord]") -> None:
        super().__init__(records)
        self.dropped = 0  # since the last line that told of it
        self.dropped_total = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self.dropped:
                self.queue.put_nowait(_dropped(self.dropped))
                self.dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            self.dropped_total += 1

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record as it is: only our own writer reads it, in this process."""
        return record


def dropped_lines() -> int:
    """Lines of this process that nobody will see, because whoever reads the log was too slow."""
    return sum(handler.dropped_total for handler in logging.root.handlers if isinstance(handler, BoundedQueueHandler))


def _dropped(count: int) -> logging.LogRecord:
    return logging.LogRecord("ringfence.logs", logging.WARNING, "", 0, "event=dropped lines=%d", (count,), None)


def configure(*, level: str, style: str) -> None:
    """Log to standard error. uvicorn's own loggers come along, but for its access log: the entrance has a better
    line."""
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(JsonLines() if style == "json" else TextLines())
    records: queue.Queue[logging.LogRecord] = queue.Queue(QUEUED_LINES)
    listener = logging.handlers.QueueListener(records, writer)
    listener.start()
    atexit.register(_finish, records)
    root = logging.getLogger()
    root.handlers[:] = [BoundedQueueHandler(records)]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))


def _finish(records: "queue.Queue[logging.LogRecord]") -> None:
    """Let the last lines be written, but wait for no reader that is stuck."""
    until_s = time.monotonic() + LAST_LINES_S
    while records.unfinished_tasks and time.monotonic() < until_s:
        time.sleep(0.005)
