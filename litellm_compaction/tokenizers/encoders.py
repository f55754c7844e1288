"""The programs behind a vocabulary: tiktoken if its algorithm is the vocabulary's own, else `tokenizers`.

Each is made once per vocabulary from neutral data (`VocabularyData`), wherever that was read from. Both count pieces
of text without holding the interpreter lock for long; neither knows special tokens.

llama.cpp's regular expressions tell where a byte-level BPE vocabulary may not merge (`llm_tokenizer_bpe` in
src/llama-vocab.cpp, as vendored in llama-cpp-python 0.3.36; for tekken and gpt-4o these differ from the published ones
on combining marks).

For vocabularies of the `tokenizers` package in which words can be told apart, short text is counted word by word: the
model alone is asked, without the steps around it, which take two thirds of the time for short text, and words that
come again are remembered (2026-11, for two texts of 1,600 characters: 0.15 against 0.45 ms for Mistral v3, 0.22
against 1.24 ms for Gemma 4; 0.23 and 0.43 ms if no word is known).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import tiktoken
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_AFTER_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_AFTER_WORDS}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_AFTER_WORDS}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp takes letters beyond ASCII as both upper and lower case, and marks as no letters.
_NOT_LOWER, _NOT_UPPER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LAST_DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
# The three expressions of deepseek-v3 in one, for tiktoken: what the first two take, the third must not see, and white
# space before it ends there. The last alternative is what none of them takes. 5,400 texts gave the same tokens.
_KANA_HAN = "一-龥\u3040-ゟ゠-ヿ"
_JOINED_DEEPSEEK = (
    rf"\p{{N}}{{1,3}}|[{_KANA_HAN}]+|[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{_KANA_HAN}]?[[\p{{L}}\p{{M}}]--[{_KANA_HAN}]]+"
    rf"| ?[[\p{{P}}\p{{S}}]--[{_KANA_HAN}]]+[\r\n]*|\s*[\r\n]+|\s+(?=[\p{{N}}{_KANA_HAN}])|\s+(?!\S)|\s+"
    rf"|(?:[^\s\p{{L}}\p{{M}}\p{{N}}\p{{P}}\p{{S}}{_KANA_HAN}](?![[\p{{L}}\p{{M}}]--[{_KANA_HAN}]]))+"
)
_SAME_AS = {
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4 "
    "glm5",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2",
    "gpt-4o": "llama4 kanana2 minimax-m2",
    "gpt-2": "phi-2 mpt olmo jais trillion granite-docling gigachat mellum a.x-4.0 exaone4 modern-bert",
    "deepseek-v3": "hunyuan-dense joyai-llm",
    "starcoder": "refact command-r smollm codeshell exaone minerva-7b mellum2",
}
# How a vocabulary that comes from SentencePiece writes a space.
SPACE = "▁"
# Words with the spaces before them; those of Gemma 4, which begins anew at line ends, in lines.
WORDS = f"{SPACE}*[^{SPACE}]+|{SPACE}+"
LINE_WORDS = f"{SPACE}*[^{SPACE}\\n]+|{SPACE}+|\\n+"
# Gemma 4 has one: `>▁</`.
_MAX_ACROSS = 16
# Of one call, which holds the interpreter lock all the time: 2 to 4 ms.
_MAX_CHARS = 32_768
# Longer words are data, which does not come again.
_MAX_WORD_CHARS = 64
# About 150 bytes each, per vocabulary.
_MAX_WORDS = 16_384
_NORMAL, _BYTE = 1, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyData:
    """One vocabulary, in llama.cpp's terms.

    Attributes:
        kind: byte pair encoding, or SentencePiece with scores.
        pre: llama.cpp's pre-tokenizer name (`tokenizer.ggml.pre`); "" for spm.
        tokens: by id.
        scores: scores[i] belongs to tokens[i]; spm only, else ().
        token_types: llama.cpp's: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte; () if unknown.
        merges: "left right", best first; bpe only, () when ranks follow from the token order.
        bos_id: None if there is none.
        eos_id: None if there is none.
        adds_bos: the engine puts it before a prompt that does not begin with it.
        strips_after_special: white space after a special token disappears; None if it was not said.
        adds_space_prefix: a text gets a space in front, spm only; None if it was not said.
    """

    kind: Literal["bpe", "spm"]
    pre: str
    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    adds_space_prefix: bool | None = None
    strips_after_special: bool | None = None


_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}*{_NOT_UPPER}+@|[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}+{_NOT_UPPER}*@|#"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED.replace("@", "").replace("#", r"\p{N}")
_GPT4O = _CASED.replace("@", rf"{_CONTRACTION}?").replace("#", r"\p{N}{1,3}")

# Applied one after the other, each to what the one before has left in pieces.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
    "gpt-2": (_GPT2,),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _LAST_DEEPSEEK),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "starcoder": (r"\p{N}", _GPT2),
    "gemma4": (r"[^\n]+|[\n]+",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_NAMES = {name: name for name in _PATTERNS} | {
    alias: name for name, aliases in _SAME_AS.items() for alias in aliases.split()
}
# Single expressions that leave no character out, which tiktoken would drop.
_TIKTOKEN = {name: _PATTERNS[name][0] for name in ("llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o")} | {
    "deepseek-v3": _JOINED_DEEPSEEK
}


def patterns(pre: str) -> tuple[str, ...]:
    """The regular expressions of a pre-tokenizer, in the order in which they are applied."""
    return _PATTERNS[_NAMES.get(pre, "default")]


def tiktoken_pattern(pre: str) -> str | None:
    """The one expression with which tiktoken does the same, or None if it cannot."""
    return _TIKTOKEN.get(_NAMES.get(pre, ""))


def has_whole_words(pre: str) -> bool:
    """Returns True if a piece that is a whole token is taken without looking at merges (llama.cpp: `ignore_merges`)."""
    return _NAMES.get(pre) in {"llama-bpe", "tekken", "gpt-4o"}


class Words:
    """Tokens of words, the most recently used ones remembered; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, pattern: str, across: Sequence[str]) -> None:
        """Takes the pattern that divides text, and the tokens that reach over the space between two of them."""
        self._words = re.compile(pattern)
        self._across = across
        self._tokenize = tokenizer.model.tokenize
        self._length = lru_cache(maxsize=_MAX_WORDS)(self._new_length)

    def lengths(self, texts: Sequence[str]) -> list[int] | None:
        """None if there is too much text, or a token may reach over a space."""
        if sum(map(len, texts)) > _MAX_CHARS:
            return None
        texts = [text.replace(" ", SPACE) for text in texts]
        if any(token in text for token in self._across for text in texts):
            return None
        return list(map(self._count, texts))

    def _count(self, text: str) -> int:
        words = self._words.findall(text)
        is_usual = max(map(len, words), default=0) <= _MAX_WORD_CHARS
        return sum(map(self._length if is_usual else self._new_length, words))

    def _new_length(self, word: str) -> int:
        return len(self._tokenize(word))


