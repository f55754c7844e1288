"""The double's settings and state: everything that is known of LM Studio's servers, and of llama.cpp's.

Settings may change meanwhile; any thread may call.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from litellm_compaction.simulator import simulator as simulated
from litellm_compaction.simulator.messages import JsonObject, model_not_found, no_models_loaded, parse_chat
from litellm_compaction.simulator.rendering import Prompt, render_chat, render_text

from .catalog import Instance, Model
from .messages import MODEL_UNLOADED
from .rendering import Overflow
from .script import Script, Sdk

Api = Literal["v1", "v0", "openai", "llama.cpp"]

_REMEMBERED_PROMPTS = 16


@dataclass(eq=False)
class Simulator(simulated.Simulator):
    """LM Studio's local server in every way that is known.

    `overflow` answers a prompt that exceeds the window.
    `api` is the newest generation of endpoints it offers, or llama.cpp's server, which tells the context of all its
    slots together only as newer builds do (`tells_whole`). `tokens_per_second` and `prompt_tokens_per_second` None are
    as fast as possible. `truncated_usage` is the count that a truncated prompt is reported with.
    Concurrent JIT requests load several copies (bt#1751, not fixed in 0.4.16). `unified_kv` makes parallel requests
    share the window. `runs_on` generates a plain answer to its end when its client has gone (measured with llama.cpp,
    2026-11-22); a streamed one always ends.
    """

    models: Sequence[Model]
    _: KW_ONLY
    overflow: Overflow = "truncate_middle"
    api: Api = "v1"
    tells_whole: bool = True
    api_token: str | None = None
    tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    truncated_usage: Literal["sent", "kept"] = "sent"
    unified_kv: bool = True
    runs_on: bool = True
    script: Script | None = None
    sdk: Sdk = field(default_factory=Sdk, init=False)
    instances: list[Instance] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._formatted: OrderedDict[str, Prompt] = OrderedDict()

    def made(self, instance_id: str, model: simulated.Model, context_length: int, parallel: int) -> Instance:
        assert isinstance(model, Model)
        return Instance(id=instance_id, model=model, context_length=context_length, parallel=parallel)

    def unload(self, instance_id: str) -> Instance:
        """Unload an instance; its running answers fail."""
        [instance] = [loaded for loaded in self.instances if loaded.id == instance_id]
        self.instances.remove(instance)
        instance.fail_all(MODEL_UNLOADED, "error")
        return instance

    # The rest is for the simulator's own HTTP side, in the server's thread.

    def remember(self, prompt: Prompt) -> str:
        """Returns a prompt as the text for SDKs; its tokens are those of its pieces from then on.

        A text is tokenized piece by piece for `usage`; as a whole it can be a token shorter at each seam.
        """
        text = "".join(segment.text for segment in prompt.segments())
        self._formatted[text] = prompt
        while len(self._formatted) > _REMEMBERED_PROMPTS:
            self._formatted.popitem(last=False)
        return text

    def count_chat(self, instance: Instance, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> int:
        """Returns `usage.prompt_tokens` of a chat request at an instance, without sending it; from any thread."""
        request = parse_chat({"messages": list(messages), **({"tools": list(tools)} if tools else {})})
        return instance.model.count(render_chat(request.messages, request.tools))

    def count_text(self, model: Model, text: str) -> int:
        """Returns the tokens of a text, as the server counts; may be called from any thread."""
        prompt = self._formatted.get(text)
        return model.count(render_text(text) if prompt is None else prompt)

    def is_pool_full(self, instance: Instance) -> bool:
        """Returns True if the requests that share an instance's window have more tokens than it."""
        shares = self.unified_kv and instance.parallel > 1
        return shares and instance.pool_tokens() > instance.context_length

    async def resolve(self, name: str) -> Instance:
        """The instance that serves a request for `name`, loading it if that is allowed; a Refusal if none can."""
        loaded = self.loaded()
        target = simulated.find_target(name, loaded, self.models) if name else None
        instance: Instance | None = None
        if isinstance(target, Instance):
            instance = target
        elif target is not None:
            instance = self._load_just_in_time(target)
        elif loaded and not self.takes_any_name:
            raise model_not_found(name)
        else:
            instance = next((one for one in loaded if one.model.type != "embeddings"), None)
        if instance is None:
            raise no_models_loaded()
        instance.last_used_s = time.monotonic()
        return instance

    def forget_connections(self) -> None:
        """Drop all that belonged to an event loop that has ended."""
        for instance in self.instances:
            instance.flights.clear()
            instance.queue = asyncio.Semaphore(instance.parallel)

    def _load_just_in_time(self, model: simulated.Model) -> Instance:
        for other in [one for one in self.instances if one.is_jit and one.model.key != model.key]:
            self.unload(other.id)
        instance = self.load(model.key)
        instance.is_jit = True
        return instance
