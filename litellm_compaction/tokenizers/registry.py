"""Vocabularies by name: offline, loaded once per process, for any string.

Names are those of the packs inside this package, `heuristic` for four characters per token, and `file:PATH` for the
tokenizer.json that an operator has named. Safe to call from worker threads. The packs are built by
tools/build_packs.py; OpenAI's are without ranks, which are read from the files that LiteLLM ships. NOTICE names sources
and licences.

A damaged pack refuses no request and never passes for an exact count: the family is then counted by a stand-in.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import json
import logging
import lzma
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import Tokenizer

from litellm_compaction.errors import CompactionError
from litellm_compaction.templates.template import is_compiled, template
from litellm_compaction.tokenizers.encoders import (
    CharactersEncoder,
    Encoder,
    TiktokenEncoder,
    TokenizersEncoder,
    WordsEncoder,
    is_foreign_failure,
)
from litellm_compaction.tokenizers.families import FORMULA_ERROR, Family, stand_in
from litellm_compaction.tokenizers.files import read_tokenizer_json
from litellm_compaction.tokenizers.vocabulary import Vocabulary

logger = logging.getLogger("litellm_compaction")
# Before the path of an operator's tokenizer.json.
FILE_PREFIX = "file:"
_CACHE_VARIABLE = "TIKTOKEN_CACHE_DIR"
_FOLDER = Path(__file__).parent / "packs"
_loaded: dict[str, Vocabulary] = {}
# Why a vocabulary or a template could not be loaded: trying again would cost every request as much as the first time.
_broken: dict[str, str] = {}
_broken_templates: set[str] = set()
_lock = threading.Lock()


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


def why_broken(name: str) -> str:
    """The reason for which `vocabulary(name)` has failed, and what to do; "" if it has not."""
    return _broken.get(name, "")


def token_length(name: str, text: str) -> int:
    """Tokens of `text` by itself; see `Vocabulary.lengths`."""
    return vocabulary(name).length(text)


def _load_once(name: str) -> Vocabulary:
    if name in _broken:
        raise CompactionError(_broken[name])
    begun_s = time.perf_counter()
    try:
        made = _load(name)
    except CompactionError as error:
        _broken[name] = str(error)
        raise
    except BaseException as error:
        if not is_foreign_failure(error):
            raise
        _broken[name] = f"The vocabulary {name} cannot be used ({type(error).__name__}: {str(error)[:200]})."
        raise CompactionError(_broken[name]) from error
    logger.info("vocabulary_loaded name=%s load_ms=%.0f", name, 1e3 * (time.perf_counter() - begun_s))
    return made


def _load(name: str) -> Vocabulary:
    if name == "heuristic":
        return Vocabulary(CharactersEncoder())
    if name.startswith(FILE_PREFIX):
        return read_tokenizer_json(Path(name.removeprefix(FILE_PREFIX)))
    head, body = _read_pack(name)
    special = {token: kind for token, (_, kind) in head["special"].items()}
    keys = ("bos", "eos", "adds_bos", "prefixes_space")
    return Vocabulary(_encoder(name, head, body), special, **{key: head[key] for key in keys if key in head})


def _read_pack(name: str) -> tuple[dict[str, Any], bytes]:
    """The facts about a vocabulary, and its tokens by rank or its tokenizer.json.

    Raises:
        CompactionError: the file is damaged.
    """
    packed = (_FOLDER / f"{name}.json.xz").read_bytes()
    digest = hashlib.sha256(packed).hexdigest()
    if f"{digest}  {name}.json.xz" not in (_FOLDER / "SHA256SUMS").read_text().splitlines():
        raise CompactionError(
            f"The vocabulary pack {name} is damaged (SHA-256 {digest}): reinstall litellm-compaction."
        )
    head, _, body = lzma.decompress(packed).partition(b"\n")
    return json.loads(head), body


def _encoder(name: str, head: dict[str, Any], body: bytes) -> Encoder:
    if not head["pattern"]:
        tokenizer = Tokenizer.from_buffer(body)
        by_words = "words" in head
        return WordsEncoder(tokenizer, head["words"], head["across"]) if by_words else TokenizersEncoder(tokenizer)
    # One that differs from another in its special tokens alone has no ranks of its own.
    whole, body = _read_pack(head["like"]) if "like" in head else (head, body)
    if "file" in whole:
        rows = (line.split() for line in _published(whole["file"]).splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
    else:
        ranks = {token.encode("latin-1"): rank for rank, token in enumerate(json.loads(body))}
    encoding = tiktoken.Encoding(name, pat_str=head["pattern"], mergeable_ranks=ranks, special_tokens={})
    return TiktokenEncoder(encoding)


def _published(name: str) -> bytes:
    """One of tiktoken's files, which it calls by the SHA-1 of their addresses."""
    folders = [Path(os.environ[_CACHE_VARIABLE])] if os.environ.get(_CACHE_VARIABLE) else []
    # Looked up without importing LiteLLM, which takes seconds and belongs to the edges.
    spec = importlib.util.find_spec("litellm")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    folders += [Path(place) / "litellm_core_utils" / "tokenizers" for place in places]
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).read_bytes()
    raise CompactionError(
        f"tiktoken's file {name} is not in {' or '.join(map(str, folders)) or 'LiteLLM'}: reinstall LiteLLM, or point "
        f"{_CACHE_VARIABLE} to a folder with it."
    )


async def usable_soon(family: Family) -> Family:
    """As `usable`; what is not loaded yet is loaded in a thread."""
    family = _without_broken(family)
    return family if _is_ready(family) else await asyncio.to_thread(usable, family)


def usable(family: Family) -> Family:
    """The family with its vocabulary loaded, or what stands in for it: 0.1–2 s the first time. Never raises."""
    family = _without_broken(family)
    while not _is_ready(family):
        try:
            vocabulary(family.vocabulary)
            _load_template(family)
        except CompactionError as error:
            logger.warning("vocabulary family=%s counted with a stand-in that errs high: %s", family.name, error)
        family = _without_broken(family)
    return family


def _is_ready(family: Family) -> bool:
    return is_loaded(family.vocabulary) and (not family.template or is_compiled(family.template))


def _without_broken(family: Family) -> Family:
    while family.vocabulary in _broken:
        family = stand_in(family)
    if family.template in _broken_templates:
        error_ratio = max(FORMULA_ERROR, family.error_ratio)
        return replace(family, template="", exact=False, error_ratio=error_ratio)
    return family


def _load_template(family: Family) -> None:
    if not family.template:
        return
    try:
        template(family.template)
    except (KeyError, OSError, ValueError) as error:
        _broken_templates.add(family.template)
        logger.warning(
            "template family=%s counted by a formula: %s cannot be read (%s); reinstall litellm-compaction",
            family.name,
            family.template,
            type(error).__name__,
        )
