"""A vocabulary and templates out of a .gguf or tokenizer.json file, ready to count with; each file is read once.

Called by `sources.py` in worker threads, and at start for what operators name.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from litellm_compaction.errors import UnusableModelFile
from litellm_compaction.models.encoders import is_foreign_failure
from litellm_compaction.models.gguf import GgufHeader, first_part, read_gguf
from litellm_compaction.models.load_costs import Loading
from litellm_compaction.models.model_files import TOKENIZER
from litellm_compaction.models.templates import add_template, template
from litellm_compaction.models.tokenizer_json import JsonTokenizer, read_tokenizer_json
from litellm_compaction.models.tokenizers import add_vocabulary, install_vocabulary, is_loaded, vocabulary
from litellm_compaction.models.vocabularies import Vocabulary
from litellm_compaction.models.vocabulary_data import VocabularyData

_CONTROL = 3
_MAX_FILES = 256
_Identity = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """What a file gives for counting.

    Attributes:
        vocabulary: its name in `tokenizers.py`, loaded; files with the same tokens share it.
        template: its name in `templates.py`; "" where the file has none that can be rendered.
        tool_template: of the one for requests with tools; "" where `template` serves them too.
    """

    path: Path
    vocabulary: str
    template: str
    tool_template: str


_read: dict[_Identity, TokenizerFile] = {}
_lock = threading.Lock()


def load_tokenizer_file(path: Path) -> TokenizerFile:
    """The vocabulary and templates of a file, or of the tokenizer.json in a folder; again only if it has changed.

    First time 0.3 to 1.5 s and 50 to 130 MB; one file at a time. For a tokenizer.json about 0.6 s of it hold the
    interpreter lock (`tokenizer_json.py`).

    Raises:
        UnusableModelFile: it is absent, damaged, or of a kind that cannot be counted with.
    """
    with _lock:
        place = _place(path)
        identity = _identity(place)
        found = _read.get(identity) if identity is not None else None
        if found is None:
            found = _load(place)
            if identity is not None:
                _read[identity] = found
                if len(_read) > _MAX_FILES:
                    del _read[next(iter(_read))]
        return found


def _place(path: Path) -> Path:
    """The file that is read: of a folder its tokenizer.json, of a split model its first part."""
    try:
        return path / TOKENIZER if path.is_dir() else first_part(path)
    except (OSError, ValueError):
        return path


def _identity(path: Path) -> _Identity | None:
    """What changes when the file does; None lets the reader say what is wrong with it."""
    try:
        known = path.stat()
    except (OSError, ValueError):
        return None
    # A new template beside it is as good as a new file.
    beside = [_mtime_ns(path.with_name(name)) for name in ("tokenizer_config.json", "chat_template.jinja")]
    newest_ns = max(known.st_mtime_ns, *beside) if path.suffix.lower() == ".json" else known.st_mtime_ns
    return str(path), newest_ns, known.st_size


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except (OSError, ValueError):
        return -1


def _load(path: Path) -> TokenizerFile:
    if path.suffix.lower() == ".json":
        return _from_json(path)
    begun = Loading()
    return _from_gguf(path, read_gguf(path), begun)


def _from_gguf(path: Path, header: GgufHeader, begun: Loading) -> TokenizerFile:
    data = header.vocabulary
    name = _digest(data)
    if not is_loaded(name):
        add_vocabulary(replace(data, fingerprint=name), begun)
        try:
            vocabulary(name)
        except BaseException as exc:
            if not is_foreign_failure(exc):
                raise
            raise UnusableModelFile(str(path), f"its vocabulary cannot be used: {exc}") from exc
    chat = _template(data.chat_template)
    return TokenizerFile(
        path=path, vocabulary=name, template=chat, tool_template=_template(header.tool_chat_template) if chat else ""
    )


def _from_json(path: Path) -> TokenizerFile:
    begun = Loading()
    tokenizer = read_tokenizer_json(path)
    name = f"json:{tokenizer.fingerprint}"
    if not is_loaded(name):
        begun.note(name)
        install_vocabulary(name, Vocabulary(_bare(name, tokenizer), _JsonEncoder(tokenizer)))
    return TokenizerFile(path=path, vocabulary=name, template=_template(tokenizer.chat_template), tool_template="")


class _JsonEncoder:
    def __init__(self, tokenizer: JsonTokenizer) -> None:
        self._tokenizer = tokenizer

    def lengths(self, pieces: Sequence[str]) -> list[int]:
        """Tokens of each piece."""
        return [self._tokenizer.count(piece) for piece in pieces]


def _bare(name: str, tokenizer: JsonTokenizer) -> VocabularyData:
    """What is special about a tokenizer.json; its own normalizer adds spaces, so nothing else has to."""
    tokens = list(tokenizer.special_tokens)
    for token in (tokenizer.bos_token, tokenizer.eos_token):
        if token and token not in tokens:
            tokens.append(token)
    return VocabularyData(
        kind="bpe",
        pre="",
        tokens=tuple(tokens),
        scores=(),
        token_types=(_CONTROL,) * len(tokens),
        merges=(),
        bos_id=tokens.index(tokenizer.bos_token) if tokenizer.bos_token else None,
        eos_id=tokens.index(tokenizer.eos_token) if tokenizer.eos_token else None,
        adds_bos=tokenizer.adds_bos,
        chat_template="",
        fingerprint=name,
    )


def _template(source: str) -> str:
    """The name under which a template can be rendered; "" if it cannot even render one short message."""
    if not source:
        return ""
    name = f"file:{hashlib.blake2b(source.encode('utf-8', 'replace'), digest_size=16).hexdigest()}"
    add_template(name, source)
    return name if template(name).is_usable else ""


def _digest(data: VocabularyData) -> str:
    """The same for all files whose vocabularies count alike, whatever their templates: one of them takes 50 MB."""
    digest = hashlib.blake2b(digest_size=16)
    for texts in (data.tokens, data.merges):
        digest.update("\0".join(texts).encode("utf-8", "surrogatepass"))
        digest.update(b"\1")
    digest.update(repr((data.kind, data.pre, data.bos_id, data.eos_id, data.adds_bos, data.adds_space_prefix)).encode())
    digest.update(repr((data.scores, data.token_types)).encode())
    return f"gguf:{digest.hexdigest()}"
