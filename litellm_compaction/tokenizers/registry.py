"""Vocabularies by name: offline, loaded once per process, in any thread; and which of them counts a deployment.

That is the one that its operator names, else its model family's. Names are those of the packs inside this package,
`heuristic` for four characters per token, and `file:PATH` for an operator's tokenizer.json. OpenAI's ranks are read
from the files that LiteLLM ships. What cannot be loaded refuses no request: a stand-in counts.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import logging
import lzma
import threading
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import tiktoken
from tokenizers import Tokenizer

from litellm_compaction.config import AUTO_TOKENIZER
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.templates import template
from litellm_compaction.tokenizers.families import HEURISTIC, NEAR_ERROR, VOCABULARY_ERROR, Family, family_of
from litellm_compaction.tokenizers.vocabulary import CONTROL, Vocabulary, by_tokenizers, by_words, is_foreign_failure
from litellm_compaction.windows.windows import Target, Window

Kind: TypeAlias = Literal["operator", "pack", "stand_in", "heuristic"]
_HOW = (
    "the path of the model's tokenizer.json or of its folder (`hf download` fetches it), or a model's name of a known "
    "family (llama-3.1-8b)"
)
logger = logging.getLogger("litellm_compaction")
FILE_PREFIX = "file:"
# Gemma's tokenizer.json is the largest known, 33 MB.
_MAX_MIB = 128
_FOLDER = Path(__file__).parent / "packs"
# A failure is kept, too: trying again would cost every request as much as the first time.
_loaded: dict[str, Vocabulary | CompactionError] = {}
_usable: dict[Family, Family] = {}
_lock = threading.Lock()


def vocabulary(name: str) -> Vocabulary:
    """The vocabulary, loaded once in 0.1–2 s, of 10–130 MB. Raises CompactionError if its file is damaged or absent."""
    if name not in _loaded:
        with _lock:
            if name not in _loaded:
                _loaded[name] = _load_once(name)
    found = _loaded[name]
    if isinstance(found, CompactionError):
        raise found
    return found


def is_loaded(name: str) -> bool:
    """Returns True if `vocabulary(name)` returns at once."""
    return isinstance(_loaded.get(name), Vocabulary)


def why_broken(name: str) -> str:
    """The reason for which `vocabulary(name)` has failed, and what to do; "" if it has not."""
    found = _loaded.get(name)
    return str(found) if isinstance(found, CompactionError) else ""


def usable(family: Family) -> Family:
    """The family with vocabulary and template loaded, in 0.1–2 s, or `heuristic` in its place."""
    if family not in _usable:
        try:
            vocabulary(family.vocabulary)
            if family.template:
                template(family.template)
            _usable[family] = family
        except CompactionError as error:
            logger.warning("vocabulary family=%s counted by four characters a token: %s", family.name, error)
            _usable[family] = replace(HEURISTIC, reasons=family.reasons, rereads=family.rereads, load=family.load)
    return _usable[family]


async def usable_soon(family: Family) -> Family:
    """As `usable`; what is not loaded yet is loaded in a thread."""
    return _usable[family] if family in _usable else await asyncio.to_thread(usable, family)


def _load_once(name: str) -> Vocabulary | CompactionError:
    try:
        return _load(name)
    except BaseException as error:
        if not is_foreign_failure(error):
            raise
        named = name.removeprefix(FILE_PREFIX)
        return CompactionError(f"{named} cannot be read or used ({type(error).__name__}: {str(error)[:200]}).")


def _load(name: str) -> Vocabulary:
    if name == "heuristic":
        return Vocabulary(lambda piece: -(-len(piece) // 4))
    if name.startswith(FILE_PREFIX):
        return _read_tokenizer_json(Path(name.removeprefix(FILE_PREFIX)))
    head, body = _read_pack(name)
    special = {token: kind for token, (_, kind) in head["special"].items()}
    more = {key: head[key] for key in ("bos", "eos", "prefixes_space") if key in head}
    if head["pattern"]:
        encoding = _encoding(name, head, body)
        return Vocabulary(lambda piece: len(encoding.encode_ordinary(piece)), special, encoding=encoding, **more)
    tokenizer, has_words = Tokenizer.from_buffer(body), head.get("words") and not head["across"]
    return Vocabulary(by_words(tokenizer, head["words"]) if has_words else by_tokenizers(tokenizer), special, **more)


def _read_tokenizer_json(path: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json, or of the one in a folder: 1 to 3 s and about 100 MB."""
    path = path / "tokenizer.json" if path.is_dir() else path
    # A pipe would be waited for, a device has no end.
    if not path.is_file() or path.stat().st_size > _MAX_MIB << 20:
        raise ValueError(f"no ordinary file of at most {_MAX_MIB} MiB")
    tokenizer = Tokenizer.from_buffer(path.read_bytes())
    # Padding would make 4 TB of a word, and a cut would hide the rest of a text.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    special = {token.content: CONTROL for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return Vocabulary(by_tokenizers(tokenizer), special)


