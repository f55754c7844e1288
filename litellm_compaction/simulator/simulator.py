"""The simulated server's state: its models, those that are loaded, and the requests that it got; for any thread."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from .catalog import Instance, Model, find_model, find_target, free_instance_id
from .messages import model_not_found, no_models_loaded
from .script import RequestRecord, Script


@dataclass(eq=False)
class Simulator:
    """A stand-in for LM Studio's local server, which cuts a prompt that is too long as LM Studio does by default.

    `script` answers, `chunk_tokens` at a time, as fast as possible. `takes_any_name` False refuses a model that it does
    not have, where LM Studio takes a loaded one (bt#1217).
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

    def load(
        self,
        key: str,
        context_length: int | None = None,
        instance_id: str | None = None,
        parallel: int | None = None,
    ) -> Instance:
        """Load a model as a user would in the app; an unknown one is a KeyError, an impossible window a ValueError."""
        model = find_model(key, self.models)
        if model is None:
            raise KeyError(key)
        window = context_length if context_length is not None else model.default_context_length
        if not 1 <= window <= model.max_context_length:
            raise ValueError(f"context_length {window} is not within 1..{model.max_context_length} of {model.key}")
        if instance_id is not None and any(loaded.id == instance_id for loaded in self.instances):
            raise ValueError(f"instance id {instance_id} is taken")
        own_id = instance_id or free_instance_id(model.key, self.instances)
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
        with self._changed:
            self.requests.append(record)
            self._changed.notify_all()

    def finish(self, record: RequestRecord, outcome: str) -> None:
        """Close a record, once; later outcomes of the same request are ignored.

        A request whose client had gone by then is "disconnected" in any case.
        """
        with self._changed:
            if record.outcome == "running":
                record.outcome = outcome if record.disconnected_s is None else "disconnected"
                record.ended_s = time.monotonic()
            self._changed.notify_all()

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

    async def resolve(self, name: str, ttl_s: float | None = None) -> Instance:
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
