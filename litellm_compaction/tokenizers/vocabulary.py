"""Counts the tokens of a prompt by a vocabulary: special tokens first, then pieces of ordinary text.

Made by `registry.py`, asked by whoever counts, also from worker threads. Never raises on a string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
# From the end, since all of them would take 40 ms per MB; the last quarter nearly always has one.
_LOOK_BACK_CHARS = (64, 1024)
# llama.cpp's type of a special token.
CONTROL = 3


def by_tiktoken(encoding: tiktoken.Encoding) -> Encoder:
    return lambda piece: len(encoding.encode_ordinary(piece))


def by_tokenizers(tokenizer: Tokenizer) -> Encoder:
    """A batch of one: `encode` holds the interpreter lock, and a larger batch takes every core from the event loop."""
    return lambda piece: len(tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0])


def by_characters(piece: str) -> int:
    """No vocabulary at all: four characters, begun or full, are a token."""
    return -(-len(piece) // 4)


def is_foreign_failure(error: BaseException) -> bool:
    """Returns True if a vocabulary that cannot be built or used raised this, and nothing that is to end the program.

    `tokenizers` raises bare Exception; the Rust side of both packages panics with a BaseException without an import.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


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
        self.bos, self.eos, self.adds_bos = bos, eos, adds_bos and bool(bos)
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

    def length(self, text: str) -> int:
        """Tokens of `text`: names of special tokens count as ordinary text."""
        return self.lengths((text,))[0]

    def lengths(self, texts: Iterable[str]) -> list[int]:
        """Tokens of each text by itself.

        Names of special tokens count as ordinary text, lone surrogates as replacement characters. Exact for text with
        words and lines; runs of more than 4096 characters without a boundary cost about one token too many per 4096.
        """
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
        for look_back in _LOOK_BACK_CHARS:
            if found := list(_BOUNDARY.finditer(text, end - look_back, end)):
                end = found[-1].end()
                break
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _clean(text: str) -> str:
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _any_of(words: Iterable[str], pattern: str) -> re.Pattern[str] | None:
    """A regular expression with one for any of some words, the longest that fits, in its place; None for no words."""
    joined = _alternatives(words)
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
