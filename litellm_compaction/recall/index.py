"""The index of what was said: passages of messages, the terms that stand in them, and which passages say most of some.

In memory, so that no word is at rest; not to be written to while another thread reads. A passage is ranked with its
neighbours, the nearer the more: the answer to a question mostly stands beside the words of it.

No language is known and no word is listed. Words are cut to their beginnings, scripts without spaces give pairs of
characters, and whatever is written like code (an identifier, a path, a number, an id) counts as it is written, too.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import regex

from litellm_compaction.core.forms import called
from litellm_compaction.core.messages import Message, calls_by_position, visible_text
from litellm_compaction.core.secrets import Redact, redactor
from litellm_compaction.core.stretches import divided, has_words

HANDLE_CHARS = 12
PASSAGE_CHARS = 600
# Of a longer message the rest is not searched; so much more is read for secrets that begin before the end.
_MOST_MESSAGE_CHARS, _MARGIN_CHARS = 400_000, 20_000
_REDACTOR = redactor(())
# How far a word counts for the passages around it, between their middles; 350 to 500 are the same.
_REACH_CHARS = 420
_MOST_BESIDE = 6
# Between conversations, so that nothing reaches over.
_SEAM_CHARS = 10_000
# Okapi's usual value; from half to twice as much nothing changes.
_K1 = 1.2
# A long message says much that was not asked for, and a person's words are what is asked for later.
_BREVITY, _USER = 0.5, 1.1
# Of the terms of a query the rarest count until so many places were looked at, which takes some ms.
_MOST_PLACES = 6000
# What stands in more of the passages is no help, and left out if something else is asked for.
_FREQUENT_RATIO, _LEAST_PASSAGES = 0.5, 40
_BREAKS = ("\n", ". ", "。", " ")


class Original(NamedTuple):
    """A message as it was, or a part of it by another author."""

    handle: str  # The same for all parts of a message.
    role: str  # Of who wrote it: what a client attached to a user's message is a tool's.
    turn: int  # The number of the person's message that it belongs to, from 1; 0 before the first.
    text: str  # Without secrets.
    call: str  # Of a result, the call that it answers, in a few words.


class Passage(NamedTuple):
    """A part of an original, whose place among all is given."""

    original: int
    start: int
    end: int


class Index:
    """Passages of the messages that were added, in their order, without secrets, and where each term stands."""

    def __init__(self, redact: Redact = _REDACTOR) -> None:
        self.originals: list[Original] = []
        self.passages: list[Passage] = []
        self.redact = redact
        self._first: dict[str, int] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._places: defaultdict[str, array[int]] = defaultdict(lambda: array("I"))
        self._near_chars: defaultdict[str, float] = defaultdict(float)
        self._middles = array("d")
        # By who says it, and in how many words.
        self._worth = array("d")
        self._chars = self._end = 0

    def add(self, messages: Sequence[Message], hashes: Sequence[str]) -> None:
        """Adds those messages of a conversation, without its leading system messages, that are not there yet.

        `hashes` are their hash chain, one more than there are messages.
        """
        if all(each[:HANDLE_CHARS] in self._first for each in hashes[1:]):
            return
        calls = calls_by_position(messages)
        for at, message in enumerate(messages):
            before, handle = hashes[at][:HANDLE_CHARS], hashes[at + 1][:HANDLE_CHARS]
            if handle in self._first:
                continue
            turn = self.originals[self._first[before]].turn if before in self._first else 0
            turn += message.role == "user" and not message.is_synthetic and has_words(message)
            if self.originals and self.originals[-1].handle != before:
                self._end += _SEAM_CHARS
            self._first[handle] = len(self.originals)
            call = self.redact(called(calls[at])) if at in calls else ""
            start = len(self.passages)
            for part in divided(message):
                text = "" if part.is_synthetic else visible_text(part).strip()
                text = self.redact(text[: _MOST_MESSAGE_CHARS + _MARGIN_CHARS])[:_MOST_MESSAGE_CHARS]
                self._file(Original(handle, part.role, turn, text, call))
            self._spans[handle] = start, len(self.passages)

    def find(self, handle: str) -> tuple[Original, ...]:
        """Returns the parts of a message; none for a handle of no message that was added."""
        parts = self.originals[self._first.get(handle, len(self.originals)) :]
        return tuple(itertools.takewhile(lambda part: part.handle == handle, parts))

    def text(self, passage: int) -> str:
        original, start, end = self.passages[passage]
        return self.originals[original].text[start:end]

    def follows(self, passage: int, other: int) -> bool:
        """Returns True if there are two such passages and the second stands directly behind the first."""
        if passage < 0 or other >= len(self.passages):
            return False
        return self._middles[other] - self._middles[passage] < _SEAM_CHARS

    def with_term(self, term: str, most: int) -> set[int]:
        """Returns the passages in which a term stands; none if there are more than `most`."""
        places = set(self._places.get(term, ())[:_MOST_PLACES])
        return places if len(places) <= most else set()

    def weight(self, term: str) -> float:
        """Returns how much a term says: the more, the less of everything stands near it."""
        number = len(self.passages)
        near = min(self._near_chars.get(term, 0.0) / max(self._chars, 1), 1.0) * number
        return math.log(1 + (number - near + 0.5) / (near + 0.5))

    def telling(self, found: Iterable[str]) -> list[str]:
        """Returns those terms that stand somewhere, the rarest first, without frequent ones where there are others."""
        times = {term: len(self._places[term]) for term in found if term in self._places}
        known = sorted(times, key=lambda term: (times[term], term))
        rare = [term for term in known if times[term] <= _FREQUENT_RATIO * len(self.passages)]
        return rare if rare and len(self.passages) >= _LEAST_PASSAGES else known

    def allowed(self, within: Collection[str] | None, visible: Collection[str]) -> bytearray:
        """Returns a 1 for each passage `within` some entries of the hash chain, None for all, that is not visible."""
        allowed = bytearray([within is None]) * len(self.passages)
        for entries, flag in ((within or (), b"\x01"), (visible, b"\x00")):
            for entry in entries:
                start, end = self.span(entry[:HANDLE_CHARS])
                allowed[start:end] = flag * (end - start)
        return allowed

    def span(self, handle: str) -> tuple[int, int]:
        """Returns the first passage of a message and the one after its last; the same twice for none."""
        return self._spans.get(handle, (0, 0))

    def ranked(
        self, weights: Mapping[str, float], allowed: bytearray, also: Collection[int]
    ) -> list[tuple[float, int]]:
        """Returns the passages that say most of some terms, with their scores, the best first.

        Of `weights` the rarest terms stand first; `also` are ranked in any case, besides passages with a term.
        """
        first, end = allowed.find(1), allowed.rfind(1) + 1
        scores: defaultdict[int, float] = defaultdict(float)
        own, left = set(also), _MOST_PLACES
        for term, weight in weights.items():
            places: Sequence[int] = self._places[term]
            start, stop = bisect_left(places, first), bisect_left(places, end)
            if left < _MOST_PLACES and stop - start > left:
                break
            # Of what stands nearly everywhere the newest.
            start = max(start, stop - left)
            left -= stop - start
            own.update(places[start:stop])
            times: defaultdict[int, float] = defaultdict(float)
            for place, number in Counter(places[start:stop]).items():
                for passage, share in self._around(place):
                    times[passage] += number * share
            for passage, often in times.items():
                scores[passage] += weight * often * (_K1 + 1) / (often + _K1)
        # Of equals the newer one first.
        return sorted(((scores[at] * self._worth[at], at) for at in own if allowed[at]), reverse=True)

    def best_score(self, wanted: Iterable[str]) -> float:
        """Returns the score of a passage that says some terms, known or not, and nothing else."""
        return math.fsum(self.weight(term) * (_K1 + 1) for term in wanted)

    def _file(self, original: Original) -> None:
        at = len(self.originals)
        self.originals.append(original)
        # Far down a long result nothing says of what it is one.
        label = terms(original.call)
        worth = math.pow(max(1.0, len(original.text) / PASSAGE_CHARS), -_BREVITY)
        worth *= _USER if original.role == "user" else 1.0
        for start, end in _passages(original.text):
            number, own_terms = len(self.passages), terms(original.text[start:end])
            self.passages.append(Passage(at, start, end))
            self._middles.append(self._end + (end - start) / 2)
            self._worth.append(worth)
            self._end += end - start + 1
            self._chars += end - start + 1
            for term in (*own_terms, *label):
                places = self._places[term]
                since = self._middles[number] - self._middles[places[-1]] if places else math.inf
                self._near_chars[term] += min(since, 2 * _REACH_CHARS)
                places.append(number)

    def _around(self, passage: int) -> Iterator[tuple[int, float]]:
        """The passages for which the words of one count, and how much."""
        middle = self._middles[passage]
        first = bisect_right(self._middles, middle - _REACH_CHARS)
        end = bisect_left(self._middles, middle + _REACH_CHARS)
        for place in range(max(first, passage - _MOST_BESIDE), min(end, passage + _MOST_BESIDE + 1)):
            yield place, 1 - abs(self._middles[place] - middle) / _REACH_CHARS


def _passages(text: str) -> Iterator[tuple[int, int]]:
    """A text divided where a line, a sentence or at least a word ends."""
    start = 0
    while len(text) - start > PASSAGE_CHARS:
        least, end = start + PASSAGE_CHARS // 2, start + PASSAGE_CHARS
        cut = next((at + len(sign) for sign in _BREAKS if (at := text.rfind(sign, least, end - 1)) != -1), end)
        yield start, cut
        start = cut
    if start < len(text):
        yield start, len(text)


# A word counts by both of its beginnings, so a long one counts more; that finds as much as Porter's English stems.
_STEMS_CHARS = (4, 6)
_LEAST_ID_CHARS, _MOST_PLAIN_DIGITS = 5, 4
# A longer run is data.
_MOST_RUN_CHARS, _MOST_PARTS = 200, 12
_REMEMBERED = 16_384
# Digits in groups; else letters and digits with what holds an identifier, a path or an address together.
_RUN = regex.compile(
    r"\d{1,3}(?:[,'’\u202f]\d{3}){1,6}(?![\w,])"
    rf"|[\w\p{{M}}](?:[\w\p{{M}}@./\\:#+'’-]{{0,{_MOST_RUN_CHARS}}}[\w\p{{M}}])?"
)
_GROUPING = str.maketrans("", "", ",'’\u202f")
_PART = regex.compile(r"[\w\p{M}--_]+", regex.V1)
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_LINE, _SLASH = re.compile(r":\d+(?::\d+)?\Z"), re.compile(r"[/\\]")
_EXTENSION = re.compile(r"[^\W\d_]\.[^\W\d_]\w")
# Thai, Lao, Burmese, Khmer, kana, Han; and Hangul, whose words carry their particles.
_UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]+)"
)
_ACCENT = re.compile("[\u0300-\u036f]")


class Sought(NamedTuple):
    """A run of a query as it was written, the terms that stand for it, and if it names one thing alone."""

    written: str
    terms: tuple[str, ...]
    is_id: bool


def terms(text: str) -> list[str]:
    """Returns the terms of a text in its order, each as often as it stands there."""
    return [term for run in _RUN.findall(text) for term in _sought(run).terms]


def sought(query: str) -> list[Sought]:
    """Returns the runs of a query in their order, each once."""
    return [_sought(run) for run in dict.fromkeys(_RUN.findall(query))]


@lru_cache(maxsize=_REMEMBERED)
def _sought(run: str) -> Sought:
    """A run with its terms: its parts, and the whole of an identifier, a path or an id."""
    folded, is_id = _folded(run), _is_id(run)
    if folded.isdigit():
        return Sought(run, (folded,), is_id)
    humps = [hump for part in _PART.findall(run)[:_MOST_PARTS] for hump in _HUMP.split(part, _MOST_PARTS)]
    words = [term for hump in humps for term in _words(_folded(hump))]
    return Sought(run, tuple(dict.fromkeys((*_spellings(folded), *words)) if is_id else words), is_id)


def _spellings(folded: str) -> Iterator[str]:
    """An id as it is written; a path also without its line, and its last part alone."""
    yield folded
    place = _LINE.sub("", folded)
    yield place
    name = _SLASH.split(place)[-1]
    if len(name) >= _LEAST_ID_CHARS:
        yield name


def _words(folded: str) -> list[str]:
    """A part of a run as terms: words by two beginnings, scripts without spaces by pairs of characters."""
    words: list[str] = []
    for at, piece in enumerate([folded] if folded.isascii() else _UNSPACED.split(folded)):
        if at % 2 and len(piece) > 1:
            words += (piece[start : start + 2] for start in range(len(piece) - 1))
        elif piece:
            words += dict.fromkeys(piece[:chars] for chars in _STEMS_CHARS) if piece.isalpha() else [piece]
    return words


def _folded(run: str) -> str:
    """A run without case, accents and width; digits in groups as one number."""
    if not run.isascii():
        run = unicodedata.normalize("NFC", _ACCENT.sub("", unicodedata.normalize("NFKD", run)))
    folded = run.casefold()
    digits = folded.translate(_GROUPING)
    return digits if digits.isdigit() else folded


def _is_id(run: str) -> bool:
    """It names one thing: a number of five digits or more, letters with digits, a path, an address, an identifier."""
    if len(run) < _LEAST_ID_CHARS or _UNSPACED.search(run) is not None:
        return False
    has_digit, has_letter = any(map(str.isdigit, run)), any(map(str.isalpha, run))
    if not has_letter:
        return sum(map(str.isdigit, run)) > _MOST_PLAIN_DIGITS
    return (
        has_digit
        or any(map(run.__contains__, "_@\\"))
        or run.count("/") > 1
        or _HUMP.search(run) is not None
        or _EXTENSION.search(run) is not None
    )
