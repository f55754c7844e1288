"""What the model lists say, in the three generations of LM Studio's API.

Field names and differences (`embeddings` or `embedding`, `loaded_context_length` only when loaded, no window
at all in the OpenAI list) follow lmstudio.ai/docs/developer and the reports named in the functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from .catalog import Instance, Model
from .refusals import JsonObject


def openai_models(models: Sequence[Model], instances: Sequence[Instance], jit: bool) -> JsonObject:
    """`GET /v1/models`: no window of any kind (bt#2139); with JIT every download, else what is loaded."""
    ids = [model.key for model in models] if jit else []
    ids += [instance.id for instance in instances if instance.id not in ids]
    return {
        "object": "list",
        "data": [{"id": model_id, "object": "model", "owned_by": "organization_owner"} for model_id in ids],
    }


def llama_props(instance: Instance) -> JsonObject:
    """`GET /props` of llama.cpp's server: one slot's context, and how many slots (tools/server/README.md)."""
    return {
        "default_generation_settings": {"id": 0, "n_ctx": instance.context_length},
        "total_slots": instance.parallel,
        "chat_template": "",
    }


def llama_models(instances: Sequence[Instance], *, tells_whole: bool) -> JsonObject:
    """`GET /v1/models` of llama.cpp's server; newer builds name the context of all slots together in `meta`."""
    return {
        "object": "list",
        "data": [
            {"id": instance.id, "object": "model", "meta": {"n_ctx": instance.context_length} if tells_whole else None}
            for instance in instances
        ],
    }


def v0_models(models: Sequence[Model], instances: Sequence[Instance]) -> JsonObject:
    """`GET /api/v0/models`: one entry per instance, or one per model that is not loaded."""
    entries: list[JsonObject] = []
    for model in models:
        loaded = [instance for instance in instances if instance.model.key == model.key]
        entries += [v0_model(model, instance) for instance in loaded] or [v0_model(model, None)]
    return {"object": "list", "data": entries}


def v0_model(model: Model, instance: Instance | None) -> JsonObject:
    """One entry of it; `loaded_context_length` is there only for what is loaded (zed PR#25606)."""
    entry: JsonObject = {
        "id": instance.id if instance else model.key,
        "object": "model",
        "type": model.type,
        "publisher": model.publisher,
        "arch": model.architecture,
        "compatibility_type": model.format,
        "quantization": model.quantization,
        "state": "loaded" if instance else "not-loaded",
        "max_context_length": model.max_context_length,
    }
    if instance:
        entry["loaded_context_length"] = instance.context_length
    if model.tool_use and model.type != "embeddings":
        entry["capabilities"] = ["tool_use"]
    return entry


def v1_models(models: Sequence[Model], instances: Sequence[Instance]) -> JsonObject:
    """`GET /api/v1/models`: one entry per model with its instances inside."""
    return {"models": [_v1_model(model, instances) for model in models]}


def load_config(instance: Instance) -> JsonObject:
    """The configuration of an instance, as `config` in the list and `load_config` after a load."""
    if instance.model.type == "embeddings":
        return {"context_length": instance.context_length}
    return {
        "context_length": instance.context_length,
        "eval_batch_size": 512,
        "parallel": instance.parallel,
        "flash_attention": True,
        "offload_kv_cache_to_gpu": True,
    }


def _v1_model(model: Model, instances: Sequence[Instance]) -> JsonObject:
    is_embedding = model.type == "embeddings"
    entry: JsonObject = {
        "type": "embedding" if is_embedding else "llm",
        "publisher": model.publisher,
        "key": model.key,
        "display_name": model.key.rpartition("/")[2].replace("-", " ").title(),
        "quantization": {"name": model.quantization, "bits_per_weight": 4},
        "size_bytes": model.size_bytes,
        "params_string": model.params_string,
        "loaded_instances": [
            {"id": instance.id, "config": load_config(instance)}
            for instance in instances
            if instance.model.key == model.key
        ],
        "max_context_length": model.max_context_length,
        "format": model.format,
    }
    if is_embedding:
        return entry
    capabilities: JsonObject = {"vision": model.type == "vlm", "trained_for_tool_use": model.tool_use}
    if model.reasoning:
        capabilities["reasoning"] = {"allowed_options": ["off", "on"], "default": "on"}
    variants = list(model.all_variants())
    return entry | {
        "architecture": model.architecture,
        "capabilities": capabilities,
        "description": None,
        "variants": variants,
        "selected_variant": variants[0],
    }
