"""Vocabulary packs of this package written as the files that models carry."""

from __future__ import annotations

from pathlib import Path

from litellm_compaction.templates import template as templates
from litellm_compaction.tokenizers.registry import read_pack
from tests.tokenizers.gguf_writer import Array, Value, gguf


def template_source(name: str) -> str:
    """One of the package's chat templates."""
    return templates.template(name).source


def write_pack_gguf(path: Path, pack: str, template: str = "", **more: Value) -> Path:
    """A .gguf with a pack's vocabulary; templates are given by their names in this package."""
    data = read_pack(pack)
    fields: dict[str, Value] = {
        "general.architecture": "anything",
        "tokenizer.ggml.model": {"spm": "llama"}.get(data.kind, "gemma4" if data.pre == "gemma4" else "gpt2"),
        "tokenizer.ggml.tokens": Array("str", data.tokens),
        "tokenizer.ggml.token_type": Array("i32", data.token_types),
        "tokenizer.ggml.add_bos_token": ("bool", data.adds_bos),
    }
    if data.kind == "spm":
        fields["tokenizer.ggml.scores"] = Array("f32", data.scores)
    else:
        fields["tokenizer.ggml.pre"] = data.pre
        if data.merges:
            # Most packs leave them out, since they follow from the order of the tokens.
            fields["tokenizer.ggml.merges"] = Array("str", data.merges)
    for name, index in (("bos", data.bos_id), ("eos", data.eos_id)):
        if index is not None:
            fields[f"tokenizer.ggml.{name}_token_id"] = ("u32", index)
    if template:
        fields["tokenizer.chat_template"] = template_source(template)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf(fields | more))
    return path
