"""The other process of the two-process tests: started anew (not forked from the test), with inherited descriptors.

python -S -E tests/shm/peer.py ROLE SEGMENT_FD EPOCH

exit, raise, wait   attach, say so on stdout, then end normally, by an exception, or wait to be killed
toggle              write two patterns to a board word and two texts, in turns, until stdin ends
writers             for every line on stdin fork a process that writes the ring until it is killed; print its pid,
                    and a line when it is gone
answer              wait for a request, answer it with its own prompt backwards, until stdin ends
"""

import os
import random
import select
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from shm.board import Board, Word
from shm.ring import Kind, RingWriter, record_head
from shm.segment import Segment
from shm.slots import Finish, SlotHolder, SlotResult

PATTERNS = (0, 0xFFFFFFFFFFFFFFFF, 0x00000000FFFFFFFF, 0x1122334455667788)
TEXTS = ("a" * 500, "b" * 40, "")


def words_of(number: int) -> tuple[int, int, int]:
    """Head, value and detail of record `number`, each of them telling which record it is."""
    return record_head(number & 0xFF, number, Kind.TOKEN), number & 0xFFFFFFFF, ~number & 0xFFFFFFFF


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def has_ended() -> bool:
    return bool(select.select([0], (), (), 0)[0])


def toggle(segment: Segment) -> None:
    board = Board(segment)
    say("toggling")
    while not has_ended():
        for _ in range(200):
            for pattern in PATTERNS:
                board.set(Word.STEPS, pattern)
            for text in TEXTS:
                board.error.write(text)


def writers(segment: Segment) -> None:
    for _ in iter(lambda: os.read(0, 1), b""):
        child = os.fork()
        if child == 0:
            write_forever(RingWriter(segment))
        say(str(child))
        os.waitpid(child, 0)
        say("gone")


def write_forever(ring: RingWriter) -> None:
    number = ring._next
    chance = random.Random(os.getpid())
    while True:
        for _ in range(chance.randint(1, 8)):
            while not ring.try_push(*words_of(number)):
                ring.publish()
                os.sched_yield()
            number += 1
        ring.publish()


def answer(segment: Segment) -> None:
    slots = SlotHolder(segment)
    ring = RingWriter(segment)
    say("waiting")
    while not has_ended():
        os.sched_yield()
        for slot, generation in slots.arrivals():
            request = slots.read(slot, generation)
            text = bytes(request.prompt)[::-1].decode()
            result = SlotResult(finish=Finish.STOP, prompt_tokens=request.prompt_tokens, error=text)
            slots.write_result(slot, generation, result)
            ring.try_push(record_head(slot, generation, Kind.END), Finish.STOP)
            ring.publish()


def main() -> None:
    role, segment_fd, epoch = sys.argv[1:4]
    segment = Segment.attach(int(segment_fd), epoch=int(epoch))
    roles = {"toggle": toggle, "writers": writers, "answer": answer}
    if role in roles:
        roles[role](segment)
        return
    say("attached")
    if role == "raise":
        raise RuntimeError("the peer ends by an exception")
    if role == "wait":
        os.read(0, 1)


if __name__ == "__main__":
    main()
