"""Loaded models as LM Studio's SDKs and llama.cpp's server list them, and what requests to one of them share.

That is its slots, a failure that hits all of them, and its KV cache.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from litellm_compaction.simulator import simulator as simulated
from litellm_compaction.simulator.messages import JsonObject
from litellm_compaction.simulator.rendering import Prompt


@dataclass(frozen=True)
class Model(simulated.Model):
    """A downloaded model, loaded as LM Studio does by itself: 4 slots over one context, 4,096 tokens by JIT.

    `tokens_factor` scales true token counts (1.2: 20 % more than o200k_base).
    """

    _: KW_ONLY
    tokens_factor: float = 1.0

    def count(self, prompt: Prompt) -> int:
        """Returns the tokens of a prompt, as `usage` says."""
        return math.ceil(prompt.count_tokens() * self.tokens_factor)


@dataclass(eq=False, kw_only=True)
class Instance(simulated.Instance):
    """A loaded model, of which SDKs hear that it stays for `ttl_s`. `flights` are the requests being generated.

    `chats_in_app` is how many conversations in LM Studio's own window wait for an answer of it.
    """

    model: Model
    is_jit: bool = False
    ttl_s: float | None = None
    flights: list[Flight] = field(default_factory=list)
    chats_in_app: int = 0
    reference: str = field(default_factory=lambda: uuid.uuid4().hex)
    # First come, first served; so many wait.
    queue: asyncio.Semaphore = field(init=False)
    waiting: int = 0

    def __post_init__(self) -> None:
        self.queue = asyncio.Semaphore(self.parallel)

    def pool_tokens(self) -> int:
        """Prompt and generated tokens of all in flight; one that shifts its context never holds more than that."""
        return sum(min(flight.used_tokens, self.context_length) for flight in self.flights)

    def fail_all(self, message: str, outcome: Literal["error", "pool_overflow"]) -> None:
        for flight in list(self.flights):
            flight.fail(message, outcome)


def llama_props(instance: Instance) -> JsonObject:
    """`GET /props` of llama.cpp's server: one slot's context, and the number of slots (tools/server/README.md)."""
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
    """One entry of it; `loaded_context_length` is there only for a loaded model (zed PR#25606)."""
    entry: JsonObject = {
        "id": instance.id if instance else model.key,
        "object": "model",
        "type": model.type,
        "arch": model.architecture,
        "state": "loaded" if instance else "not-loaded",
        "max_context_length": model.max_context_length,
    }
    if instance:
        entry["loaded_context_length"] = instance.context_length
    return entry


def sdk_model(instance: Instance) -> JsonObject:
    """One entry of the SDK's `listLoaded` (ModelInfoBase.ts, LLMModelInfo.ts of lmstudio-js 6ec11db)."""
    model = instance.model
    idle_s = time.monotonic() - instance.last_used_s
    return {
        "type": "llm",
        "modelKey": model.key,
        "format": "gguf",
        "displayName": model.key.rpartition("/")[2].replace("-", " ").title(),
        "publisher": model.publisher,
        "path": f"{model.publisher}/{model.key.rpartition('/')[2]}",
        "sizeBytes": 5_027_783_488,
        "indexedModelIdentifier": model.key,
        "deviceIdentifier": None,
        "paramsString": "8B",
        "architecture": model.architecture,
        "identifier": instance.id,
        "instanceReference": instance.reference,
        "ttlMs": None if instance.ttl_s is None else round(instance.ttl_s * 1000),
        "lastUsedTime": round((time.time() - idle_s) * 1000),
        "maxContextLength": model.max_context_length,
        "contextLength": instance.context_length,
        "vision": False,
        "trainedForToolUse": True,
    }


def sdk_base_config(overflow_policy: str) -> JsonObject:
    """The SDK's `getBasePredictionConfig`: the one field that a client of this package reads."""
    return {"fields": [{"key": "llm.prediction.contextOverflowPolicy", "value": overflow_policy}]}


def sdk_state(instance: Instance, loop_s: float) -> JsonObject:
    """The SDK's `getInstanceProcessingState`; `loop_s` is the time of the event loop."""
    queued = len(instance.flights) + instance.waiting + instance.chats_in_app
    is_reading = any(flight.prefill_ends_s > loop_s for flight in instance.flights)
    status = "processingPrompt" if is_reading else "generating" if queued else "idle"
    return {"status": status, "queued": queued}


FailureOutcome = Literal["error", "pool_overflow"]


class FlightFailed(Exception):
    """The request was ended from outside: a pool overflow, a crash, or an unload."""

    def __init__(self, message: str, outcome: FailureOutcome) -> None:
        super().__init__(message)
        self.message = message
        self.outcome: FailureOutcome = outcome


class Flight:
    """A request that occupies a slot; `used_tokens` is its prompt plus its generated tokens."""

    def __init__(self, used_tokens: int, client_left: asyncio.Event) -> None:
        self.used_tokens = used_tokens
        self._client_left = client_left
        self.prefill_ends_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._failed = asyncio.Event()
        self._failure: FlightFailed | None = None

    def fail(self, message: str, outcome: FailureOutcome) -> None:
        """Make the request fail at its next step; may be called from any thread."""
        if self._failure is None:
            self._failure = FlightFailed(message, outcome)
            self._loop.call_soon_threadsafe(self._failed.set)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def sleep(self, seconds: float) -> None:
        """Wait, at least one turn of the event loop; raises FlightFailed at once when the request is made to fail."""
        if seconds <= 0:
            await asyncio.sleep(0)
        else:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._failed.wait(), seconds)
        self.check()

    async def sleep_until(self, moment_s: float) -> None:
        await self.sleep(moment_s - self._loop.time())

    async def hang(self) -> None:
        """Wait until the request is made to fail, cancelled, or left by its client.

        A server that really hangs does so for longer; here it would take a slot from all later tests.
        """
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._failed, self._client_left)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        self.check()
        raise asyncio.CancelledError
