"""Token ids to text, piece by piece, stopping at stop strings wherever token and UTF-8 borders fall.

    ids -> bytes of their pieces -> characters complete so far -> [ sent | held ] -> client

Held back, and nothing else: the bytes of a character that isn't complete (three at most), and the longest end of the
text that a stop string begins with. So a character is sent with the token that completes it.

Invariant: what the pushes and the finish return, joined, depends on the ids alone, not on how they were batched. All
rules below are therefore rules on characters in their order:

- Bytes that are no UTF-8 become U+FFFD, one per maximal part (Unicode's practice, and Python's). A character cut off by
  the end of the output becomes one U+FFFD, streamed or not. No surrogates, no exceptions.
- The stop string that is *complete first* counts: with "STOP" and "STOPPED", always "STOP"; with "abcd" and "bc", "bc".
  Of several that end at the same character the longest counts, so that nothing of any of them is sent.
- Stop strings are compared by code points, without normalisation.
- An id outside the vocabulary is an empty piece: a decoder's table may be padded beyond the tokenizer's.

Search is an Aho-Corasick automaton: O(1) per character however the stop strings overlap. Refused: str.find on all text
so far (quadratic over a stream), and a regular expression (leftmost match first depends on the batching).
"""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence


class PieceTable:
    """The bytes of every token, and their text where they are whole characters by themselves.

    pieces: by token id. texts: str, or None where the bytes are part of a character or no UTF-8.
    """

    __slots__ = ("pieces", "texts")

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces: list[bytes] = list(pieces)
        self.texts: list[str | None] = [_whole_text(piece) for piece in self.pieces]

    def __len__(self) -> int:
        return len(self.pieces)

    def __repr__(self) -> str:
        return f"PieceTable({len(self)} pieces)"

    def __getitem__(self, token: int) -> bytes:
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def join(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.__getitem__, ids))


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class StopStrings:
    """Automaton over a request's stop strings. States are numbers, 0 is the start; `held[s]` characters are not yet
    decided.

    next[s]: next state by character. fail[s]: state of the longest proper end of s. ends[s]: length of the longest stop
    string that is complete in s, 0 for none; `texts[s]` is that stop string.
    """

    __slots__ = ("ends", "fail", "firsts", "held", "next", "texts")

    def __init__(self, stops: Sequence[str]) -> None:
        self.firsts = frozenset(stop[0] for stop in stops)
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.held = [0]
        self.ends = [0]
        self.texts = [""]
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        following = self.next[state].get(character)
        while following is None and state:
            state = self.fail[state]
            following = self.next[state].get(character)
        return following or 0

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self.next[state]:
                self._new_state(parent=state, character=character)
            state = self.next[state][character]
        self.ends[state], self.texts[state] = len(stop), stop

    def _new_state(self, *, parent: int, character: str) -> None:
        self.next[parent][character] = len(self.next)
        self.next.append({})
        self.fail.append(0)
        self.held.append(self.held[parent] + 1)
        self.ends.append(0)
        self.texts.append("")

    def _link(self) -> None:
        """Breadth first, so that a state's fail is final before its children need it."""
        waiting = deque(self.next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], character)
                waiting.append(child)
            if not self.ends[state]:
                shorter = self.fail[state]
                self.ends[state], self.texts[state] = self.ends[shorter], self.texts[shorter]


