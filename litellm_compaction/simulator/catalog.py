"""Lists a simulated server's models, and finds the instance that a request's `model` means.

The listings are those of LM Studio's API. Of a new prompt the beginning that a slot's last one shares is in its cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from litellm_compaction.simulator.messages import JsonObject
from litellm_compaction.simulator.rendering import Segment

ModelType = Literal["llm", "vlm", "embeddings"]

# A slot that shares less of a prompt is not taken for it.
_MINIMUM_SIMILARITY_RATIO = 0.1


@dataclass(frozen=True)
class Model:
    """A downloaded model, loaded as LM Studio does by itself: 4 slots over one context, 4,096 tokens."""

    key: str
    _: KW_ONLY
    publisher: str = "lmstudio-community"
    architecture: str = "qwen3"
    max_context_length: int = 131_072
    default_context_length: int = 4096
    format: Literal["gguf", "mlx"] = "gguf"
    quantization: str = "Q4_K_M"
    parallel: int = 4
    type: ModelType = "llm"
    tool_use: bool = True
    reasoning: bool = False
    size_bytes: int = 5_027_783_488
    params_string: str = "8B"

    @property
    def variant(self) -> str:
        """The name with its quantization."""
        return f"{self.key.partition('@')[0]}@{self.quantization.lower()}"


@dataclass(eq=False, kw_only=True)
class Instance:
    """A loaded model, and the prompts that its slots hold, the newest last."""

    id: str
    model: Model
    context_length: int
    parallel: int
    last_used_s: float = field(default_factory=time.monotonic)
    held: list[tuple[Segment, ...]] = field(default_factory=list)

    def take(self, segments: tuple[Segment, ...], prompt_tokens: int) -> int:
        """Returns the number of a prompt's tokens (unscaled) that the most similar slot holds already."""
        shared = [(common_prefix_tokens(each, segments), each) for each in self.held]
        cached_tokens, slot = max(shared, key=lambda item: item[0], default=(0, ()))
        if cached_tokens < _MINIMUM_SIMILARITY_RATIO * prompt_tokens:
            cached_tokens, slot = 0, self.held[0] if len(self.held) == self.parallel else ()
        self.held = [each for each in self.held if each is not slot]
        return cached_tokens

    def give_back(self, segments: tuple[Segment, ...]) -> None:
        """The slot holds prompt and answer from now on."""
        self.held = [*self.held, segments][-self.parallel :]


def find_target(name: str, instances: Iterable[Instance], models: Iterable[Model]) -> Instance | Model | None:
    """The instance that `name` addresses, else the download; None if there is neither."""
    loaded = next((instance for instance in instances if name in (instance.id, instance.model.key)), None)
    return loaded or find_model(name, models)


def find_model(name: str, models: Iterable[Model]) -> Model | None:
    return next((model for model in models if name in (model.key, model.variant)), None)


def free_instance_id(key: str, instances: Iterable[Instance]) -> str:
    """The id of the next instance of `key`: the key, then `key:2`, `key:3` (bt#1582)."""
    taken = {instance.id for instance in instances}
    number = 1
    while (instance_id := key if number == 1 else f"{key}:{number}") in taken:
        number += 1
    return instance_id


def openai_models(models: Sequence[Model], instances: Sequence[Instance]) -> JsonObject:
    """`GET /v1/models`: every download, and no window of any kind (bt#2139)."""
    ids = dict.fromkeys([*(model.key for model in models), *(instance.id for instance in instances)])
    return {
        "object": "list",
        "data": [{"id": model_id, "object": "model", "owned_by": "organization_owner"} for model_id in ids],
    }


def v1_models(models: Sequence[Model], instances: Sequence[Instance]) -> JsonObject:
    """`GET /api/v1/models`: one entry per model with its instances inside."""
    return {"models": [_v1_model(model, instances) for model in models]}


def load_config(instance: Instance) -> JsonObject:
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
    return entry | {
        "architecture": model.architecture,
        "capabilities": capabilities,
        "description": None,
        "variants": [model.variant],
        "selected_variant": model.variant,
    }


def common_prefix_tokens(first: Sequence[Segment], second: Sequence[Segment]) -> int:
    """The number of leading tokens that two sequences share; only the first difference is looked at by token."""
    shared = 0
    index = 0
    limit = min(len(first), len(second))
    while index < limit and first[index] == second[index]:
        shared += first[index].count_tokens()
        index += 1
    if index < limit and not (first[index].is_image or second[index].is_image):
        for left, right in zip(first[index].tokens(), second[index].tokens(), strict=False):
            if left != right:
                break
            shared += 1
    return shared
