"""The simulated server as tests hold it: its settings, the loaded models, and the requests that it got.

State only; the HTTP side is `server`, one request `inference`. Settings may change meanwhile; any thread may call.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from litellm_compaction.simulator.messages import TemplateRule, parse_chat
from litellm_compaction.simulator.rendering import MidOverflow, Overflow, Prompt, render_chat
from litellm_compaction.simulator.script import Outcome, ReasoningField, RequestRecord, Sdk

from .catalog import Instance, Model, find_model, find_target, free_instance_id
from .messages import MODEL_UNLOADED, ErrorShape, JsonObject, NKeepWording, model_not_found, no_models_loaded
from .script import Fault, Script

Api = Literal["v1", "v0", "openai", "llama.cpp"]

ThoughtControl = Literal["ends", "refuses", "ignores", "absent"]

_REMEMBERED_PROMPTS = 16


@dataclass(eq=False)
class Simulator:
    """A stand-in for LM Studio's local server.

    `overflow` answers a prompt that exceeds the window, `mid_overflow` a window that fills while generating.
    `api` is the newest generation of endpoints it offers, or llama.cpp's server, which tells the context of all its
    slots together only as newer builds do (`tells_whole`). `tokens_per_second` and `prompt_tokens_per_second` None are
    as fast as possible. `truncated_usage` is the count that a truncated prompt is reported with.
    `reports_cached` adds the tokens found in the cache, as llama.cpp and vLLM do; LM Studio does not (bt#778, bt#2390).
    `reports_usage` False leaves it out of streams, as servers do that do not know `stream_options`.
    Concurrent JIT requests load several copies (bt#1751, not fixed in 0.4.16). `unified_kv` makes parallel requests
    share the window. `runs_on` generates a plain answer to its end when its client has gone (measured with llama.cpp,
    2026-11-22); a streamed one always ends. `echoes_prefill` repeats a final assistant message at the beginning of the
    answer that continues it (bt#2041 in 0.4.16; llama.cpp). `thought_control` is what llama.cpp does when it is told to
    end a thought: end it, refuse, say so and think on, or not know the path (builds before 2026).
    `takes_any_name` False refuses a model that it does not have, where LM Studio takes a loaded one (bt#1217).
    """

    models: Sequence[Model]
    _: KW_ONLY
    overflow: Overflow = "truncate_middle"
    mid_overflow: MidOverflow = "length"
    api: Api = "v1"
    tells_whole: bool = True
    api_token: str | None = None
    jit: bool = True
    load_ms: int = 0
    tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    chunk_tokens: int = 1
    reasoning_field: ReasoningField = "reasoning_content"
    strict_template: TemplateRule = "lenient"
    error_shape: ErrorShape = "string"
    n_keep_wording: NKeepWording = "number_of_tokens"
    truncated_usage: Literal["sent", "kept"] = "sent"
    reports_usage: bool = True
    reports_cached: bool = False
    unified_kv: bool = True
    runs_on: bool = True
    echoes_prefill: bool = True
    thought_control: ThoughtControl = "ends"
    takes_any_name: bool = True
    seed: int = 0
    script: Script | None = None
    sdk: Sdk = field(default_factory=Sdk, init=False)
    requests: list[RequestRecord] = field(default_factory=list, init=False)
    instances: list[Instance] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._faults: deque[Fault] = deque()
        self._calls = 0
        # By the ids of their answers: ends the thought of one that is being written.
        self.thoughts: dict[str, Callable[[], None]] = {}
        self._random = random.Random(self.seed)  # noqa: S311 - ids only
        self._changed = threading.Condition()
        self._formatted: OrderedDict[str, Prompt] = OrderedDict()

    def load(
        self,
        key: str,
        context_length: int | None = None,
        instance_id: str | None = None,
        parallel: int | None = None,
    ) -> Instance:
        """Load a model as a user would in the app: without a time to live, never evicted.

        Raises:
            KeyError: no such model was given to the simulator.
            ValueError: the window is impossible for the model, or the instance id is taken.
        """
        model = find_model(key, self.models)
        if model is None:
            raise KeyError(key)
        return self._create(model, context_length, instance_id=instance_id, parallel=parallel)

    def unload(self, instance_id: str) -> None:
        """Unload an instance; its running answers fail.

        Raises:
            KeyError: no instance has this id.
        """
        instance = next((loaded for loaded in self.instances if loaded.id == instance_id), None)
        if instance is None:
            raise KeyError(instance_id)
        self.instances.remove(instance)
        instance.fail_all(MODEL_UNLOADED, "error")

    def fail_next(self, fault: Fault, times: int = 1) -> None:
        """Queue a fault for the next inference call, or the next `times` calls."""
        self._faults.extend([fault] * times)

    def inference_requests(self) -> list[RequestRecord]:
        """The records of chat and text completions, oldest first, without the probes."""
        return [record for record in self.requests if record.path.endswith("/completions")]

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until `predicate` holds; it is looked at whenever a record changes.

        Raises:
            TimeoutError: it did not come to hold in time.
        """
        with self._changed:
            if not self._changed.wait_for(predicate, timeout_s):
                raise TimeoutError(f"the simulator did not reach the expected state within {timeout_s} s")

    # The rest is for the simulator's own HTTP side, in the server's thread.

    def add_record(self, record: RequestRecord) -> None:
        with self._changed:
            self.requests.append(record)
            self._changed.notify_all()

    def finish(self, record: RequestRecord, outcome: Outcome) -> None:
        """Close a record, once; later outcomes of the same request are ignored.

        A request whose client had gone by then is "disconnected" in any case.
        """
        with self._changed:
            if record.outcome == "running":
                record.outcome = outcome if record.disconnected_s is None else "disconnected"
                record.ended_s = time.monotonic()
            self._changed.notify_all()

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
        counting = instance.model.counting
        return counting.prompt(render_chat(request.messages, request.tools, counting))

    def count_text(self, model: Model, text: str) -> int:
        """Returns the tokens of a text, as the server counts; may be called from any thread."""
        prompt = self._formatted.get(text)
        return model.counting.text(text) if prompt is None else model.counting.prompt(prompt)

    def is_pool_full(self, instance: Instance) -> bool:
        """Returns True if the requests that share an instance's window have more tokens than it."""
        shares = self.unified_kv and instance.parallel > 1
        return shares and instance.pool_tokens() > instance.context_length

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def take_call_index(self) -> int:
        """The number of this inference call, from 0."""
        self._calls += 1
        return self._calls - 1

    def take_fault(self) -> Fault | None:
        return self._faults.popleft() if self._faults else None

    def new_id(self, prefix: str = "") -> str:
        """A new id: nine digits as LM Studio gives tool calls, or a prefix and letters."""
        if not prefix:
            return str(self._random.randrange(100_000_000, 1_000_000_000))
        return prefix + "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=22))

    def loaded(self) -> list[Instance]:
        """The instances, after unloading those whose idle time to live has passed."""
        now_s = time.monotonic()
        for instance in list(self.instances):
            if instance.has_expired(now_s):
                self.instances.remove(instance)
        return list(self.instances)

    async def resolve(self, name: str, ttl_s: float | None) -> Instance:
        """The instance that serves a request for `name`, loading it if that is allowed.

        Raises:
            Refusal: nothing can serve it.
        """
        loaded = self.loaded()
        target = find_target(name, loaded, self.models) if name else None
        instance: Instance | None = None
        if isinstance(target, Instance):
            instance = target
        elif target is not None and self.jit:
            instance = await self._load_just_in_time(target, ttl_s)
        elif loaded and (target is not None or not self.takes_any_name):
            raise model_not_found(name)
        elif target is None:
            instance = next((one for one in loaded if one.model.type != "embeddings"), None)
        if instance is None:
            raise no_models_loaded()
        instance.last_used_s = time.monotonic()
        return instance

    async def load_slowly(self, model: Model, context_length: int | None) -> Instance:
        """Load through the API, which takes `load_ms`."""
        await asyncio.sleep(self.load_ms / 1000)
        return self._create(model, context_length)

    def forget_connections(self) -> None:
        """Drop all that belonged to an event loop that has ended."""
        for instance in self.instances:
            instance.flights.clear()
            instance.queue.reset()
            instance.cache.free_all()

    async def _load_just_in_time(self, model: Model, ttl_s: float | None) -> Instance:
        await asyncio.sleep(self.load_ms / 1000)
        for other in [one for one in self.instances if one.is_jit and one.model.key != model.key]:
            self.unload(other.id)
        instance = self._create(model, min(model.default_context_length, model.max_context_length))
        instance.is_jit = True
        instance.ttl_s = ttl_s if ttl_s is not None else 3600.0
        return instance

    def _create(
        self,
        model: Model,
        context_length: int | None,
        *,
        instance_id: str | None = None,
        parallel: int | None = None,
    ) -> Instance:
        window = context_length if context_length is not None else model.default_context_length
        if not 1 <= window <= model.max_context_length:
            raise ValueError(f"context_length {window} is not within 1..{model.max_context_length} of {model.key}")
        if instance_id is not None and any(loaded.id == instance_id for loaded in self.instances):
            raise ValueError(f"instance id {instance_id} is taken")
        instance = Instance(
            id=instance_id or free_instance_id(model.key, self.instances),
            model=model,
            context_length=window,
            parallel=parallel or model.parallel,
        )
        self.instances.append(instance)
        return instance
