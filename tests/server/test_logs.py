"""Log lines, and that nobody who reads them slowly holds the server."""

import io
import json
import logging
import logging.handlers
import queue

from server.logs import BoundedQueueHandler, JsonLines, TextLines


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("ringfence.test", logging.INFO, "", 0, message, arguments, None)


def test_a_text_line_has_time_level_logger_and_message() -> None:
    line = TextLines().format(record("event=x worker=%d", 3))
    assert line.endswith("Z INFO ringfence.test event=x worker=3") and line[10] == "T"


def test_a_json_line_is_one_object() -> None:
    line = json.loads(JsonLines().format(record('event=x text="%s"', "a\nb")))
    assert (line["level"], line["logger"], line["message"]) == ("info", "ringfence.test", 'event=x text="a\nb"')


def test_a_full_queue_drops_lines_and_says_how_many() -> None:
    records: queue.Queue[logging.LogRecord] = queue.Queue(2)
    handler = BoundedQueueHandler(records)
    for number in range(5):
        handler.handle(record("event=%d", number))
    assert [records.get_nowait().getMessage() for _ in range(2)] == ["event=0", "event=1"]
    handler.handle(record("event=5"))
    assert [records.get_nowait().getMessage() for _ in range(2)] == ["event=dropped lines=3", "event=5"]
    assert (handler.dropped, handler.dropped_total) == (0, 3)


def test_lines_are_written_by_another_thread() -> None:
    sink = io.StringIO()
    records: queue.Queue[logging.LogRecord] = queue.Queue(10)
    writer = logging.StreamHandler(sink)
    writer.setFormatter(TextLines())
    listener = logging.handlers.QueueListener(records, writer)
    listener.start()
    BoundedQueueHandler(records).handle(record("event=written"))
    listener.stop()
    assert "event=written" in sink.getvalue()
