"""The vocabulary and chat template that a .gguf file carries in its header.

Read off the event loop: 0.1 s for 150,000 tokens. Format and keys: docs/gguf.md of the ggml repository, versions 2 and
3, little endian. What a missing key means: llama.cpp, src/llama-vocab.cpp, `llama_vocab::impl::load`, as vendored in
llama-cpp-python 0.3.36. Nothing in the file is trusted: no length or count is used before it is known to fit, and the
work is bounded by `_MAX_ELEMENTS`.
"""

from __future__ import annotations

import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

from litellm_compaction.errors import UnusableModelFile
from litellm_compaction.tokenizers.encoders import VocabularyData

# Keys are at most 65,535 bytes (gguf.md); real files have 20 to 60 of them.
_MAX_KEY_BYTES = 65_535
_MAX_FIELDS = 4096
# Strings of all arrays together, 0.2 s to walk over per million; gemma-4 has 262,144 tokens + 514,906 merges.
_MAX_ELEMENTS = 4_000_000
_MAX_DEPTH = 4
# An array inside an array costs as much as this many strings; no model is known to have any.
_ARRAY_COST = 10
# The longest tokens of llama.cpp's 17 sample vocabularies are runs of 1024 spaces. One wide character makes a whole
# text take four bytes per character, so that this and the next bound what a hostile file can blow up at once.
_MAX_ITEM_BYTES = 4096
_DECODED_TOGETHER = 1024

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {kind: struct.calcsize(f"<{code}") for kind, code in _SCALARS.items()}
_INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
_FLOATS = frozenset({6, 12})
# The largest header known (gemma-4) takes 16 MB; the first step holds nearly all of them.
_READ_STEPS_BYTES = (20 * 2**20, 64 * 2**20)
_MAX_TOKENS = 2_000_000
_MAX_NAME_BYTES = 4096
# The longest chat template known takes 30 kB.
_MAX_TEMPLATE_BYTES = 2**20
_BPE_MODELS = frozenset({"gpt2", "gemma4"})
# Pre-tokenizers that put BOS first unless the file says otherwise.
_PRES_ADDING_BOS = frozenset(
    {
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
        "tekken",
        "chameleon",
    }
)
_PRES_WITHOUT_BOS = frozenset({"chatglm-bpe", "glm4"})
_PHI3 = re.compile(r"phi-?3")
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)


class Malformed(Exception):
    """The bytes are not what the format allows; mapped once, by `refusals_of`."""


class CutShort(Malformed):
    """The bytes end inside the metadata."""


@dataclass(frozen=True, slots=True)
class _Field:
    """The place of a value: `start` to `end`, `count` elements of `kind` if it is an array."""

    kind: int
    is_array: bool
    count: int
    start: int
    end: int


