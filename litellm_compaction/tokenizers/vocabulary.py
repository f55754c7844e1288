"""Counts the tokens of a prompt by a vocabulary: special tokens first, then pieces of ordinary text.

Made by `registry.py`, asked by whoever counts, also from worker threads. Never raises on a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import tiktoken

from litellm_compaction.tokenizers.encoders import Encoder, is_foreign_failure

# Long runs make tiktoken slow, then panic (1,000,000 spaces), and one call must not hold the interpreter lock long.
_PIECE_CHARS = 4096
# Every vocabulary here begins a new word at these places, so that pieces cost exactly what the whole text costs.
_BOUNDARY = re.compile(r"(?<=\S)(?= [A-Za-z])|(?<=\n)(?=[A-Za-z0-9])|(?<=[一-龥])(?=[，。！？；：、])")
# So does a byte-level one between letters, digits and signs: not at an apostrophe, which may begin a contraction.
_WORD_BOUNDARY = re.compile(
    rf"{_BOUNDARY.pattern}|(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z0-9])(?=[!-&(-/:-@[-`{{-~])"
)
# From the end, since all of them would take 40 ms per MB; the last quarter nearly always has one.
_LOOK_BACK_CHARS = (64, 1024)
_SLICE_CHARS = 131_072
CONTROL = 3


class Segment(NamedTuple):
    text: str
    is_special: bool


class Vocabulary:
    """One vocabulary.

    Attributes:
        encoding: as tiktoken has it, without special tokens; None for one that tiktoken cannot have.
        bos: text of the token that begins a prompt; "" if there is none.
        eos: text of the token that ends an answer; "" if there is none.
        adds_bos: the engine puts `bos` before a prompt that does not begin with it.
    """

    def __init__(
        self,
        encoder: Encoder,
        special: Mapping[str, int] | None = None,
        *,
        encoding: tiktoken.Encoding | None = None,
        bos: str = "",
        eos: str = "",
        adds_bos: bool = False,
        prefixes_space: bool = False,
    ) -> None:
        """Makes a vocabulary.

        Args:
            encoder: counts ordinary text.
            special: llama.cpp's type of each special token by its text: 2 unknown, 3 control, 4 user defined.
            encoding, bos, eos, adds_bos: see above.
            prefixes_space: ordinary text at the beginning, and after each special token, gets a space before it.
        """
        self._encoder = encoder
        self.encoding = encoding
        # Tokens of SentencePiece may reach over signs.
        self._boundary = _WORD_BOUNDARY if encoding is not None else _BOUNDARY
        self.bos, self.eos, self.adds_bos = bos, eos, adds_bos and bool(bos)
        self._prefixes_space = prefixes_space
        special = special or {}
        self._specials = _any_of(special)
        self._longest_special = max(map(len, special), default=0)
        self._controls = _any_of([token for token, kind in special.items() if kind == CONTROL])

    def split(self, prompt: str) -> list[Segment]:
        """Cuts a text at special tokens; the segments in order, as llama.cpp's tokenizer_st_partition finds them."""
        segments: list[Segment] = []
        begun = position = 0
        while self._specials is not None and position < len(prompt):
            # A search through megabytes would hold the interpreter lock, and with it the event loop.
            last = position + _SLICE_CHARS
            for found in self._specials.finditer(prompt, position, last + self._longest_special):
                if found.start() >= last:
                    break
                segments += (Segment(prompt[begun : found.start()], False), Segment(found[0], True))
                begun = position = found.end()
            position = max(position, last)
        return [each for each in (*segments, Segment(prompt[begun:], False)) if each.text]

    def has_control(self, text: str) -> bool:
        """Returns True if `text` names a control token: in a prompt sent as it is, that would be the token itself."""
        return self._controls is not None and self._controls.search(text) is not None

    def defused(self, text: str) -> str:
        """`text` with its control tokens broken by a space, those that overlap too.

        One that begins like a word, or is a single character, stays: an operator's file may have one.
        """
        if self._controls is None:
            return text
        pieces: list[str] = []
        kept = position = 0
        while (found := self._controls.search(text, position)) is not None:
            position = found.start() + 1
            if len(found[0]) > 1 and not (text[found.start()].isalnum() or text[found.start()].isspace()):
                pieces += (text[kept:position], " ")
                kept = position
        return "".join((*pieces, text[kept:]))

    def lengths_in_prompt(self, texts: Sequence[str]) -> list[int]:
        """Tokens of texts that each stand at the beginning of a prompt or after a special token of it."""
        return self.lengths([f" {text}" if text else "" for text in texts] if self._prefixes_space else texts)

    def length(self, text: str) -> int:
        """Tokens of `text`: names of special tokens count as ordinary text."""
        return self.lengths((text,))[0]

    def lengths(self, texts: Iterable[str]) -> list[int]:
        """Tokens of each text by itself.

        Names of special tokens count as ordinary text, lone surrogates as replacement characters. Exact for text with
        words and lines; runs of more than 4096 characters without a boundary cost about one token too many per 4096.
        """
        return [sum(map(self._length, self._pieces(_clean(text)))) for text in texts]

    def _length(self, piece: str) -> int:
        try:
            return self._encoder(piece)
        except BaseException as error:
            if not is_foreign_failure(error):
                raise
            # No token is shorter than one byte.
            return len(piece.encode())

    def _pieces(self, text: str) -> Iterator[str]:
        start = 0
        while len(text) - start > _PIECE_CHARS:
            end = start + _PIECE_CHARS
            for look_back in _LOOK_BACK_CHARS:
                if found := list(self._boundary.finditer(text, end - look_back, end)):
                    end = found[-1].end()
                    break
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]


def _clean(text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    joined = _alternatives(words)
    return re.compile(joined) if joined else None


def _alternatives(words: Iterable[str]) -> str:
    """A regular expression for any of some words, the longest one that fits; as a tree, so that a match is quick."""
    tree: dict[str, list[str]] = {}
    ends = False
    for word in words:
        if word:
            tree.setdefault(word[0], []).append(word[1:])
        else:
            ends = True
    branches = [re.escape(first) + _alternatives(rest) for first, rest in sorted(tree.items())]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if ends else joined
