"""Vocabularies by name: offline, loaded once per process, for any string.

Called by `counter.py`, also from worker threads. Names are those of the packs inside this package, of the two files
that LiteLLM ships (`cl100k_base`, `o200k_base`, and `gpt-oss` made of the latter), `heuristic` for four characters per
token, and whatever was added at run time.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path

import tiktoken

from litellm_compaction.errors import CompactionError
from litellm_compaction.models.encoders import CharactersEncoder, TiktokenEncoder, is_foreign_failure
from litellm_compaction.models.load_costs import Loading
from litellm_compaction.models.pack_files import has_pack, read_pack
from litellm_compaction.models.pretokenizers import tiktoken_pattern
from litellm_compaction.models.vocabularies import Vocabulary
from litellm_compaction.models.vocabulary_data import VocabularyData

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
_CONTROL = 3

_loaded: dict[str, Vocabulary] = {}
_added: dict[str, VocabularyData] = {}
_begun: dict[str, Loading] = {}
# Why a vocabulary could not be loaded: trying again would cost every request as much as the first time.
_broken: dict[str, str] = {}
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


def add_vocabulary(data: VocabularyData, loading: Loading | None = None) -> str:
    """Makes a vocabulary that was read elsewhere known; gives the name to ask for it.

    Args:
        data: of it.
        loading: began before it was read, so that its cost is all of it.
    """
    _added[data.fingerprint] = data
    if loading is not None:
        _begun[data.fingerprint] = loading
    return data.fingerprint


def install_vocabulary(name: str, made: Vocabulary) -> None:
    """Makes a vocabulary that was built elsewhere known under a name."""
    _loaded[name] = made


def is_loaded(name: str) -> bool:
    """Whether `vocabulary(name)` returns at once."""
    return name in _loaded


def is_broken(name: str) -> bool:
    """Whether `vocabulary(name)` has failed, and so fails at once."""
    return name in _broken


def why_broken(name: str) -> str:
    """Why `vocabulary(name)` has failed, and what to do; "" where it has not."""
    return _broken.get(name, "")


def token_length(name: str, text: str) -> int:
    """Tokens of `text` by itself; see `Vocabulary.lengths`."""
    return vocabulary(name).length(text)


def _load_once(name: str) -> Vocabulary:
    if name in _broken:
        raise CompactionError(_broken[name])
    try:
        loading = _begun.pop(name, None) or Loading()
        made = _load(name)
    except CompactionError as error:
        _broken[name] = str(error)
        raise
    except BaseException as exc:
        if not is_foreign_failure(exc):
            raise
        _broken[name] = f"The vocabulary {name} cannot be used ({type(exc).__name__}: {str(exc)[:200]})."
        raise CompactionError(_broken[name]) from exc
    loading.note(name)
    return made


def _load(name: str) -> Vocabulary:
    if name in _added:
        # The encoder holds all that is needed from here on.
        return Vocabulary(_added.pop(name))
    if name == "heuristic":
        return Vocabulary(_bare(name), CharactersEncoder())
    if has_pack(name):
        return Vocabulary(read_pack(name))
    if name == "gpt-oss":
        return _gpt_oss()
    return Vocabulary(_bare(name), TiktokenEncoder(_published(name)))


def _gpt_oss() -> Vocabulary:
    """o200k with harmony's special tokens and llama.cpp's pre-tokenizer, which differs on combining marks."""
    ranks = _published("o200k_base")._mergeable_ranks
    encoding = tiktoken.Encoding(
        "gpt-oss", pat_str=str(tiktoken_pattern("gpt-4o")), mergeable_ranks=ranks, special_tokens={}
    )
    first = min(HARMONY_TOKENS)
    special = [HARMONY_TOKENS.get(index, f"<|reserved_{index}|>") for index in range(first, _HARMONY_SIZE)]
    return Vocabulary(_bare("gpt-oss", special), TiktokenEncoder(encoding))


def _bare(name: str, special: list[str] | None = None) -> VocabularyData:
    """The data of a vocabulary whose encoder is there already: only what is special about it."""
    special = special or []
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
        chat_template="",
        fingerprint=name,
    )


def _published(name: str) -> tiktoken.Encoding:
    """One of tiktoken's own vocabularies."""
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
    """Where the vocabulary's file lies: the operator's tiktoken folder if it has it, else LiteLLM's."""
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