class Fields:
    """The metadata of one file: walked over once, values are made when they are asked for.

    Args:
        data: the file from its beginning, at least as far as the metadata reaches.

    Raises:
        CutShort: the metadata goes on after `data`.
        Malformed: anything else that the format does not allow.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._elements = 0
        self._fields: dict[str, _Field] = {}
        if data[:4] != b"GGUF"[: len(data)] or not data:
            raise Malformed("this is no GGUF file")
        version = self._u32(4)
        if version & 0xFFFF == 0:
            raise Malformed("this GGUF file is big endian, which LM Studio's machines are not")
        if version not in (2, 3):
            raise Malformed(f"GGUF version {version} is not supported, only 2 and 3 are")
        count = self._u64(16)
        if count > _MAX_FIELDS:
            raise Malformed(f"it claims {count} metadata fields, more than {_MAX_FIELDS}")
        at = 24
        for _ in range(count):
            key, at = self._key(at)
            field = self._field(at + 4, self._u32(at))
            if key in self._fields:
                raise Malformed("a metadata key occurs twice")
            self._fields[key] = field
            at = field.end

    def text(self, key: str, *, max_bytes: int) -> str | None:
        """A string; None when there is none of that name. Bytes that are not UTF-8 become replacement characters."""
        field = self._fields.get(key)
        if field is None or field.is_array or field.kind != _STRING:
            return None
        if field.end - field.start - 8 > max_bytes:
            raise Malformed(f"{key} is longer than {max_bytes} bytes")
        return self._data[field.start + 8 : field.end].decode("utf-8", "replace")

    def integer(self, key: str) -> int | None:
        """An integer of any width; None when there is none of that name."""
        field = self._fields.get(key)
        if field is None or field.is_array or field.kind not in _INTEGERS:
            return None
        (value,) = struct.unpack_from(f"<{_SCALARS[field.kind]}", self._data, field.start)
        return int(value)

    def flag(self, key: str) -> bool | None:
        """A bool; None when there is none of that name."""
        field = self._fields.get(key)
        if field is None or field.is_array or _SCALARS.get(field.kind) != "?":
            return None
        return self._data[field.start] != 0

    def texts(self, key: str, *, max_count: int) -> tuple[str, ...] | None:
        """An array of strings; None when there is none of that name."""
        field = self._array(key, frozenset({_STRING}), max_count)
        return self._strings(key, field) if field is not None else None

    def integers(self, key: str, *, max_count: int) -> tuple[int, ...] | None:
        """An array of integers; None when there is none of that name."""
        field = self._array(key, _INTEGERS, max_count)
        return self._numbers(field) if field is not None else None

    def floats(self, key: str, *, max_count: int) -> tuple[float, ...] | None:
        """An array of numbers; None when there is none of that name."""
        field = self._array(key, _FLOATS | _INTEGERS, max_count)
        return tuple(map(float, self._numbers(field))) if field is not None else None

    def has_any(self, beginning: str) -> bool:
        """Returns True if there is a field whose name begins so."""
        return any(key.startswith(beginning) for key in self._fields)

    def _array(self, key: str, kinds: frozenset[int], max_count: int) -> _Field | None:
        field = self._fields.get(key)
        if field is None:
            return None
        if not field.is_array or field.kind not in kinds:
            raise Malformed(f"{key} has another type than it should")
        if field.count > max_count:
            raise Malformed(f"{key} has {field.count} elements, more than {max_count}")
        return field

    def _numbers(self, field: _Field) -> tuple[int, ...]:
        return struct.unpack_from(f"<{field.count}{_SCALARS[field.kind]}", self._data, field.start)

    def _strings(self, key: str, field: _Field) -> tuple[str, ...]:
        # The walk has shown that every element lies inside the data.
        data, at, length_at = self._data, field.start, _U64.unpack_from
        texts: list[str] = []
        while len(texts) < field.count:
            parts: list[bytes] = []
            for _ in range(min(_DECODED_TOGETHER, field.count - len(texts))):
                start = at + 8
                at = start + length_at(data, at)[0]
                parts.append(data[start:at])
            if max(map(len, parts)) > _MAX_ITEM_BYTES:
                raise Malformed(f"{key} has an element of more than {_MAX_ITEM_BYTES} bytes")
            # Decoding many at once is four times as fast as one by one.
            decoded = b"\0".join(parts).decode("utf-8", "replace").split("\0")
            if len(decoded) != len(parts):
                decoded = [part.decode("utf-8", "replace") for part in parts]
            texts += decoded
        return tuple(texts)

    def _key(self, at: int) -> tuple[str, int]:
        length = self._u64(at)
        if length > _MAX_KEY_BYTES:
            raise Malformed(f"a metadata key claims {length} bytes, more than {_MAX_KEY_BYTES}")
        end = self._inside(at + 8 + length)
        return self._data[at + 8 : end].decode("utf-8", "replace"), end

    def _field(self, at: int, kind: int) -> _Field:
        if kind == _ARRAY:
            element, count = self._u32(at), self._u64(at + 4)
            return _Field(element, True, count, at + 12, self._array_end(at + 12, element, count, nesting=1))
        if kind == _STRING:
            return _Field(kind, False, 1, at, self._inside(at + 8 + self._u64(at)))
        if kind not in _SIZES:
            raise Malformed(f"a metadata field has the unknown type {kind}")
        return _Field(kind, False, 1, at, self._inside(at + _SIZES[kind]))

    def _array_end(self, at: int, kind: int, count: int, *, nesting: int) -> int:
        if kind in _SIZES:
            return self._inside(at + count * _SIZES[kind])
        if kind not in (_STRING, _ARRAY):
            raise Malformed(f"a metadata array has the unknown element type {kind}")
        self._elements += count if kind == _STRING else count * _ARRAY_COST
        if self._elements > _MAX_ELEMENTS:
            raise Malformed(f"its arrays claim more than {_MAX_ELEMENTS} elements")
        if kind == _STRING:
            return self._strings_end(at, count)
        if nesting == _MAX_DEPTH:
            raise Malformed(f"its arrays are nested more than {_MAX_DEPTH} deep")
        for _ in range(count):
            element, inner = self._u32(at), self._u64(at + 4)
            at = self._array_end(at + 12, element, inner, nesting=nesting + 1)
        return at

    def _strings_end(self, at: int, count: int) -> int:
        data, length_at, last = self._data, _U64.unpack_from, len(self._data) - 8
        for _ in range(count):
            if at > last:
                raise CutShort("the metadata is cut short")
            at += 8 + length_at(data, at)[0]
        return self._inside(at)

    def _u32(self, at: int) -> int:
        self._inside(at + 4)
        return int(_U32.unpack_from(self._data, at)[0])

    def _u64(self, at: int) -> int:
        self._inside(at + 8)
        return int(_U64.unpack_from(self._data, at)[0])

    def _inside(self, end: int) -> int:
        if end > len(self._data):
            raise CutShort("the metadata is cut short")
        return end


_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The part of a .gguf file's header that concerns counting.

    Attributes:
        chat_template: the default one, even if there are named ones; "" if none.
        tool_chat_template: the template named "tool_use", which llama.cpp takes for requests with tools; "" if none.
        rereads: layers with a sliding window or a running state, which cannot go back to an earlier place: a prompt of
            which anything changed is read again from its beginning (llama.cpp, docs of `--swa-full`; issue 13194).
    """

    vocabulary: VocabularyData
    chat_template: str
    tool_chat_template: str
    rereads: bool = False


