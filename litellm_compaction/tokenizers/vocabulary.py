"""Counts the tokens of a prompt by a vocabulary, in any thread: special tokens first, then pieces of ordinary text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import tiktoken
from tokenizers import Tokenizer

# The tokens of a piece of ordinary text without surrogates: tiktoken, `tokenizers`, or none, which know no special
# tokens, and hold the interpreter lock for one piece only.
Encoder: TypeAlias = Callable[[str], int]

# Long runs make tiktoken slow, then panic (1,000,000 spaces), and one call must not hold the interpreter lock long.
_PIECE_CHARS = 4096
# Every vocabulary here begins a new word at these places, so that pieces cost exactly what the whole text costs.
_BOUNDARY = re.compile(r"(?<=\S)(?= [A-Za-z])|(?<=\n)(?=[A-Za-z0-9])|(?<=[一-龥])(?=[，。！？；：、])")
# From the end, since all of them would take 40 ms per MB.
_LOOK_BACK_CHARS = 512
_MAX_WORDS = 16_384
# llama.cpp's type of a special token.
CONTROL = 3


def by_tokenizers(tokenizer: Tokenizer) -> Encoder:
    """A batch of one: `encode` holds the interpreter lock, and a larger batch takes every core from the event loop."""
    return lambda piece: len(tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0])


def by_words(tokenizer: Tokenizer, pattern: str) -> Encoder:
    """Remembers words, if no token reaches over the space between two; the model alone takes a third of the time."""
    find, tokenize = re.compile(pattern).findall, tokenizer.model.tokenize
    length = lru_cache(maxsize=_MAX_WORDS)(lambda word: len(tokenize(word)))
    return lambda piece: sum(map(length, find(piece.replace(" ", "▁"))))


def is_foreign_failure(error: BaseException) -> bool:
    """Returns True for an Exception, or a panic of tiktoken or `tokenizers`, whose class cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Vocabulary:
    """One vocabulary: with the texts of the tokens that begin a prompt and end an answer, "" if there is none.

    `encoding` is as tiktoken has it, None if it cannot; the engine puts `bos` before every prompt.
    """

    def __init__(
        self,
        encoder: Encoder,
        special: Mapping[str, int] | None = None,
        *,
        encoding: tiktoken.Encoding | None = None,
        bos: str = "",
        eos: str = "",
        prefixes_space: bool = False,
    ) -> None:
        """Makes a vocabulary of an encoder of ordinary text, and of llama.cpp's type of each special token by its text.

        With `prefixes_space` ordinary text at the beginning, and after each special token, gets a space before it.
        """
        self._encoder, self.encoding = encoder, encoding
        self.bos, self.eos = bos, eos
        self._prefixes_space = prefixes_space
        special = special or {}
        controls = [token for token, kind in special.items() if kind == CONTROL]
        self._specials, self._controls = _any_of(special, "({})"), _any_of(controls, "{}")
        # An operator's file may have one that begins like a word, or is a single character.
        self._to_defuse = _any_of([token for token in controls if len(token) > 1], r"(?={})([^\s\w]|_)")

    def split(self, prompt: str) -> list[str]:
        """Cuts a text at special tokens, as llama.cpp's tokenizer_st_partition finds them: each second part is one."""
        return [prompt] if self._specials is None else self._specials.split(prompt)

    def has_control(self, text: str) -> bool:
        """Returns True if `text` names a control token: in a prompt sent as it is, that would be the token itself."""
        return self._controls is not None and self._controls.search(text) is not None

    def defused(self, text: str) -> str:
        """`text` with its control tokens broken by a space, those that overlap too; not one that begins like a word."""
        return text if self._to_defuse is None else self._to_defuse.sub(r"\1 ", text)

    def lengths_in_prompt(self, texts: Sequence[str]) -> list[int]:
        """Tokens of texts that each stand at the beginning of a prompt or after a special token of it."""
        return self.lengths([f" {text}" if text else "" for text in texts] if self._prefixes_space else texts)

    def lengths(self, texts: Iterable[str]) -> list[int]:
        """Tokens of each text, special tokens' names as text; long runs have one in 4,096 characters too many."""
        return [sum(map(self._length, _pieces(_clean(text)))) for text in texts]

    def _length(self, piece: str) -> int:
        try:
            return self._encoder(piece)
        except BaseException as error:
            if not is_foreign_failure(error):
                raise
            # No token is shorter than one byte.
            return len(piece.encode())


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = start + _PIECE_CHARS
        if found := list(_BOUNDARY.finditer(text, end - _LOOK_BACK_CHARS, end)):
            end = found[-1].end()
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _clean(text: str) -> str:
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _any_of(words: Iterable[str], pattern: str) -> re.Pattern[str] | None:
    """A regular expression with one for any of some words, the longest that fits, in its place; None for no words."""
    joined = _alternatives(filter(None, words))
    return re.compile(pattern.format(joined)) if joined else None


def _alternatives(words: Iterable[str]) -> str:
    """As a tree, so that a match is quick: some vocabularies have thousands."""
    tree: dict[str, list[str]] = {}
    for word in words:
        tree.setdefault(word[:1], []).append(word[1:])
    ends = tree.pop("", None) is not None
    branches = [re.escape(first) + _alternatives(rest) for first, rest in sorted(tree.items())]
    if len(branches) < 2 and not ends:
        return "".join(branches)
    return f"(?:{'|'.join(branches)}){'?' if ends else ''}" if branches else ""