def _read_pack(name: str) -> tuple[dict[str, Any], bytes]:
    """The facts about a vocabulary, and its tokens by rank or its tokenizer.json."""
    head, _, body = lzma.decompress((_FOLDER / f"{name}.json.xz").read_bytes()).partition(b"\n")
    return json.loads(head), body


def _encoding(name: str, head: dict[str, Any], body: bytes) -> tiktoken.Encoding:
    # One that differs from another in its special tokens alone has no ranks of its own.
    whole, body = _read_pack(head["like"]) if "like" in head else (head, body)
    if "file" in whole:
        rows = (line.split() for line in _published(whole["file"]).splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
    else:
        ranks = {token.encode("latin-1"): rank for rank, token in enumerate(json.loads(body))}
    return tiktoken.Encoding(name, pat_str=head["pattern"], mergeable_ranks=ranks, special_tokens={})


def _published(name: str) -> bytes:
    """One of tiktoken's files, which it calls by the SHA-1 of their addresses, as LiteLLM ships it."""
    # Looked up without importing LiteLLM, which takes seconds and belongs to the edges.
    spec = importlib.util.find_spec("litellm")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place) / "litellm_core_utils" / "tokenizers" / name
        if path.is_file():
            return path.read_bytes()
    raise FileNotFoundError(f"tiktoken's file {name} is not in LiteLLM")


class TokenizerSource(NamedTuple):
    """The family that counts a deployment's prompts, and where its vocabulary is from."""

    kind: Kind
    family: Family

    @property
    def path(self) -> str:
        """The operator's file; "" if the vocabulary is not from one."""
        name = self.family.vocabulary
        return name.removeprefix(FILE_PREFIX) if name.startswith(FILE_PREFIX) else ""


class Sources(NamedTuple):
    """The sources of all deployments; `tokenizer` is the global setting: "" or `auto` is the model's family."""

    tokenizer: str = ""

    def family(self, target: Target, window: Window) -> Family:
        """The family that counts a deployment's prompts."""
        return replace(self.source(target, window.architecture).family, load=window.load)

    def source(self, target: Target, architecture: str) -> TokenizerSource:
        """Its vocabulary may not be loaded yet; `architecture` as LM Studio lists it, "" if it was not asked."""
        return _source(target.tokenizer or self.tokenizer, architecture, target.model)


@lru_cache(maxsize=4096)
def _source(written: str, architecture: str, model: str) -> TokenizerSource:
    family = family_of(architecture, model)
    if written in ("", AUTO_TOKENIZER):
        return TokenizerSource("pack" if family.owns_vocabulary else "stand_in", family)
    path = None if written == HEURISTIC.name else _path(written)
    if path is None:
        named = HEURISTIC if written == HEURISTIC.name else family_of("", written)
        kind: Kind = "heuristic" if named is HEURISTIC else "operator"
        return TokenizerSource(kind, replace(named, reasons=family.reasons, rereads=family.rereads))
    error_ratio = max(family.error_ratio, NEAR_ERROR) if family.template else VOCABULARY_ERROR
    own: dict[str, Any] = {"owns_vocabulary": True, "exact": False, "single_digits": False, "error_ratio": error_ratio}
    return TokenizerSource("operator", replace(family, vocabulary=f"{FILE_PREFIX}{path}", **own))


def check_tokenizer(value: str, place: str) -> None:
    """Makes sure that the `tokenizer:` setting of a `place` can be followed; loads its file. Raises ConfigError."""
    if value in (AUTO_TOKENIZER, HEURISTIC.name):
        return
    if value.lower().endswith(".gguf"):
        raise ConfigError(f"{place} = {value!r}: .gguf files are not read any more: write {_HOW}, or leave it out")
    path = _path(value)
    if path is None:
        if family_of("", value).name == "unknown":
            raise ConfigError(f"{place} = {value!r}: allowed: {AUTO_TOKENIZER}, {HEURISTIC.name}, {_HOW}")
        return
    try:
        vocabulary(f"{FILE_PREFIX}{path}")
    except CompactionError as error:
        raise ConfigError(f"{place} = {value!r}: {error} Write {_HOW}, or `{AUTO_TOKENIZER}`.") from error


def _path(value: str) -> Path | None:
    """The path that a `tokenizer:` setting is; None if it names a model."""
    try:
        path = Path(value).expanduser()
        looks_like_path = "/" in value or "\\" in value or value.lower().endswith(".json") or path.is_dir()
    except (OSError, RuntimeError, ValueError):
        # Odd characters, or no home folder: the reader will say that there is no such file.
        return Path(value)
    return path if looks_like_path else None
