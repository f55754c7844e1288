"""Models without weights that carry real vocabularies and chat templates, for a real llama.cpp to serve.

Called by whatever compares our counts with the engine's own. One layer of zeros: an answer is noise, and the number of
prompt tokens is exactly that of the real model.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.gguf_writer import Array, Tensor, Value, gguf
from litellm_compaction.templates import template
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.registry import _published, _read_pack
from tools.build_packs import ENDS, PATTERNS, in_byte_alphabet

_NORMAL, _UNUSED, _BYTE = 1, 5, 6
# The smallest that llama.cpp's quantizations allow.
_WIDTH = 32


class Known(NamedTuple):
    """A model as LM Studio lists it.

    Attributes:
        architecture: as LM Studio tells it.
        model: its id.
        title: `general.name` in its file, where llama.cpp decides by it.
    """

    architecture: str
    model: str
    title: str = ""

    @property
    def family(self) -> Family:
        """What we count it as."""
        return family_of(self.architecture, self.model)


# Every family whose template is rendered, by the name under which the tables list it.
MODELS = {
    "llama3": Known("llama", "meta-llama-3-8b-instruct"),
    "llama3.1": Known("llama", "meta-llama-3.1-8b-instruct"),
    "llama3.2": Known("llama", "llama-3.2-3b-instruct"),
    "llama3.3": Known("llama", "llama-3.3-70b-instruct"),
    "llama2": Known("llama", "llama-2-7b-chat"),
    "mistral-v1": Known("llama", "mistral-7b-instruct-v0.2"),
    "mistral-v3": Known("llama", "mistral-7b-instruct-v0.3"),
    "mistral-v7": Known("llama", "mistral-large-instruct-2411"),
    "mixtral": Known("llama", "mixtral-8x7b-instruct-v0.1"),
    "mixtral-8x22b": Known("llama", "mixtral-8x22b-instruct-v0.1"),
    "mistral-nemo": Known("llama", "mistral-nemo-instruct-2407"),
    "mistral-small": Known("mistral3", "mistral-small-3.2-24b-instruct-2506"),
    "ministral3": Known("mistral3", "ministral-3-14b-reasoning-2512"),
    "devstral": Known("llama", "devstral-small-2507"),
    "gpt-oss": Known("gpt-oss", "openai/gpt-oss-20b"),
    "qwen2.5": Known("qwen2", "qwen2.5-7b-instruct"),
    "qwen3": Known("qwen3", "qwen3-8b"),
    "qwen3-coder": Known("qwen3moe", "qwen3-coder-30b-a3b-instruct"),
    "qwq": Known("qwen2", "qwq-32b"),
    "gemma2": Known("gemma2", "gemma-2-9b-it"),
    "gemma4": Known("gemma4", "gemma-4-31b-it"),
    "deepseek-v3.1": Known("deepseek2", "deepseek-v3.1"),
    "deepseek-r1": Known("deepseek2", "deepseek-r1-0528"),
    "r1-distill-llama": Known("llama", "deepseek-r1-distill-llama-8b"),
    "r1-distill-qwen": Known("qwen2", "deepseek-r1-distill-qwen-7b"),
    "phi3.5": Known("phi3", "phi-3.5-mini-instruct", "Phi 3.5 Mini Instruct"),
}


def write_model(path: Path, known: Known) -> Path:
    """A model file with the vocabulary and the template of a family: 1–20 MB, in 0.2–15 s; kept where it exists."""
    if path.exists():
        return path
    family = known.family
    data = _vocabulary(family.vocabulary)
    fields: dict[str, Value] = {
        "general.architecture": "llama",
        "general.name": known.title or known.model,
        "llama.block_count": ("u32", 1),
        "llama.context_length": ("u32", 131_072),
        "llama.embedding_length": ("u32", _WIDTH),
        "llama.feed_forward_length": ("u32", _WIDTH),
        "llama.attention.head_count": ("u32", 1),
        "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
        "tokenizer.ggml.tokens": Array("str", _without_doubles(data.tokens)),
        "tokenizer.ggml.token_type": Array("i32", data.token_types),
        "tokenizer.ggml.add_bos_token": ("bool", data.adds_bos),
        "tokenizer.chat_template": template(family.template).source,
    }
    if data.scores:
        fields["tokenizer.ggml.model"] = "llama"
        fields["tokenizer.ggml.scores"] = Array("f32", data.scores)
    else:
        fields["tokenizer.ggml.model"] = "gemma4" if data.pre == "gemma4" else "gpt2"
        fields["tokenizer.ggml.pre"] = data.pre
        fields["tokenizer.ggml.merges"] = Array("str", data.merges or _merges(family.vocabulary))
    for name, token in (("bos", data.bos), ("eos", data.eos)):
        if token:
            fields[f"tokenizer.ggml.{name}_token_id"] = ("u32", data.tokens.index(token))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(gguf(fields, zeros=_tensors(len(data.tokens))))
    return part.rename(path)


def _without_doubles(tokens: Sequence[str]) -> list[str]:
    """The tokens, a second one of the same name under another: llama.cpp takes each name once."""
    first = {token: index for index, token in reversed(list(enumerate(tokens)))}
    return [token if first[token] == index else f"<unused_{index}>" for index, token in enumerate(tokens)]


@lru_cache(maxsize=4)
def _merges(name: str) -> Sequence[str]:
    """The merges that make the tokens of a tiktoken vocabulary: the parts that are left before a token's own merge."""
    data = _vocabulary(name)
    ranks = {token: rank for rank, token in enumerate(data.tokens) if data.token_types[rank] == _NORMAL}
    found = []
    for token, rank in ranks.items():
        if len(token) > 1:
            parts = _parts(token, ranks, rank)
            if len(parts) == 2:
                found.append(" ".join(parts))
    return found