class Detokenizer:
    """One choice's output, from ids (not negative) and stop strings (not empty).

    stopped: the stop string that was found; from then on pushes return nothing and count nothing.
    tokens_used: ids taken, up to and including the one that completed the stop string.
    text_offsets: with `has_offsets`, for every id taken, the number of characters before it in the whole output.
    released: with `has_offsets`, how many of these ids have all their characters sent, or begin before a stop string: an
    endpoint sends their logprobs along with the text.
    """

    __slots__ = (
        "_automaton",
        "_characters",
        "_held",
        "_pieces",
        "_sent",
        "_state",
        "_tail",
        "_texts",
        "has_offsets",
        "is_finished",
        "released",
        "stopped",
        "text_offsets",
        "tokens_used",
    )

    def __init__(self, table: PieceTable, stops: Sequence[str] = (), *, has_offsets: bool = False) -> None:
        self._pieces = table
        self._texts = table.texts
        self._automaton = StopStrings(stops) if stops else None
        self._state = 0
        self._tail = b""  # bytes of a character that is not complete
        self._held = ""  # complete characters that may be the beginning of a stop string
        self._characters = 0  # complete so far, held ones included
        self._sent = 0
        self.has_offsets = has_offsets
        self.is_finished = False
        self.stopped: str | None = None
        self.tokens_used = 0
        self.text_offsets: list[int] = []
        self.released = 0

    def __repr__(self) -> str:
        return (
            f"Detokenizer(tokens={self.tokens_used}, sent={self._sent}, held={self._held!r}, tail={self._tail!r}, "
            f"stopped={self.stopped!r}, finished={self.is_finished})"
        )

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids add for good; may be empty. The ids after a stop string are not looked at."""
        if self._automaton is None and not self.has_offsets:
            return self._push_plain(ids)
        out = []
        for token in ids:
            if self.stopped is not None:
                break
            out.append(self._take(token))
        return "".join(out)

    def finish(self) -> str:
        """The output is over: what was held back and is no stop string. Further calls return nothing."""
        if self.is_finished or self.stopped is not None:
            self.is_finished = True
            return ""
        self.is_finished = True
        text = self._decode(b"", final=True)
        self._characters += len(text)
        if self._automaton is not None:
            text = self._scan(text)
        if self.stopped is None:
            text, self._held = text + self._held, ""
        self._sent += len(text)
        self._release()
        return text

    def _push_plain(self, ids: Sequence[int]) -> str:
        count = len(ids)
        self.tokens_used += count
        texts = self._texts
        if not self._tail:
            if count == 1 and (token := ids[0]) < len(texts) and (text := texts[token]) is not None:
                return text
            try:
                return "".join([texts[token] for token in ids])  # type: ignore[misc]
            except (TypeError, IndexError):
                pass  # a part of a character, or an id beyond the table
        return self._decode(self._pieces.join(ids))

    def _take(self, token: int) -> str:
        if self.has_offsets:
            self.text_offsets.append(self._characters)
        self.tokens_used += 1
        text = self._text(token)
        self._characters += len(text)
        if self._automaton is not None and (self._state or not self._automaton.firsts.isdisjoint(text)):
            text = self._scan(text)
        self._sent += len(text)
        if self.has_offsets:
            self._release()
        return text

    def _text(self, token: int) -> str:
        if not self._tail and token < len(self._texts):
            text = self._texts[token]
            if text is not None:
                return text
        return self._decode(self._pieces[token])

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        data = self._tail + data
        text, taken = codecs.utf_8_decode(data, "replace", final)
        self._tail = data[taken:]
        return text

    def _scan(self, text: str) -> str:
        """Move the automaton over new characters; returns what is decided, and keeps the rest in `_held`."""
        assert self._automaton is not None
        text_before = self._held
        state = self._state
        for place, character in enumerate(text):
            state = self._automaton.step(state, character)
            if self._automaton.ends[state]:
                self.stopped = self._automaton.texts[state]
                self._held = ""
                return (text_before + text[: place + 1])[: -self._automaton.ends[state]]
        self._state = state
        undecided = self._automaton.held[state]
        whole = text_before + text
        self._held = whole[len(whole) - undecided :]
        return whole[: len(whole) - undecided]

    def _release(self) -> None:
        """Ids whose characters are all sent; after a stop string, also the one that holds the last character sent."""
        offsets, count = self.text_offsets, self.released
        if self.stopped is not None:
            while count < len(offsets) and offsets[count] < self._sent:
                count += 1
        else:
            while count < len(offsets) and self._end_of(count) <= self._sent:
                count += 1
        self.released = count

    def _end_of(self, index: int) -> int:
        following = index + 1
        return self.text_offsets[following] if following < len(self.text_offsets) else self._characters
