"""Vocabularies by name: offline, loaded once per process, for any string.

Names are those of the packs inside this package, of the two files that LiteLLM ships (`cl100k_base`, `o200k_base`, and
`gpt-oss` made of the latter), `heuristic` for four characters per token, and `file:PATH` for the tokenizer.json that an
operator has named. Safe to call from worker threads. The packs are built by tools/build_packs.py; NOTICE names sources
and licences.

A damaged pack refuses no request and never passes for an exact count: the family is then counted by a stand-in.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import lzma
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiktoken

from litellm_compaction.errors import CompactionError
from litellm_compaction.templates.template import is_compiled, template
from litellm_compaction.tokenizers.encoders import (
    CharactersEncoder,
    TiktokenEncoder,
    VocabularyData,
    is_foreign_failure,
    tiktoken_pattern,
)
from litellm_compaction.tokenizers.families import FORMULA_ERROR, Family, stand_in
from litellm_compaction.tokenizers.files import read_tokenizer_json
from litellm_compaction.tokenizers.vocabulary import Vocabulary

logger = logging.getLogger("litellm_compaction")
_NORMAL, _CONTROL = 1, 3
# Before the path of an operator's tokenizer.json.
FILE_PREFIX = "file:"
# tiktoken stores a file under the SHA-1 of its address.
_FILES = {
    "cl100k_base": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    "o200k_base": "fb374d419588a4632f3f557e76b4b70aebbca790",
}
_CACHE_VARIABLE = "TIKTOKEN_CACHE_DIR"
# Of o200k_harmony (openai-harmony's and llama.cpp's vocabulary of gpt-oss, 2026-11); the gaps are <|reserved_…|>.
HARMONY_TOKENS = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}
_HARMONY_SIZE = 201088
_loaded: dict[str, Vocabulary] = {}
# Why a vocabulary could not be loaded: trying again would cost every request as much as the first time.
_broken: dict[str, str] = {}
_lock = threading.Lock()
_broken_templates: set[str] = set()


_FOLDER = Path(__file__).parent / "packs"


def has_pack(name: str) -> bool:
    return (_FOLDER / f"{name}.json.xz").is_file()


def read_pack(name: str) -> VocabularyData:
    """One vocabulary: 0.1–0.5 s.

    Raises:
        CompactionError: the file is damaged.
    """
    data = _packed(name)
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
        # llama.cpp strips after Phi-3's special tokens only if a file's name says "Phi-3", which converters write as
        # "Phi 3"; without the file the higher count stands.
        strips_after_special=False,
    )


def _packed(name: str) -> dict[str, Any]:
    packed = (_FOLDER / f"{name}.json.xz").read_bytes()
    digest = hashlib.sha256(packed).hexdigest()
    if f"{digest}  {name}.json.xz" not in (_FOLDER / "SHA256SUMS").read_text().splitlines():
        raise CompactionError(
            f"The vocabulary pack {name} is damaged (SHA-256 {digest}): reinstall litellm-compaction."
        )
    data: dict[str, Any] = json.loads(lzma.decompress(packed))
    if "like" not in data:
        return data
    # Another pack with some of its special tokens renamed.
    base = _packed(data["like"])
    for index, token in data["renamed"].items():
        base["tokens"][int(index)] = token
    return base | data | {"token_types": base["token_types"] | data["token_types"]}


def vocabulary(name: str) -> Vocabulary:
    """The vocabulary, loaded once per process: 0.1–2 s and 10–130 MB the first time.

    Raises:
        CompactionError: its file is damaged or not on this machine; it is never downloaded, nor tried again before a
            restart.
    """
    found = _loaded.get(name)
    if found is None:
        with _lock:
            found = _loaded.get(name)
            if found is None:
                found = _loaded[name] = _load_once(name)
    return found


def is_loaded(name: str) -> bool:
    """Returns True if `vocabulary(name)` returns at once."""
    return name in _loaded


def is_broken(name: str) -> bool:
    """Returns True if `vocabulary(name)` has failed, and so fails at once."""
    return name in _broken


def why_broken(name: str) -> str:
    """The reason for which `vocabulary(name)` has failed, and what to do; "" if it has not."""
    return _broken.get(name, "")


def token_length(name: str, text: str) -> int:
    """Tokens of `text` by itself; see `Vocabulary.lengths`."""
    return vocabulary(name).length(text)


def _load_once(name: str) -> Vocabulary:
    if name in _broken:
        raise CompactionError(_broken[name])
    try:
        begun_s = time.perf_counter()
        made = _load(name)
    except CompactionError as error:
        _broken[name] = str(error)
        raise
    except BaseException as exc:
        if not is_foreign_failure(exc):
            raise
        _broken[name] = f"The vocabulary {name} cannot be used ({type(exc).__name__}: {str(exc)[:200]})."
        raise CompactionError(_broken[name]) from exc
    logger.info("vocabulary_loaded name=%s load_ms=%.0f", name, 1e3 * (time.perf_counter() - begun_s))
    return made


def _load(name: str) -> Vocabulary:
    if name == "heuristic":
        return Vocabulary(_bare(), CharactersEncoder())
    if name.startswith(FILE_PREFIX):
        return read_tokenizer_json(Path(name.removeprefix(FILE_PREFIX)))
    if has_pack(name):
        return Vocabulary(read_pack(name))
    if name == "gpt-oss":
        return _gpt_oss()
    return Vocabulary(_bare(), TiktokenEncoder(_published(name)))


def _gpt_oss() -> Vocabulary:
    """o200k with harmony's special tokens and llama.cpp's pre-tokenizer, which differs on combining marks."""
    ranks = _published("o200k_base")._mergeable_ranks
    encoding = tiktoken.Encoding(
        "gpt-oss", pat_str=str(tiktoken_pattern("gpt-4o")), mergeable_ranks=ranks, special_tokens={}
    )
    first = min(HARMONY_TOKENS)
    special = [HARMONY_TOKENS.get(index, f"<|reserved_{index}|>") for index in range(first, _HARMONY_SIZE)]
    return Vocabulary(_bare(special), TiktokenEncoder(encoding))


def _bare(special: Sequence[str] = ()) -> VocabularyData:
    return VocabularyData(
        kind="bpe",
        pre="gpt-4o",
        tokens=tuple(special),
        scores=(),
        token_types=(_CONTROL,) * len(special),
        merges=(),
        bos_id=None,
        eos_id=None,
        adds_bos=False,
    )


def _published(name: str) -> tiktoken.Encoding:
    folder = _folder(name)
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = str(folder)
    try:
        return tiktoken.get_encoding(name)
    finally:
        if before is None:
            del os.environ[_CACHE_VARIABLE]
        else:
            os.environ[_CACHE_VARIABLE] = before


def _folder(name: str) -> Path:
    folders = [Path(os.environ[_CACHE_VARIABLE])] if os.environ.get(_CACHE_VARIABLE) else []
    # Looked up without importing LiteLLM, which takes seconds and belongs to the edges.
    spec = importlib.util.find_spec("litellm")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    folders += [Path(place) / "litellm_core_utils" / "tokenizers" for place in places]
    for folder in folders:
        if (folder / _FILES.get(name, name)).is_file():
            return folder
    raise CompactionError(
        f"The vocabulary {name} is not in {' or '.join(map(str, folders)) or 'LiteLLM'}: "
        f"reinstall LiteLLM, or point {_CACHE_VARIABLE} to a folder with tiktoken's file {_FILES.get(name, name)}."
    )


async def usable_soon(family: Family) -> Family:
    """As `usable`; what is not loaded yet is loaded in a thread."""
    family = _without_broken(family)
    return family if _is_ready(family) else await asyncio.to_thread(usable, family)


def usable(family: Family) -> Family:
    """The family with its vocabulary loaded, or what stands in for it: 0.1–2 s the first time. Never raises."""
    family = _without_broken(family)
    while not _is_ready(family):
        _load_family(family)
        family = _without_broken(family)
    return family


def _is_ready(family: Family) -> bool:
    return is_loaded(family.vocabulary) and (not family.template or is_compiled(family.template))


def _without_broken(family: Family) -> Family:
    while is_broken(family.vocabulary):
        family = stand_in(family)
    if family.template in _broken_templates:
        error_ratio = max(FORMULA_ERROR, family.error_ratio)
        return replace(family, template="", exact=False, error_ratio=error_ratio)
    return family


def _load_family(family: Family) -> None:
    try:
        vocabulary(family.vocabulary)
    except CompactionError as error:
        logger.warning("vocabulary family=%s counted with a stand-in that errs high: %s", family.name, error)
        return
    if family.template:
        _load_template(family.template, family)


def _load_template(name: str, family: Family) -> None:
    try:
        template(name)
    except (KeyError, OSError, ValueError) as error:
        _broken_templates.add(name)
        logger.warning(
            "template family=%s counted by a formula: %s cannot be read (%s); reinstall litellm-compaction",
            family.name,
            name,
            type(error).__name__,
        )