def _parts(token: str, ranks: dict[str, int], below: int) -> Sequence[str]:
    parts = list(token)
    while len(parts) > 2:
        pairs = [ranks.get(left + right, below) for left, right in pairwise(parts)]
        best = min(pairs)
        if best >= below:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


class _Vocabulary(NamedTuple):
    """A pack in llama.cpp's terms; tokens and token_types by id, scores of SentencePiece's alone."""

    pre: str
    tokens: list[str]
    token_types: list[int]
    scores: list[float]
    merges: list[str]
    bos: str
    eos: str
    adds_bos: bool


@lru_cache(maxsize=4)
def _vocabulary(name: str) -> _Vocabulary:
    head, body = _read_pack(name)
    special: dict[str, list[int]] = head["special"]
    by_id = {index: (token, kind) for token, (index, kind) in special.items()}
    scores: dict[str, float] = {}
    merges: list[str] = []
    if head["pattern"]:
        # What ends an answer is an ordinary token in some vocabularies.
        normal = [token for token in _by_rank(head, body) if not (token in ENDS and token in special)]
        free = (index for index in count() if index not in by_id)
        by_id |= {next(free): (token, _NORMAL) for token in normal}
    else:
        model = json.loads(body)["model"]
        made = [left + right for left, right in model["merges"]]
        scores = {token: -float(rank) for rank, token in reversed(list(enumerate(made)))}
        merges = [f"{left} {right}" for left, right in model["merges"]]
        for token, index in model["vocab"].items():
            by_id.setdefault(index, (token, _BYTE if re.fullmatch("<0x[0-9A-F]{2}>", token) else _NORMAL))
    rows = [by_id.get(index, (f"<unused_{index}>", _UNUSED)) for index in range(max(by_id) + 1)]
    pre = next((pre for pre, pattern in PATTERNS.items() if pattern == head["pattern"]), "")
    return _Vocabulary(
        pre=pre or ("" if head.get("prefixes_space") else "gemma4"),
        tokens=[token for token, _ in rows],
        token_types=[kind for _, kind in rows],
        scores=[] if not head.get("prefixes_space") else [scores.get(token, 0.0) for token, _ in rows],
        merges=merges,
        bos=head.get("bos", ""),
        eos=head.get("eos", ""),
        adds_bos=head.get("adds_bos", False),
    )


def _by_rank(head: dict[str, Any], body: bytes) -> list[str]:
    """The ordinary tokens of a byte-level vocabulary."""
    whole, body = _read_pack(head["like"]) if "like" in head else (head, body)
    if "file" in whole:
        lines = filter(None, _published(whole["file"]).splitlines())
        return [in_byte_alphabet(base64.b64decode(line.split()[0])) for line in lines]
    tokens = json.loads(body)
    return [in_byte_alphabet(token.encode("latin-1")) for token in tokens]


def _tensors(tokens: int) -> dict[str, Tensor]:
    square = Tensor((_WIDTH, _WIDTH))
    return {
        "token_embd.weight": Tensor((_WIDTH, tokens), "q4_0"),
        "output_norm.weight": Tensor((_WIDTH,)),
        "blk.0.attn_norm.weight": Tensor((_WIDTH,)),
        **{f"blk.0.attn_{name}.weight": square for name in ("q", "k", "v", "output")},
        "blk.0.ffn_norm.weight": Tensor((_WIDTH,)),
        **{f"blk.0.ffn_{name}.weight": square for name in ("gate", "up", "down")},
    }
