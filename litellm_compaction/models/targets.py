"""What a deployment is for the layer of models, and which window a server's listing gives it.

Read by `window.py`, which knows how old a listing is and what to do without one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.models.listings import Reading
from litellm_compaction.models.lmstudio import match
from litellm_compaction.models.model_files import WantedModel
from litellm_compaction.models.served import PATHS, Api, Served, find_served

# LM Studio's API · the API of another server · what the operator wrote, or LiteLLM's model map · an overflow error.
Source: TypeAlias = Literal[
    "api/v1",
    "api/v0",
    "llama.cpp",
    "vllm",
    "ollama",
    "operator",
    "max_input_tokens",
    "model_map",
    "default",
    "learned",
]
# What is known of a kind of model, and not of the server behind this address.
GUESSES = ("model_map", "default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A deployment as this layer needs it.

    Attributes:
        key: stable identity of the deployment.
        model: as LM Studio knows it, without provider prefix.
        context_length: tokens that the operator wrote down; used only where the server does not say.
        context_source: where `context_length` comes from.
        apis: by which a server that is not LM Studio is asked for its window; empty leaves it in peace.
        asked_tokens: what each request tells the server to allocate (Ollama's `num_ctx`): its window is no larger.
        asker: who asks, as a fingerprint: what an overflow of theirs has taught holds for them first.
        tokenizer: what its operator wrote for this deployment; "" follows the global setting (`sources.py`).
    """

    key: str
    model: str
    api_base: str | None
    api_key: str | None = field(repr=False)
    context_length: int | None
    context_source: Source = "operator"
    is_lmstudio: bool = True
    apis: tuple[Api, ...] = ()
    asked_tokens: int | None = None
    tokenizer: str = ""
    asker: str = ""

    @property
    def is_listed(self) -> bool:
        """Whether there is a server to ask."""
        return self.api_base is not None and (self.is_lmstudio or bool(self.apis))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The context length to stay inside.

    Attributes:
        architecture: as LM Studio names it; "" when it was not asked.
        instance_id: the loaded copy that the number belongs to; the model's name when LM Studio was not asked.
        parallel: requests that share `tokens` at the same time.
        slots: requests that have `tokens` each at the same time, as llama.cpp's server says; older ones do not say
            whether they share a unified cache.
        read_s: clock value when the number was read; old where later reads failed.
        wanted: the model as its server lists it, which finds its file; None where it says nothing of that.
    """

    tokens: int
    source: Source
    architecture: str
    instance_id: str
    parallel: int
    read_s: float
    slots: int = 1
    wanted: WantedModel | None = None


class Known(NamedTuple):
    """What a listing says of one target; kept until the listing changes.

    `window` is None and `absence` says why, where the listing gives no number.
    """

    reading: Reading
    model: str
    window: Window | None
    absence: str
    not_loaded: bool


def apis_of(target: Target) -> tuple[Api, ...]:
    """What the target's server may speak besides LM Studio's own API."""
    return () if target.is_lmstudio else target.apis


def as_asked(target: Target, window: Window) -> Window:
    """The window, no larger than the requests themselves make it: another client may have loaded the model larger."""
    if target.asked_tokens is None or window.tokens <= target.asked_tokens:
        return window
    return replace(window, tokens=target.asked_tokens, source="operator")


def look_up(target: Target, reading: Reading) -> Known:
    """The target's window by a listing of its server."""
    listing = reading.listing
    if listing is None:
        return Known(reading, target.model, None, reading.failure, not_loaded=False)
    if isinstance(listing, Served):
        return _look_up_served(target, reading, listing)
    path = f"/api/{listing.api}/models"
    found = match(listing, target.model)
    if found is None:
        absence = f"{path} lists {len(listing.models)} models, none of them {target.model}"
        return Known(reading, target.model, None, absence, not_loaded=False)
    listed, instance = found
    if instance is None:
        return Known(reading, target.model, None, f"{path}: not loaded", not_loaded=True)
    if instance.context_length is None:
        absence = f"{path} lists {instance.id} as loaded, without a context length"
        return Known(reading, target.model, None, absence, not_loaded=False)
    window = Window(
        tokens=instance.context_length,
        source="api/v1" if listing.api == "v1" else "api/v0",
        architecture=listed.architecture,
        instance_id=instance.id,
        parallel=instance.parallel,
        read_s=reading.read_s,
        wanted=listed.wanted,
    )
    return Known(reading, target.model, window, "", not_loaded=False)


def _look_up_served(target: Target, reading: Reading, served: Served) -> Known:
    """The window as another server tells it.

    What is not loaded has none; Ollama loads it with the first request.
    """
    if served.api is None:
        absence = f"its server tells no context length ({', '.join(PATHS[api] for api in target.apis)})"
        return Known(reading, target.model, None, absence, not_loaded=False)
    found = find_served(served, target.model)
    if found is None or found.context_length is None:
        absence = f"{PATHS[served.api]} names no context length of {target.model}"
        is_loadable = found is None and served.api == "ollama"
        return Known(reading, target.model, None, absence, not_loaded=is_loadable)
    window = Window(
        tokens=found.context_length,
        source=served.api,
        architecture="",
        instance_id=target.model,
        parallel=found.slots if found.is_shared else 1,
        slots=found.slots,
        read_s=reading.read_s,
        wanted=WantedModel(key=target.model, path=found.path) if found.path else None,
    )
    return Known(reading, target.model, window, "", not_loaded=False)