def words_of(tokenizer: Tokenizer, tokens: Iterable[str], *, pattern: str) -> Words | None:
    """A counter of words, unless too many tokens reach over a space.

    Args:
        tokenizer: writes spaces as `▁`, and does nothing else to text before it is divided.
        tokens: all that ordinary text may become.
        pattern: divides text into words; it must cut wherever the tokenizer does.
    """
    across = [token for token in tokens if SPACE in token.lstrip(SPACE)]
    return Words(tokenizer, pattern, across) if len(across) <= _MAX_ACROSS else None


class Encoder(Protocol):
    """Counts tokens of ordinary text."""

    def lengths(self, pieces: Sequence[str]) -> list[int]:
        """Tokens of each piece; no piece holds surrogates."""


def encoder_for(data: VocabularyData) -> Encoder:
    """The fastest program that is exact for a vocabulary: 0.1–1 s."""
    if data.kind == "spm":
        return _sentencepiece(data)
    if data.pre == "gemma4":
        return _spaced_bpe(data)
    pattern = tiktoken_pattern(data.pre)
    if pattern is not None and _ranks_follow_ids(data):
        ranks = _byte_ranks(data)
        if len(ranks) >= 256 and all(bytes([byte]) in ranks for byte in range(256)):
            return TiktokenEncoder(
                tiktoken.Encoding(data.pre, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
            )
    return _byte_bpe(data)


class TiktokenEncoder:
    """A tiktoken vocabulary."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding

    def lengths(self, pieces: Sequence[str]) -> list[int]:
        return [self._length(piece) for piece in pieces]

    def _length(self, piece: str) -> int:
        try:
            return len(self.encoding.encode_ordinary(piece))
        except BaseException as error:
            # tiktoken's Rust side panics with a BaseException that cannot be imported by name.
            if type(error).__name__ != "PanicException":
                raise
            # No token is shorter than one byte.
            return len(piece.encode("utf-8", "replace"))


class CharactersEncoder:
    """No vocabulary at all: four characters, begun or full, are a token."""

    def lengths(self, pieces: Sequence[str]) -> list[int]:
        return [-(-len(piece) // 4) for piece in pieces]


class TokenizersEncoder:
    """A vocabulary of the `tokenizers` package; its `encode` would hold the interpreter lock, its batches do not.

    Attributes:
        words: counts short text if words can be told apart.
    """

    def __init__(self, tokenizer: Tokenizer, words: Words | None = None) -> None:
        self._tokenizer = tokenizer
        self.words = words

    def lengths(self, pieces: Sequence[str]) -> list[int]:
        found = self.words.lengths(pieces) if self.words is not None else None
        if found is not None:
            return found
        # One at a time: a batch is divided among threads of its own, which compete with the event loop for every core,
        # and takes longer than this on two cores (2026-11: 0.7 against 1.5 ms for 4 kB, 300 against 500 ms for 1 MB).
        return list(map(self._length, pieces))

    def _length(self, piece: str) -> int:
        try:
            return len(self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0])
        except BaseException as exc:
            if not is_foreign_failure(exc):
                raise
            # An operator's file has no rule for it; no token is shorter than one byte.
            return len(piece.encode())


def is_foreign_failure(exc: BaseException) -> bool:
    """Returns True if a vocabulary that cannot be built raised this, and nothing that is to end the program.

    `tokenizers` raises bare Exception; the Rust side of both packages panics with a BaseException without an import.
    """
    return isinstance(exc, Exception) or type(exc).__name__ == "PanicException"


def _ranks_follow_ids(data: VocabularyData) -> bool:
    """Returns True if merges come in the order of the tokens that they make, as they do if tiktoken made them."""
    if not data.merges:
        return True
    ids = {token: index for index, token in enumerate(data.tokens)}
    last = -1
    for merge in data.merges:
        left, _, right = merge.partition(" ")
        made = ids.get(left + right, -1)
        if made < last:
            return False
        last = made
    return True


def _byte_ranks(data: VocabularyData) -> dict[bytes, int]:
    tokens = [
        token for index, token in enumerate(data.tokens) if not data.token_types or data.token_types[index] == _NORMAL
    ]
    # All at once: each character stands for one byte, so lengths say where a token ends.
    joined = "".join(tokens).translate(_BYTE_OF_CHAR)
    try:
        everything = joined.encode("latin-1")
    except UnicodeEncodeError:
        # Added tokens of unknown type are text as it is.
        tokens = [token for token in tokens if _ALPHABET.issuperset(token)]
        everything = "".join(tokens).translate(_BYTE_OF_CHAR).encode("latin-1")
    ranks: dict[bytes, int] = {}
    start = 0
    for rank, token in enumerate(tokens):
        end = start + len(token)
        ranks.setdefault(everything[start:end], rank)
        start = end
    ranks.pop(b"", None)
    return ranks


def _byte_bpe(data: VocabularyData) -> TokenizersEncoder:
    vocabulary = _ids(data)
    merges = _known_merges(data, vocabulary) if data.merges else _merges_by_rank(vocabulary, list(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=has_whole_words(data.pre)))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns(data.pre)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return TokenizersEncoder(tokenizer)


def _spaced_bpe(data: VocabularyData) -> TokenizersEncoder:
    """BPE over text whose spaces are written as in SentencePiece (Gemma 4)."""
    vocabulary = _ids(data)
    tokenizer = Tokenizer(models.BPE(vocabulary, _known_merges(data, vocabulary), byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns(data.pre)]
    )
    return TokenizersEncoder(tokenizer, words_of(tokenizer, vocabulary, pattern=LINE_WORDS))


def _sentencepiece(data: VocabularyData) -> TokenizersEncoder:
    """The neighbors whose union has the best score are merged first, as in llama.cpp's `llm_tokenizer_spm`."""
    vocabulary = _ids(data)
    normal = [
        token
        for index, token in enumerate(data.tokens)
        if len(token) > 1 and (not data.token_types or data.token_types[index] == _NORMAL)
    ]
    if data.scores:
        normal.sort(key=lambda token: -data.scores[vocabulary[token]])
    tokenizer = Tokenizer(
        models.BPE(vocabulary, _merges_by_rank(vocabulary, normal), byte_fallback=True, fuse_unk=False)
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    if not any(SPACE in token.lstrip(SPACE) for token in normal):
        # No token reaches over a space, so words can be told apart first, and are remembered by `tokenizers`.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    return TokenizersEncoder(tokenizer, words_of(tokenizer, normal, pattern=WORDS))


def _ids(data: VocabularyData) -> dict[str, int]:
    kinds = data.token_types
    found: dict[str, int] = {}
    for index, token in enumerate(data.tokens):
        if not kinds or kinds[index] in (_NORMAL, _BYTE):
            found.setdefault(token, index)
    return found


def _known_merges(data: VocabularyData, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges, without those of tokens that are missing: `tokenizers` refuses them."""
    found: list[tuple[str, str]] = []
    for merge in data.merges:
        # A part may hold spaces itself, never begin with one; llama.cpp looks for the separator from the second byte.
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            found.append((left, right))
    return found


def _merges_by_rank(vocabulary: dict[str, int], ranked: Sequence[str]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for token in ranked:
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += pairs
    return merges


def _byte_alphabet() -> dict[int, int]:
    """The byte of each character in GPT-2's alphabet (openai/gpt-2, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + offset: byte for offset, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
_ALPHABET = frozenset(map(chr, _BYTE_OF_CHAR))
