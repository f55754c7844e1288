"""How many tokens a vocabulary makes of a text: offline, for any string, in pieces.

Called by `counter.py`, also from worker threads. LiteLLM ships the vocabulary files of tiktoken.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import tiktoken

from litellm_compaction.errors import CompactionError

# tiktoken stores a file under the SHA-1 of its address.
_FILES = {
    "cl100k_base": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    "o200k_base": "fb374d419588a4632f3f557e76b4b70aebbca790",
}
_CACHE_VARIABLE = "TIKTOKEN_CACHE_DIR"
# Long runs make tiktoken slow, then panic (1,000,000 spaces, tiktoken 0.14), and one call must not hold the GIL long.
_PIECE_CHARS = 4096
# Both vocabularies begin a new word here, so that pieces cost exactly as many tokens as the whole text.
_BOUNDARY = re.compile(r"(?<=\S)(?= [A-Za-z])|(?<=\n)(?=[^\s])")

_loaded: dict[str, tiktoken.Encoding] = {}
_lock = threading.Lock()


def encoding(name: str) -> tiktoken.Encoding:
    """The vocabulary, loaded once per process: 0.1–0.4 s and about 80 MB the first time.

    Raises:
        CompactionError: the vocabulary's file is not on this machine; it is never downloaded.
    """
    found = _loaded.get(name)
    if found is None:
        with _lock:
            found = _loaded.get(name)
            if found is None:
                found = _loaded[name] = _load(name)
    return found


def is_loaded(name: str) -> bool:
    """Whether `encoding(name)` returns at once."""
    return name in _loaded


def token_length(encoding_name: str, text: str) -> int:
    """Tokens of `text`: names of special tokens count as ordinary text, lone surrogates as replacement characters.

    Exact for text with words and lines; runs of more than 4096 characters without a boundary cost at most one token
    too many per 4096. Never raises on any string.
    """
    vocabulary = encoding(encoding_name)
    if len(text) <= _PIECE_CHARS:
        return _piece_length(vocabulary, text)
    return sum(_piece_length(vocabulary, piece) for piece in _pieces(text))


def _piece_length(vocabulary: tiktoken.Encoding, piece: str) -> int:
    try:
        return len(vocabulary.encode_ordinary(piece))
    except BaseException as error:
        # tiktoken's Rust side panics with a BaseException that cannot be imported by name.
        if type(error).__name__ != "PanicException":
            raise
        # No token is shorter than one byte.
        return len(piece.encode("utf-8", "replace"))


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = start + _PIECE_CHARS
        # The last boundary of the piece; looked for in its last quarter only, which nearly always has one.
        for found in _BOUNDARY.finditer(text, start + _PIECE_CHARS * 3 // 4, start + _PIECE_CHARS):
            end = found.end()
        yield text[start:end]
        start = end
    yield text[start:]


def _load(name: str) -> tiktoken.Encoding:
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
