"""What a vocabulary consists of, wherever it was read from.

Made by `gguf.py` and other readers; taken by whatever counts tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyData:
    """One vocabulary, in llama.cpp's terms, with the chat template that came with it.

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
        chat_template: "" if there is none.
        fingerprint: stable identity, for caches.
        strips_after_special: white space after a special token disappears; None where it was not said.
        adds_space_prefix: a text gets a space in front, spm only; None where it was not said.
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
    chat_template: str
    fingerprint: str
    adds_space_prefix: bool | None = None
    strips_after_special: bool | None = None
