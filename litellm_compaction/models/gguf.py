"""The vocabulary and chat template that a .gguf file carries in its header.

Called where a counter looks for a model's own vocabulary, off the event loop: 0.1 s for 150,000 tokens.
Keys: docs/gguf.md of the ggml repository. What a missing key means: llama.cpp, src/llama-vocab.cpp,
`llama_vocab::impl::load`, as vendored in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import hashlib
import re
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from litellm_compaction.errors import UnusableModelFile
from litellm_compaction.models.gguf_fields import CutShort, Fields, Malformed
from litellm_compaction.models.vocabulary_data import VocabularyData

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
_Number = TypeVar("_Number", int, float)
_PHI3 = re.compile(r"phi-?3")
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What the header of a .gguf file says about counting.

    Attributes:
        architecture: llama.cpp's name, such as "qwen3"; "" when the file has none.
        name: of the model; "" when the file has none.
        context_length: tokens that the model was trained for, never a budget; None when the file does not say.
        vocabulary: with the default chat template, also where there are named ones.
        tool_chat_template: the template named "tool_use", which llama.cpp takes for requests with tools; "" if none.
        adds_space_prefix: a text gets a space in front (most of spm, but not Gemma); `vocabulary` says so too.
    """

    architecture: str
    name: str
    context_length: int | None
    vocabulary: VocabularyData
    tool_chat_template: str
    adds_space_prefix: bool


def read_gguf(path: Path) -> GgufHeader:
    """The header of a file; of its first part, if the path names another part of a split model.

    Reads at most 64 MiB. Not mapped into memory: a mapped file that shrinks ends the process with SIGBUS.

    Raises:
        UnusableModelFile: it cannot be read, is cut short or malformed, or its vocabulary is of another kind than
            bpe and spm.
    """
    path = first_part(path)
    try:
        return _header(_fields(path))
    except Malformed as exc:
        raise UnusableModelFile(str(path), str(exc)) from exc
    except (OSError, ValueError) as exc:
        # ValueError: a path with a null character.
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "it has an impossible path"
        raise UnusableModelFile(
            str(path), f"it cannot be read: {reason}", advice="Check the path and the permissions of the proxy's user."
        ) from exc


def first_part(path: Path) -> Path:
    """The part of a split model that holds the metadata (gguf-split of llama.cpp), else the path itself."""
    return path.with_name(_PART.sub(r"-00001-of-\2", path.name)) if _PART.search(path.name) else path


def _fields(path: Path) -> Fields:
    # Opening a pipe would wait for a writer.
    if not stat.S_ISREG(path.stat().st_mode):
        raise Malformed("this is no file")
    with path.open("rb") as file:
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
    context_length = fields.integer(f"{architecture}.context_length")
    space_prefix = fields.flag("tokenizer.ggml.add_space_prefix")
    adds_space_prefix = space_prefix if space_prefix is not None else kind == "spm"
    name = fields.text("general.name", max_bytes=_MAX_NAME_BYTES) or ""
    return GgufHeader(
        architecture=architecture,
        name=name,
        context_length=context_length if context_length is not None and context_length > 0 else None,
        vocabulary=replace(
            _vocabulary(fields, kind, model),
            adds_space_prefix=adds_space_prefix,
            # llama.cpp decides by the model's name alone: not for a "Phi 3.5 Mini Instruct", as converters write it.
            strips_after_special=_PHI3.search(name.casefold()) is not None,
        ),
        tool_chat_template=fields.text("tokenizer.chat_template.tool_use", max_bytes=_MAX_TEMPLATE_BYTES) or "",
        adds_space_prefix=adds_space_prefix,
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
        chat_template=fields.text("tokenizer.chat_template", max_bytes=_MAX_TEMPLATE_BYTES) or "",
        fingerprint=_fingerprint(fields),
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


def _fingerprint(fields: Fields) -> str:
    """The same for all quantizations of a model, since only what decides a count goes in."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (
        *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.scores", "ggml.token_type", "ggml.merges"),
        *("ggml.bos_token_id", "ggml.eos_token_id", "ggml.add_bos_token", "ggml.add_space_prefix"),
        *("chat_template", "chat_template.tool_use"),
    ):
        raw = fields.raw(f"tokenizer.{name}")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    title = fields.text("general.name", max_bytes=_MAX_NAME_BYTES) or ""
    digest.update(b"phi3" if _PHI3.search(title.casefold()) else b"")
    return digest.hexdigest()
