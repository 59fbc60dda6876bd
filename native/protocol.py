"""The decoder protocol (docs/protocol.md), solo and tagged dialects: UTF-8 text, one message a line.

    server            worker                                  decoder
    encode_ids  --->  Encoder.keys, head, stop; QUIT     --->  stdin
                      LineReader -> AnswerParser.parse   <---  stdout
                      Info, parse_ready, choose_dialect  <---  stdout, before READY

    lines.py      LineReader, ProtocolViolation
    dialect.py    Info, Ready, Dialect
    commands.py   Encoder, encode_ids, unsupported
    answers.py    AnswerParser, Kind, DoneFields

Nothing here reads, writes or waits. A line that breaks the protocol is a ProtocolViolation: the worker counts it, and
no part of it reaches a client.
"""

from native.answers import (
    FATAL_ERRORS,
    LEAST_LOGPROB,
    NO_REQUEST,
    Answer,
    AnswerParser,
    DoneFields,
    DoneFinish,
    Kind,
)
from native.commands import QUIT, Encoder, encode_ids, unsupported
from native.dialect import Dialect, Info, Ready, UnsupportedDialect, choose_dialect, is_ready, parse_ready
from native.lines import LIMIT_BYTES, LineReader, ProtocolViolation

__all__ = [
    "FATAL_ERRORS",
    "LEAST_LOGPROB",
    "LIMIT_BYTES",
    "NO_REQUEST",
    "QUIT",
    "Answer",
    "AnswerParser",
    "Dialect",
    "DoneFields",
    "DoneFinish",
    "Encoder",
    "Info",
    "Kind",
    "LineReader",
    "ProtocolViolation",
    "Ready",
    "UnsupportedDialect",
    "choose_dialect",
    "encode_ids",
    "is_ready",
    "parse_ready",
    "unsupported",
]
