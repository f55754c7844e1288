"""Counts the tokens of a prompt by a vocabulary: special tokens first, then pieces of ordinary text.

Made by `registry.py`, asked by `prompt.py` and `formula.py`, also from worker threads. Never raises on a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import tiktoken

from litellm_compaction.tokenizers.encoders import Encoder, TiktokenEncoder, VocabularyData, encoder_for

# Long runs make tiktoken slow, then panic (1,000,000 spaces, tiktoken 0.14), and one call must not hold the GIL long.
_PIECE_CHARS = 4096
# Every vocabulary here begins a new word at these places, so that pieces cost exactly what the whole text costs.
_BOUNDARY = re.compile(r"(?<=\S)(?= [A-Za-z])|(?<=\n)(?=[A-Za-z0-9])|(?<=[一-龥])(?=[，。！？；：、])")
# So does a byte-level one between letters, digits and signs: not at an apostrophe, which may begin a contraction.
_WORD_BOUNDARY = re.compile(
    rf"{_BOUNDARY.pattern}|(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z0-9])(?=[!-&(-/:-@[-`{{-~])"
)
_LOOK_BACK_CHARS = 32
_SLICE_CHARS = 131_072
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# Tokens that llama.cpp takes for the end of an answer wherever a vocabulary has them, of whatever type
# (llama_vocab::impl::load); Gemma 4's </s> is text all the same.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[", "<｜end▁of▁sentence｜>"),
    )
)


class Segment(NamedTuple):
    start: int
    end: int
    is_special: bool


class Vocabulary:
    """One vocabulary.

    Attributes:
        bos: text of the token that begins a prompt; "" if there is none.
        eos: text of the token that ends an answer; "" if there is none.
        adds_bos: the engine puts `bos` before a prompt that does not begin with it.
        prefixes_space: ordinary text at the beginning, and after each special token, gets a space before it.
        strips_after_special: white space after a special token disappears.
    """

    def __init__(self, data: VocabularyData, encoder: Encoder | None = None) -> None:
        self._encoder = encoder if encoder is not None else encoder_for(data)
        # SentencePiece's tokens and Gemma 4's may reach over signs.
        self._boundary = _BOUNDARY if data.kind == "spm" or data.pre == "gemma4" else _WORD_BOUNDARY
        self.bos = data.tokens[data.bos_id] if data.bos_id is not None and data.bos_id < len(data.tokens) else ""
        self.eos = data.tokens[data.eos_id] if data.eos_id is not None and data.eos_id < len(data.tokens) else ""
        self.adds_bos = data.adds_bos and bool(self.bos)
        specials = _special_tokens(data)
        self._specials = re.compile(_alternatives(specials)) if specials else None
        self._longest_special = max(map(len, specials), default=0)
        controls = _special_tokens(data, (_CONTROL,))
        self._controls = re.compile(_alternatives(controls)) if controls else None
        prefixes = data.adds_space_prefix
        if prefixes is None:
            # Gemma's SentencePiece vocabularies say add_space_prefix = false; Llama's and Mistral's leave the default.
            prefixes = "<start_of_turn>" not in specials
        self.prefixes_space = data.kind == "spm" and prefixes
        strips = data.strips_after_special
        if strips is None:
            # llama.cpp gives Phi-3's special tokens the attribute RSTRIP (llama-vocab.cpp, 2026-11).
            strips = {"<|assistant|>", "<|end|>"} <= specials
        self.strips_after_special = data.kind == "spm" and strips

    @property
    def encoding(self) -> tiktoken.Encoding | None:
        """The vocabulary as tiktoken has it; None for one that tiktoken cannot have. Special tokens are left out."""
        return self._encoder.encoding if isinstance(self._encoder, TiktokenEncoder) else None

    def split(self, prompt: str) -> list[Segment]:
        """Cuts a text at special tokens; the segments in order, as llama.cpp's tokenizer_st_partition finds them."""
        segments: list[Segment] = []
        position = 0
        for start, end in self._places(prompt):
            if start > position:
                segments.append(Segment(position, start, False))
            segments.append(Segment(start, end, True))
            position = end
        if position < len(prompt):
            segments.append(Segment(position, len(prompt), False))
        return segments

    def has_control(self, text: str) -> bool:
        """Returns True if `text` names a control token: in a prompt sent as it is, that would be the token itself."""
        return self._controls is not None and self._controls.search(text) is not None

    def defused(self, text: str) -> str:
        """`text` with its control tokens broken by a space, those that overlap too.

        One that begins like a word, or is a single character, stays: no template has such a one, a hostile file may.
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

    def _places(self, prompt: str) -> Iterator[tuple[int, int]]:
        if self._specials is None:
            return
        position = 0
        while position < len(prompt):
            # A search through megabytes would hold the interpreter lock, and with it the event loop.
            last = position + _SLICE_CHARS
            for found in self._specials.finditer(prompt, position, last + self._longest_special):
                if found.start() >= last:
                    break
                yield found.span()
                position = found.end()
            position = max(position, last)

    def lengths_in_prompt(self, texts: Sequence[str]) -> list[int]:
        """Tokens of texts that each stand at the beginning of a prompt or after a special token of it."""
        if self.strips_after_special:
            texts = [text.lstrip(" \t\n\v\f\r") for text in texts]
        if self.prefixes_space:
            texts = [f" {text}" if text else "" for text in texts]
        return self.lengths(texts)

    def length(self, text: str) -> int:
        """Tokens of `text`: names of special tokens count as ordinary text."""
        return self.lengths((text,))[0]

    def lengths(self, texts: Iterable[str]) -> list[int]:
        """Tokens of each text by itself.

        Names of special tokens count as ordinary text, lone surrogates as replacement characters. Exact for text with
        words and lines; runs of more than 4096 characters without a boundary cost about one token too many per 4096.
        """
        pieces: list[str] = []
        counts: list[int] = []
        for text in texts:
            before = len(pieces)
            pieces += _pieces(_clean(text), self._boundary)
            counts.append(len(pieces) - before)
        lengths = iter(self._encoder.lengths(pieces))
        return [sum(next(lengths) for _ in range(count)) for count in counts]


def _pieces(text: str, boundary: re.Pattern[str]) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE_CHARS:
        # Looked for in the last quarter only, which nearly always has one.
        end = _last_boundary(text, start + _PIECE_CHARS * 3 // 4, start + _PIECE_CHARS, boundary)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _last_boundary(text: str, first: int, last: int, boundary: re.Pattern[str] = _BOUNDARY) -> int:
    """The last boundary between two characters, or `last`; from the end: all of them take 40 ms per MB."""
    size = _LOOK_BACK_CHARS
    upper = last
    while upper > first:
        lower = max(first, upper - size)
        # Up to `last` each time: a boundary shows in the character after it.
        end = -1
        for found in boundary.finditer(text, lower, last):
            if found.end() > upper:
                break
            end = found.end()
        if end >= 0:
            return end
        upper, size = lower, 4 * size
    return last


def _clean(text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _special_tokens(
    data: VocabularyData, kinds: tuple[int, ...] = (_UNKNOWN, _CONTROL, _USER_DEFINED)
) -> frozenset[str]:
    typed = frozenset(
        token for token, kind in zip(data.tokens, data.token_types, strict=False) if kind in kinds and token
    )
    ends = _ENDS.intersection(data.tokens)
    return typed | (ends - {"</s>"} if "<|tool_response>" in ends else ends)


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
