"""The vocabularies that come with the package: which file holds which, and how it is read.

Asked by `tokenizers.py`. The files are built by tools/build_packs.py; NOTICE names sources and licences.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import replace
from pathlib import Path

from litellm_compaction.errors import CompactionError
from litellm_compaction.models.vocabulary_data import VocabularyData

_FOLDER = Path(__file__).parent / "packs"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
# DeepSeek renamed some of the special tokens in the models that it distilled R1 into (their tokenizer_config.json).
_DISTILLS: dict[str, tuple[str, dict[int, str]]] = {
    "r1-distill-llama": (
        "llama3",
        {
            128000: "<｜begin▁of▁sentence｜>",
            128001: "<｜end▁of▁sentence｜>",
            128011: "<｜User｜>",
            128012: "<｜Assistant｜>",
            128013: "<think>",
            128014: "</think>",
            128015: "<｜▁pad▁｜>",
        },
    ),
    "r1-distill-qwen": (
        "qwen2",
        {
            151643: "<｜end▁of▁sentence｜>",
            151644: "<｜User｜>",
            151645: "<｜Assistant｜>",
            151646: "<｜begin▁of▁sentence｜>",
            151647: "<|EOT|>",
            151648: "<think>",
            151649: "</think>",
        },
    ),
}


def has_pack(name: str) -> bool:
    """Whether the package holds this vocabulary."""
    return name in _DISTILLS or (_FOLDER / f"{name}.json.xz").is_file()


def read_pack(name: str) -> VocabularyData:
    """One vocabulary: 0.1–0.5 s.

    Raises:
        CompactionError: the file is damaged.
    """
    if name in _DISTILLS:
        return _distilled(name)
    packed = (_FOLDER / f"{name}.json.xz").read_bytes()
    digest = hashlib.sha256(packed).hexdigest()
    if f"{digest}  {name}.json.xz" not in (_FOLDER / "SHA256SUMS").read_text().splitlines():
        raise CompactionError(
            f"The vocabulary pack {name} is damaged (SHA-256 {digest}): reinstall litellm-compaction."
        )
    data = json.loads(lzma.decompress(packed))
    tokens: list[str] = data["tokens"]
    kinds = [_NORMAL] * len(tokens)
    for index, kind in data["token_types"].items():
        kinds[int(index)] = kind
    return VocabularyData(
        kind=data["kind"],
        pre=data["pre"],
        tokens=tuple(tokens),
        scores=tuple(data["scores"]),
        token_types=tuple(kinds),
        merges=tuple(f"{tokens[left]} {tokens[right]}" for left, right in data["merges"]),
        bos_id=data["bos_id"],
        eos_id=data["eos_id"],
        adds_bos=data["adds_bos"],
        chat_template="",
        fingerprint=f"pack:{name}:{digest[:16]}",
        # llama.cpp strips behind Phi-3's special tokens only where a file's name says "Phi-3", which converters write
        # as "Phi 3"; without the file the higher count stands.
        strips_after_special=False,
    )


def _distilled(name: str) -> VocabularyData:
    base, renamed = _DISTILLS[name]
    data = read_pack(base)
    tokens, kinds = list(data.tokens), list(data.token_types)
    for index, token in renamed.items():
        tokens[index] = token
        kinds[index] = _CONTROL if "of▁sentence" in token else _USER_DEFINED
    return replace(
        data,
        tokens=tuple(tokens),
        token_types=tuple(kinds),
        bos_id=tokens.index("<｜begin▁of▁sentence｜>"),
        eos_id=tokens.index("<｜end▁of▁sentence｜>"),
        adds_bos=True,
        fingerprint=f"{data.fingerprint}:{name}",
    )
