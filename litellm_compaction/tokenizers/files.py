"""A vocabulary and templates out of a .gguf or tokenizer.json file, ready to count with; each file is read once.

Read in worker threads, and at start for what operators name. A Hugging Face `tokenizer.json` is not turned into
`VocabularyData`: it carries its own normalizers, pre-tokenizers and decoders, which only the `tokenizers` package
applies.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from litellm_compaction.concurrency import Bounded
from litellm_compaction.errors import UnusableModelFile
from litellm_compaction.templates.contained import Contained, Died
from litellm_compaction.templates.template import add_template, template
from litellm_compaction.tokenizers.encoders import VocabularyData, is_foreign_failure
from litellm_compaction.tokenizers.gguf import GgufHeader, Malformed, first_part, opened, read_gguf, refusals_of
from litellm_compaction.tokenizers.model_files import TOKENIZER
from litellm_compaction.tokenizers.registry import install_vocabulary, is_loaded
from litellm_compaction.tokenizers.vocabulary import Vocabulary

# Gemma's file is the largest known, 33 MB.
_MAX_BYTES = 128 * 2**20
# tokenizer_config.json repeats all added tokens, and templates take up to 30 kB.
_MAX_SIDE_BYTES = 8 * 2**20
# A normalizer may make more characters of one: U+FDFA becomes 18 under NFKC, a space three bytes' worth of `▁`.
_MOST_GROWTH = 64
# Every tokenizer is tried with these: runs, on which patterns backtrack, and a bit of everything.
_PROBES = (
    *(char * 512 for char in (" ", "a", "0", ".", "\n", "中", "é", "_")),
    "a1 " * 170 + "!",
    "".join(map(chr, range(32, 1024))) + "😀\u200d️ﷺ",
)
_MOST_TOKENS_PER_BYTE, _MOST_PROBE_S = 4, 2.0
# The job of the process that examines a file, and the beginnings of its answer.
_EXAMINED = f"{__name__}:examined"
_TAME, _WILD = b"+", b"-"
_TOO_MUCH = "it took more than 1 GiB of memory or 5 s of processor time to read"
_CONTROL = 3
_MAX_FILES = 256
_Identity = tuple[str, int, int]
_files: Bounded[_Identity, TokenizerFile] = Bounded(_MAX_FILES)
# Hashes of files that have ended their process: none is tried again before a restart.
_died: Bounded[str, None] = Bounded(_MAX_FILES)
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonTokenizer:
    """A loaded tokenizer.json, as an `Encoder`; safe to use from several threads.

    Attributes:
        special_tokens: ids by text, of what the file marks as special.
        bos_token: "" if tokenizer_config.json names none.
        eos_token: "" if tokenizer_config.json names none.
        adds_bos: the tokenizer puts `bos_token` before a text when it is asked for special tokens.
        chat_template: from chat_template.jinja, tokenizer_config.json or chat_template.json beside it; "" if none.
        fingerprint: stable identity, for caches.
    """

    special_tokens: dict[str, int]
    bos_token: str
    eos_token: str
    adds_bos: bool
    chat_template: str
    fingerprint: str
    _tokenizer: Tokenizer = field(repr=False, compare=False)
    # Holds a word once it has failed: a stack trace of Rust's goes to stderr each time.
    _failed: list[str] = field(default_factory=list, repr=False, compare=False)

    def lengths(self, pieces: Sequence[str]) -> list[int]:
        return list(map(self.count, pieces))

    def count(self, text: str) -> int:
        """Tokens of a text, without BOS or EOS around it; special tokens in it are one token each.

        About 0.5 s per MB, of which other threads lose 5 to 10 ms; `Tokenizer.encode` would hold the interpreter lock
        for 0.9 s (tokenizers 0.23.3, Qwen 2's vocabulary, 2026-11). Lone surrogates count as replacement characters.
        """
        if not text:
            return 0
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        encoding = None if self._failed else _encode(self._tokenizer, text, special=False)
        if encoding is None:
            self._failed[:] = ["panic"]
        # No token is shorter than one byte.
        return len(encoding) if encoding is not None else len(text.encode())


def read_tokenizer_json(path: Path) -> JsonTokenizer:
    """The tokenizer of a file, or of the tokenizer.json in a folder: 1 to 3 s and about 100 MB.

    It is read in a process of its own first (0.6 s of processor time and what reading takes; 2.0 s of its 5 s and 413
    MB of its 1 GiB for 33 MB, 2026-11-24): what ends that process is never read in this one.

    `tokenizers` holds the interpreter lock all that time (0.6 s for Qwen 2's 11 MB, tokenizers 0.23.3), in any thread:
    best done before requests come in.

    Raises:
        UnusableModelFile: it is absent, unreadable, larger than 128 MiB, or no tokenizer.json. What lies beside it
            never fails: a broken tokenizer_config.json is as good as none.
    """
    path = _place(path)
    with refusals_of(path):
        raw = _read_bytes(path, _MAX_BYTES)
        tokenizer = _load_json(_examined_apart(raw))
    config = _side_object(path.with_name("tokenizer_config.json"))
    bos_token = _token_text(config.get("bos_token"))
    template = (
        _side_text(path.with_name("chat_template.jinja"))
        or _default_template(config.get("chat_template"))
        or _default_template(_side_object(path.with_name("chat_template.json")).get("chat_template"))
    )
    return JsonTokenizer(
        special_tokens={
            token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        },
        bos_token=bos_token,
        eos_token=_token_text(config.get("eos_token")),
        adds_bos=_adds_bos(tokenizer, bos_token, config.get("add_bos_token")),
        chat_template=template,
        fingerprint=hashlib.blake2b(raw + b"\0" + template.encode("utf-8", "replace"), digest_size=16).hexdigest(),
        _tokenizer=tokenizer,
    )


def _examined_apart(raw: bytes) -> bytes:
    """The JSON as it may be loaded here, after a process of its own has loaded and tried it.

    Raises:
        Malformed: it is refused, or has ended its process now or before.
        OSError: no process can be started.
    """
    digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    if digest in _died:
        raise Malformed(_TOO_MUCH)
    # One of its own: 413 MB of 1 GiB stay with it if the file is Gemma's.
    process = Contained()
    try:
        answer = process.run(_EXAMINED, raw)
    except Died as exc:
        _died[digest] = None
        raise Malformed(_TOO_MUCH) from exc
    finally:
        process.end()
    told = answer[1:]
    if answer[:1] != _TAME:
        raise Malformed(told.decode("utf-8", "replace"))
    return told or raw


def examined(raw: bytes) -> bytes:
    """Done in the process: `_TAME` and the JSON as it may be loaded, empty if as it is; or `_WILD` and why not."""
    try:
        plain = _without_padding(raw)
        tokenizer = _load_json(plain or raw)
        _must_be_tame(tokenizer)
        _encode(tokenizer, "", special=True)
    except Malformed as exc:
        return _WILD + str(exc).encode("utf-8", "replace")
    return _TAME + plain


def _without_padding(raw: bytes) -> bytes:
    """The JSON without `padding` and `truncation`; empty if it has neither.

    The library pads as soon as it encodes (a 2 KB file asked for 4 TB, 2026-11-23), and a cut would hide the rest of a
    text.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise Malformed("it is no tokenizer.json: it is no JSON") from exc
    if not isinstance(value, dict):
        raise Malformed("it is no tokenizer.json: it is no object")
    found = [value.pop(name, None) for name in ("padding", "truncation")]
    return json.dumps(value).encode() if any(part is not None for part in found) else b""


def _load_json(raw: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(raw)
    except BaseException as exc:
        if not _is_of_tokenizers(exc):
            raise
        raise Malformed(f"it is no tokenizer.json: {str(exc)[:200]}") from exc


def _must_be_tame(tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that makes any number of tokens of a few characters, or takes long over them.

    30 characters became 30 million tokens (2026-11). A probe alone would miss a rule for a rare character.

    Raises:
        Malformed: it is such a file.
    """
    growth = _growth(tokenizer)
    if growth > _MOST_GROWTH:
        raise Malformed(f"its normalizer makes {growth} characters of one; at most {_MOST_GROWTH} are allowed")
    begun_s = time.thread_time()
    for probe in _PROBES:
        encoding = _encode(tokenizer, probe, special=False)
        if time.thread_time() - begun_s > _MOST_PROBE_S:
            raise Malformed(f"it takes more than {_MOST_PROBE_S:g} s for {sum(map(len, _PROBES))} characters")
        if encoding is not None and len(encoding) > _MOST_TOKENS_PER_BYTE * len(probe.encode()):
            raise Malformed(f"it makes {len(encoding)} tokens of {len(probe)} characters")


def _growth(tokenizer: Tokenizer) -> int:
    if tokenizer.normalizer is None:
        return 1
    growth = 1
    rules: list[object] = [json.loads(tokenizer.normalizer.__getstate__())]
    while rules:
        rule = rules.pop()
        if not isinstance(rule, dict):
            continue
        rules += rule.get("normalizers") or ()
        content = rule.get("content") or rule.get("prepend") or _longest_of(rule.get("precompiled_charsmap"))
        pattern = rule.get("pattern")
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        growth *= max(1, -(-len(str(content)) // max(1, len(str(plain or "")))))
    return growth


def _longest_of(charsmap: object) -> str:
    """The longest text that SentencePiece's map makes of a character; "" if there is no map.

    The map is the size of a trie in four bytes, the trie, and texts that end in a zero byte (sentencepiece's
    normalizer.cc, `EncodePrecompiledCharsMap`).
    """
    raw = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
    texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
    return max(texts, key=len).decode("utf-8", "replace")


def _encode(tokenizer: Tokenizer, text: str, *, special: bool) -> Encoding | None:
    """The tokens of a text; None if the file's own rules fail on it (no unknown token, a bad post-processor)."""
    try:
        return tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
    except BaseException as exc:
        if not _is_of_tokenizers(exc):
            raise
        return None


def _is_of_tokenizers(exc: BaseException) -> bool:
    """Its errors are ValueError or bare Exception; its Rust side panics with a BaseException that has no import."""
    return isinstance(exc, ValueError) or type(exc) is Exception or type(exc).__name__ == "PanicException"


def _adds_bos(tokenizer: Tokenizer, bos_token: str, given: object) -> bool:
    if not bos_token:
        return False
    encoding = _encode(tokenizer, "", special=True)
    return given is True or (encoding is not None and encoding.tokens[:1] == [bos_token])


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    with opened(path) as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise Malformed(f"it is larger than {max_bytes} bytes")
    return raw


def _side_text(path: Path) -> str:
    try:
        return _read_bytes(path, _MAX_SIDE_BYTES).decode("utf-8", "replace")
    except (Malformed, OSError):
        return ""


def _side_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(_side_text(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _token_text(value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _default_template(value: object) -> str:
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if _is_named(entry)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _is_named(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """The parts of a file that count.

    Attributes:
        vocabulary: its name in `registry.py`, loaded; files with the same tokens share it.
        template: its name in `template.py`; "" if the file has none that can be rendered.
        tool_template: of the one for requests with tools; "" if `template` serves them too.
        rereads: True if its model reads a whole prompt again after any change, as far as the file says.
    """

    path: Path
    vocabulary: str
    template: str
    tool_template: str
    rereads: bool = False


def load_tokenizer_file(path: Path) -> TokenizerFile:
    """The vocabulary and templates of a file, or of the tokenizer.json in a folder; again only if it has changed.

    First time 0.3 to 1.5 s and 50 to 130 MB; one file at a time. For a tokenizer.json about 0.6 s of it hold the
    interpreter lock (`files.py`).

    Raises:
        UnusableModelFile: it is absent, damaged, or of a kind that cannot be counted with.
    """
    with _lock:
        place = _place(path)
        identity = _identity(place)
        found = _files.get(identity) if identity is not None else None
        if found is None:
            found = _load(place)
            if identity is not None:
                _files[identity] = found
        return found


def _place(path: Path) -> Path:
    try:
        return path / TOKENIZER if path.is_dir() else first_part(path)
    except (OSError, ValueError):
        return path


def _identity(path: Path) -> _Identity | None:
    """A value that changes when the file does; None lets the reader say why it cannot be read."""
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
    return _from_gguf(path, read_gguf(path))


def _from_gguf(path: Path, header: GgufHeader) -> TokenizerFile:
    data = header.vocabulary
    name = _digest(data)
    if not is_loaded(name):
        try:
            install_vocabulary(name, Vocabulary(data))
        except BaseException as exc:
            if not is_foreign_failure(exc):
                raise
            raise UnusableModelFile(str(path), f"its vocabulary cannot be used: {exc}") from exc
    chat = template_name(header.chat_template)
    return TokenizerFile(
        path=path,
        vocabulary=name,
        template=chat,
        tool_template=template_name(header.tool_chat_template) if chat else "",
        rereads=header.rereads,
    )


def _from_json(path: Path) -> TokenizerFile:
    tokenizer = read_tokenizer_json(path)
    name = f"json:{tokenizer.fingerprint}"
    if not is_loaded(name):
        install_vocabulary(name, Vocabulary(_bare(tokenizer), tokenizer))
    return TokenizerFile(path=path, vocabulary=name, template=template_name(tokenizer.chat_template), tool_template="")


def _bare(tokenizer: JsonTokenizer) -> VocabularyData:
    """The special parts of a tokenizer.json; its own normalizer adds spaces, so nothing else has to."""
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
    )


def template_name(source: str) -> str:
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
    digest.update(repr(replace(data, tokens=(), merges=())).encode())
    return f"gguf:{digest.hexdigest()}"