def read_gguf(path: Path) -> GgufHeader:
    """The header of a file; of its first part, if the path names another part of a split model.

    Reads at most 64 MiB. Not mapped into memory: a mapped file that shrinks ends the process with SIGBUS.

    Raises:
        UnusableModelFile: it cannot be read, is cut short or malformed, or its vocabulary is of another kind than
            bpe and spm.
    """
    path = first_part(path)
    with refusals_of(path):
        return _header(_fields(path))


@contextmanager
def refusals_of(path: Path) -> Iterator[None]:
    """Raises anything that is wrong with a file as `UnusableModelFile`."""
    try:
        yield
    except Malformed as exc:
        raise UnusableModelFile(str(path), str(exc)) from exc
    except (OSError, ValueError) as exc:
        # ValueError: a path with a null character.
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "it has an impossible path"
        raise UnusableModelFile(
            str(path), f"it cannot be read: {reason}", advice="Check the path and the permissions of the proxy's user."
        ) from exc


def opened(path: Path) -> BinaryIO:
    """An ordinary file: opening a pipe would wait for a writer.

    Raises:
        Malformed: it is none.
        OSError, ValueError: it cannot be opened.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise Malformed("this is no file")
    return path.open("rb")


def first_part(path: Path) -> Path:
    """The part of a split model that holds the metadata (gguf-split of llama.cpp), else the path itself."""
    return path.with_name(_PART.sub(r"-00001-of-\2", path.name)) if _PART.search(path.name) else path


def _fields(path: Path) -> Fields:
    with opened(path) as file:
        data = b""
        for limit_bytes in _READ_STEPS_BYTES:
            data += file.read(limit_bytes - len(data))
            try:
                return Fields(data)
            except CutShort:
                if len(data) < limit_bytes:
                    raise
    raise Malformed(f"its metadata takes more than {_READ_STEPS_BYTES[-1]} bytes")


def _header(fields: Fields) -> GgufHeader:
    architecture = fields.text("general.architecture", max_bytes=_MAX_NAME_BYTES) or ""
    model = fields.text("tokenizer.ggml.model", max_bytes=_MAX_NAME_BYTES)
    if model is None:
        raise Malformed("it has no vocabulary")
    kind: Literal["bpe", "spm"]
    if model == "llama":
        kind = "spm"
    elif model in _BPE_MODELS:
        kind = "bpe"
    else:
        raise Malformed(f"its vocabulary is of the kind {model[:40]!r}, which cannot be counted with")
    return GgufHeader(
        vocabulary=_vocabulary(fields, kind, model),
        chat_template=fields.text("tokenizer.chat_template", max_bytes=_MAX_TEMPLATE_BYTES) or "",
        tool_chat_template=fields.text("tokenizer.chat_template.tool_use", max_bytes=_MAX_TEMPLATE_BYTES) or "",
        rereads=bool(fields.integer(f"{architecture}.attention.sliding_window"))
        or fields.has_any(f"{architecture}.ssm."),
    )


def _vocabulary(fields: Fields, kind: Literal["bpe", "spm"], model: str) -> VocabularyData:
    pre = "" if kind == "spm" else fields.text("tokenizer.ggml.pre", max_bytes=_MAX_NAME_BYTES) or "default"
    if model == "gemma4":
        pre = "gemma4"
    tokens = fields.texts("tokenizer.ggml.tokens", max_count=_MAX_TOKENS)
    if not tokens:
        raise Malformed("its vocabulary has no tokens")
    if "" in tokens:
        tokens = tuple(token or f"[EMPTY_{index}]" for index, token in enumerate(tokens))
    size = len(tokens)
    scores: tuple[float, ...] = ()
    if kind == "spm":
        scores = _per_token(fields.floats("tokenizer.ggml.scores", max_count=_MAX_TOKENS), size) or (0.0,) * size
    merges = fields.texts("tokenizer.ggml.merges", max_count=_MAX_TOKENS) if kind == "bpe" else None
    default_bos, default_eos = _default_ids(kind, model, pre)
    space_prefix = fields.flag("tokenizer.ggml.add_space_prefix")
    name = fields.text("general.name", max_bytes=_MAX_NAME_BYTES) or ""
    return VocabularyData(
        kind=kind,
        pre=pre,
        tokens=tokens,
        scores=scores,
        token_types=_per_token(fields.integers("tokenizer.ggml.token_type", max_count=_MAX_TOKENS), size),
        merges=merges or (),
        bos_id=_token_id(fields.integer("tokenizer.ggml.bos_token_id"), default_bos, size),
        eos_id=_token_id(fields.integer("tokenizer.ggml.eos_token_id"), default_eos, size),
        adds_bos=_adds_bos(fields.flag("tokenizer.ggml.add_bos_token"), kind, pre),
        adds_space_prefix=space_prefix if space_prefix is not None else kind == "spm",
        # llama.cpp decides by the model's name alone: not for a "Phi 3.5 Mini Instruct", as converters write it.
        strips_after_special=_PHI3.search(name.casefold()) is not None,
    )


def _per_token(values: tuple[_Number, ...] | None, size: int) -> tuple[_Number, ...]:
    if values is None:
        return ()
    if len(values) < size:
        raise Malformed(f"its vocabulary has {size} tokens, but scores or types of only {len(values)}")
    return values[:size]


def _default_ids(kind: Literal["bpe", "spm"], model: str, pre: str) -> tuple[int | None, int | None]:
    if kind == "spm":
        return 1, 2
    if model == "gemma4":
        return None, None
    return (None if pre in _PRES_WITHOUT_BOS else 11), 11


def _token_id(given: int | None, default: int | None, size: int) -> int | None:
    """An id outside the vocabulary counts as not given, as in llama.cpp."""
    for candidate in (given, default):
        if candidate is not None and 0 <= candidate < size:
            return candidate
    return None


def _adds_bos(given: bool | None, kind: Literal["bpe", "spm"], pre: str) -> bool:
    if pre == "gemma4":
        # Files say no by mistake (llama.cpp pull request 21500).
        return True
    return given if given is not None else kind == "spm" or pre in _PRES_ADDING_BOS
