"""The simulated server's state: its models, those that are loaded, the requests that it got, and who answers them.

The listings are those of LM Studio's API. Of a new prompt the beginning that a slot's last one shares is in its cache.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from .messages import JsonObject, model_not_found, no_models_loaded
from .rendering import Segment

ModelType = Literal["llm", "embeddings"]

# A slot that shares less of a prompt is not taken for it.
_MINIMUM_SIMILARITY_RATIO = 0.1


@dataclass(frozen=True)
class Model:
    """A downloaded model, as LM Studio lists it and loads it by itself: 4 slots over one context, 4,096 tokens."""

    key: str
    _: KW_ONLY
    publisher: str = "lmstudio-community"
    architecture: str = "qwen3"
    max_context_length: int = 131_072
    default_context_length: int = 4096
    parallel: int = 4
    type: ModelType = "llm"

    @property
    def variant(self) -> str:
        """The name with its quantization."""
        return f"{self.key.partition('@')[0]}@q4_k_m"


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
    names = itertools.chain([key], (f"{key}:{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def openai_models(models: Sequence[Model], instances: Sequence[Instance]) -> JsonObject:
    """`GET /v1/models`: every download, and no window of any kind (bt#2139)."""
    ids = dict.fromkeys([*(model.key for model in models), *(instance.id for instance in instances)])
    data = [{"id": model_id, "object": "model", "owned_by": "organization_owner"} for model_id in ids]
    return {"object": "list", "data": data}


def v1_models(models: Sequence[Model], instances: Sequence[Instance]) -> JsonObject:
    """`GET /api/v1/models`: one entry per model with its instances inside."""
    return {"models": [_v1_model(model, instances) for model in models]}


def load_config(instance: Instance) -> JsonObject:
    window = {"context_length": instance.context_length}
    if instance.model.type == "embeddings":
        return window
    engine = {"eval_batch_size": 512, "flash_attention": True, "offload_kv_cache_to_gpu": True}
    return {**window, "parallel": instance.parallel, **engine}


def _v1_model(model: Model, instances: Sequence[Instance]) -> JsonObject:
    is_embedding = model.type == "embeddings"
    own = [instance for instance in instances if instance.model.key == model.key]
    entry: JsonObject = {
        "type": "embedding" if is_embedding else "llm",
        "publisher": model.publisher,
        "key": model.key,
        "display_name": model.key.rpartition("/")[2].replace("-", " ").title(),
        "quantization": {"name": "Q4_K_M", "bits_per_weight": 4},
        "size_bytes": 5_027_783_488,
        "params_string": "8B",
        "loaded_instances": [{"id": instance.id, "config": load_config(instance)} for instance in own],
        "max_context_length": model.max_context_length,
        "format": "gguf",
    }
    if is_embedding:
        return entry
    return entry | {
        "architecture": model.architecture,
        "capabilities": {"vision": False, "trained_for_tool_use": True},
        "description": None,
        "variants": [model.variant],
        "selected_variant": model.variant,
    }


def common_prefix_tokens(first: Sequence[Segment], second: Sequence[Segment]) -> int:
    """The number of leading tokens that two sequences share; only the first difference is looked at by token."""
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            pairs = () if one.is_image or other.is_image else zip(one.tokens(), other.tokens(), strict=False)
            return shared + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        shared += one.count_tokens()
    return shared


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(kw_only=True)
class RequestRecord:
    """One request, and all that is asked of it later; times are `time.monotonic()` seconds, header names lower case.

    `prompt_tokens` counts the prompt as sent, `kept_tokens` the rest after truncation; of these `cached_tokens` came
    from the KV cache. `body` is None for anything but a JSON object.
    """

    path: str
    method: str
    headers: dict[str, str]
    started_s: float
    body: dict[str, Any] | None = None
    model: str = ""
    instance_id: str = ""
    context_length: int = 0
    prompt_tokens: int = 0
    truncated: bool = False
    kept_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    content: str = ""
    finish_reason: str | None = None
    outcome: str = "running"
    error: str = ""
    status: int = 0
    streamed: bool = False
    first_delta_s: float | None = None
    ended_s: float | None = None
    disconnected_s: float | None = None
    seen_text: str = field(default="", repr=False)
    sent_text: str = field(default="", repr=False)


@dataclass(frozen=True)
class Reply:
    """An answer that the model generates; `tool_calls` are (name, JSON arguments)."""

    content: str = ""
    _: KW_ONLY
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] | list[tuple[str, str]] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """A request as its script sees it; `index` counts inference calls from 0.

    `prompt_text` is the text that the model still sees: contents, tool results, and arguments of calls, joined by
    newlines, after any truncation; `sent_text` is the same before it.
    """

    body: JsonObject
    messages: list[JsonObject]
    model: str
    instance_id: str
    prompt_text: str
    sent_text: str
    prompt_tokens: int
    context_length: int
    truncated: bool
    index: int
    stream: bool


