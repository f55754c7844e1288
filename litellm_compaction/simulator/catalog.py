"""Which models exist, which are loaded, and which instance a request's `model` means.

`Model` is a download, `Instance` a load of it with its own window. Addressing follows LM Studio: exact
instance id, then key, then variants, then without quantization, then without publisher, then ignoring case; a
key means its first (canonical) instance even where a larger one exists (openclaw#141357).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from .flights import Flight, SlotQueue
from .kv_cache import KvCache
from .template_rules import TemplateRule

ModelType = Literal["llm", "vlm", "embeddings"]


@dataclass(frozen=True)
class Model:
    """A downloaded model, loaded as LM Studio does by itself: 4 slots over one context, 4,096 tokens by JIT.

    `tokens_factor` scales true token counts (1.2: this tokenizer gives 20 % more than o200k_base).
    `fitted_context_length` is what AutoFit loads whatever was asked for (bt#2318); None loads as asked.
    `strict_template` None means the simulator's. `default_context_length` is what JIT loading uses.
    """

    key: str
    _: KW_ONLY
    publisher: str = "lmstudio-community"
    architecture: str = "qwen3"
    max_context_length: int = 131_072
    default_context_length: int = 4096
    fitted_context_length: int | None = None
    format: Literal["gguf", "mlx"] = "gguf"
    quantization: str = "Q4_K_M"
    parallel: int = 4
    tokens_factor: float = 1.0
    type: ModelType = "llm"
    variants: tuple[str, ...] = ()
    tool_use: bool = True
    reasoning: bool = False
    size_bytes: int = 5_027_783_488
    params_string: str = "8B"
    strict_template: TemplateRule | None = None

    def __post_init__(self) -> None:
        if self.parallel < 1 or self.max_context_length < 1 or self.tokens_factor <= 0:
            raise ValueError("parallel and max_context_length must be at least 1, tokens_factor above 0")

    def all_variants(self) -> tuple[str, ...]:
        """The names with quantization; by default the one that is downloaded."""
        return self.variants or (f"{self.key.partition('@')[0]}@{self.quantization.lower()}",)


@dataclass(eq=False, kw_only=True)
class Instance:
    """A loaded model; `ttl_s` None stays until it is unloaded. `flights` are the requests being generated."""

    id: str
    model: Model
    context_length: int
    parallel: int
    is_jit: bool = False
    ttl_s: float | None = None
    last_used_s: float = field(default_factory=time.monotonic)
    flights: list[Flight] = field(default_factory=list)
    queue: SlotQueue = field(init=False)
    cache: KvCache = field(init=False)

    def __post_init__(self) -> None:
        self.queue = SlotQueue(self.parallel)
        self.cache = KvCache(self.parallel)

    def pool_tokens(self) -> int:
        """Prompt and generated tokens of all in flight; one that shifts its context never holds more than that."""
        return sum(min(flight.used_tokens, self.context_length) for flight in self.flights)

    def fail_all(self, message: str, outcome: Literal["error", "pool_overflow"]) -> None:
        """Make every request in flight fail with `message`."""
        for flight in list(self.flights):
            flight.fail(message, outcome)

    def has_expired(self, now_s: float) -> bool:
        """Whether the idle time to live has passed with nothing in flight."""
        return self.ttl_s is not None and not self.flights and now_s - self.last_used_s > self.ttl_s


def find_target(name: str, instances: Iterable[Instance], models: Iterable[Model]) -> Instance | Model | None:
    """The instance that `name` addresses, or the download to load for it; None when it addresses nothing.

    Both are tried by each rule before the next, so that an exact download goes before a loose instance.
    """
    loaded, downloaded = list(instances), list(models)
    for match in _MATCHES:
        for instance in loaded:
            if match(name, instance.model, instance.id):
                return instance
        for model in downloaded:
            if match(name, model, model.key):
                return model
    return None


def find_model(name: str, models: Iterable[Model]) -> Model | None:
    """The download that `name` addresses, or None."""
    target = find_target(name, (), models)
    return target if isinstance(target, Model) else None


def free_instance_id(key: str, instances: Iterable[Instance]) -> str:
    """The id of the next instance of `key`: the key, then `key:2`, `key:3` (bt#1582)."""
    taken = {instance.id for instance in instances}
    number = 1
    while (instance_id := key if number == 1 else f"{key}:{number}") in taken:
        number += 1
    return instance_id


def _without_quantization(name: str) -> str:
    return name.partition("@")[0]


def _bare(name: str) -> str:
    return _without_quantization(name).rpartition("/")[2]


# Each rule is tried on all candidates before the next: (name asked for, model, its id).
_MATCHES: tuple[Callable[[str, Model, str], bool], ...] = (
    lambda name, model, own_id: name == own_id,
    lambda name, model, own_id: name == model.key,
    lambda name, model, own_id: name in model.all_variants(),
    lambda name, model, own_id: _without_quantization(name) == _without_quantization(model.key),
    lambda name, model, own_id: bool(_bare(name)) and _bare(name) == _bare(model.key),
    lambda name, model, own_id: name.lower() == own_id.lower(),
    lambda name, model, own_id: bool(_bare(name)) and _bare(name).lower() == _bare(model.key).lower(),
)