Script = Callable[[ChatCall], "Reply | None"]


# How a request for a summary begins.
_ASKS_FOR_SUMMARY = re.compile(r"\b(?:write the record|summari[sz]\w*|condense)\b", re.IGNORECASE)
_OPENING_CHARS, _MOST_LINES, _LINE_CHARS = 400, 24, 160
_SAID = re.compile(r"^USER:\n(.+)", re.MULTILINE)
_HEADING = "### What the user said"


def default_reply(call: ChatCall) -> Reply:
    """A numbered answer; to a request for a summary the beginnings of what the user has said."""
    last = str(call.messages[-1].get("content") or "") if call.messages else ""
    if not _ASKS_FOR_SUMMARY.search(last[:_OPENING_CHARS]):
        return Reply(f"This is answer {call.index + 1} of the simulated model.")
    said = [str(each.get("content") or "") for each in call.messages[:-1] if each.get("role") == "user"]
    # An earlier summary of its own comes first.
    summarized = [line[2:] for line in last.partition(_HEADING)[2].splitlines() if line.startswith("- ")]
    said = [*summarized, *said, *_SAID.findall(last)]
    lines = [f"- {' '.join(each.split())[:_LINE_CHARS]}" for each in said if each.strip()]
    return Reply("\n".join((_HEADING, *(lines[-_MOST_LINES:] or ["- nothing"]))))


@dataclass(eq=False)
class Simulator:
    """A stand-in for LM Studio's local server; `script` answers, `chunk_tokens` at a time, as fast as possible.

    `takes_any_name` False refuses a model that it does not have, where LM Studio takes a loaded one (bt#1217).
    """

    models: Sequence[Model]
    _: KW_ONLY
    chunk_tokens: int = 1
    takes_any_name: bool = True
    script: Script | None = None
    requests: list[RequestRecord] = field(default_factory=list, init=False)
    instances: list[Instance] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._calls = 0
        self._random = random.Random(0)  # noqa: S311 - ids only
        self._changed = threading.Condition()

    def load(self, key: str, context_length: int | None = None, parallel: int | None = None) -> Instance:
        """Load a model as a user would in the app; an unknown one is a KeyError, an impossible window a ValueError."""
        model = find_model(key, self.models)
        if model is None:
            raise KeyError(key)
        window = context_length if context_length is not None else model.default_context_length
        if not 1 <= window <= model.max_context_length:
            raise ValueError(f"context_length {window} is not within 1..{model.max_context_length} of {model.key}")
        own_id = free_instance_id(model.key, self.instances)
        instance = self.made(own_id, model, window, parallel or model.parallel)
        self.instances.append(instance)
        return instance

    def made(self, instance_id: str, model: Model, context_length: int, parallel: int) -> Instance:
        return Instance(id=instance_id, model=model, context_length=context_length, parallel=parallel)

    def inference_requests(self) -> list[RequestRecord]:
        """The records of chat and text completions, oldest first, without the probes."""
        return [record for record in self.requests if record.path.endswith("/completions")]

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until `predicate` holds, at most so long; it is looked at whenever a record changes."""
        with self._changed:
            if not self._changed.wait_for(predicate, timeout_s):
                raise TimeoutError(f"the simulator did not reach the expected state within {timeout_s} s")

    # The rest is for the simulator's own HTTP side, in the server's thread.

    def add_record(self, record: RequestRecord) -> None:
        self.requests.append(record)
        self.notify()

    def finish(self, record: RequestRecord, outcome: str) -> None:
        """Close a record, once; one whose client had gone by then is "disconnected" in any case."""
        if record.outcome == "running":
            record.outcome = outcome if record.disconnected_s is None else "disconnected"
            record.ended_s = time.monotonic()
        self.notify()

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def take_call_index(self) -> int:
        """The number of this inference call, from 0."""
        self._calls += 1
        return self._calls - 1

    def new_id(self, prefix: str = "") -> str:
        """A new id: nine digits as LM Studio gives tool calls, or a prefix and letters."""
        if not prefix:
            return str(self._random.randrange(100_000_000, 1_000_000_000))
        return prefix + "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=22))

    def loaded(self) -> list[Instance]:
        return list(self.instances)

    async def resolve(self, name: str) -> Instance:
        """The instance that serves a request for `name`; a `Refusal` if none can."""
        loaded = self.loaded()
        target = find_target(name, loaded, self.models) if name else None
        if not isinstance(target, Instance):
            if loaded and (target is not None or not self.takes_any_name):
                raise model_not_found(name)
            target = next((one for one in loaded if one.model.type != "embeddings"), None)
        if target is None:
            raise no_models_loaded()
        target.last_used_s = time.monotonic()
        return target

    def forget_connections(self) -> None:
        """Drop all that belonged to an event loop that has ended."""
