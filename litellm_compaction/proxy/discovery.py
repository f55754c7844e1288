"""Fills LiteLLM's lists of models: what LM Studio lists behind wildcards, and the window of each loaded model.

LiteLLM alone lists nothing for `lm_studio/*`, so that a chat client's menu is empty. The lists are filled just before
one is read, from the same cached reading of LM Studio as requests use: a reload shows within seconds, and no
server is asked while nobody reads.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from litellm_compaction.concurrency import ended
from litellm_compaction.errors import CompactionError
from litellm_compaction.proxy.deployments import DeploymentSelector, GuardedDeployment, Publisher, limits_of
from litellm_compaction.proxy.litellm_inside.application import ModelMap, expand_wildcards
from litellm_compaction.proxy.litellm_inside.connections import with_credentials
from litellm_compaction.proxy.litellm_inside.router import refuses_by_window
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.routing import deployment_of, serves
from litellm_compaction.windows.lmstudio import server_root
from litellm_compaction.windows.windows import Target, Windows

# Lists of models, and one model: LiteLLM's own route for that takes no name with a slash (1.100.5 to 1.109.1).
# Only below the proxy's own root: behind other prefixes are routes that pass requests through.
_LISTING = re.compile(r"(?P<list>(/v1)?/models)(/(?P<name>.+))?|(/v[12])?/model/info|/model_group/info")
_Limits: TypeAlias = Mapping[str, int]
_Application: TypeAlias = Callable[..., Awaitable[None]]
# A server that does not answer delays a list by no more than this; what it lists shows the next time.
_LIMIT_S = 2.0


class _Place(NamedTuple):
    """A server, as one deployment reaches it."""

    root: str
    api_key: str | None


class _Found(NamedTuple):
    """The server behind one wildcard, its models, and their limits by the names of clients; None without a window."""

    place: _Place
    models: tuple[str, ...]
    limits: Mapping[str, _Limits | None]
    # By LiteLLM's own names for the models.
    inner_limits: Mapping[str, _Limits]


class _Shown(NamedTuple):
    """The limits of one deployment's model."""

    deployment_id: str
    limits: _Limits


class Discovery:
    """Keeps LiteLLM's lists of models as LM Studio's are."""

    def __init__(self, windows: Windows, guards: DeploymentSelector, publisher: Publisher) -> None:
        self._windows = windows
        self._guards = guards
        self._publisher = publisher
        self._map = ModelMap()
        self._models: Mapping[_Place, tuple[str, ...]] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self, router: Callable[[], Any]) -> None:
        """From now on names what is behind wildcards, by LM Studio's list; `router` gives LiteLLM's. Never raises."""
        expand_wildcards(self.names)
        await self.refresh(router())

    async def refresh(self, router: Any) -> None:
        """Fills the lists by LM Studio's present one; never raises, and waits 2 s at most."""
        if router is None:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._refresh(router))
        await asyncio.wait([self._task], timeout=_LIMIT_S)

    async def aclose(self) -> None:
        await ended([self._task] if self._task is not None else [])

    def names(self, wildcard: str, params: Mapping[str, Any]) -> Sequence[str] | None:
        """The names behind a wildcard by which clients reach the models of its server.

        Args:
            wildcard: a `model_name`, or a narrower one of a key's list.
            params: `litellm_params` of a deployment that it reaches.

        Returns:
            None for a server that is not known as a guarded LM Studio.
        """
        target = deployment_of(with_credentials(params), {}, group=wildcard, environ=os.environ).target
        models = self._models.get(_place(target))
        if models is None:
            return None
        names = [_listed_name(wildcard, target.model, model) for model in models]
        return [name for name in names if name is not None]

    def serving(
        self,
        application: _Application,
        router: Callable[[], Any],
        key_owner: Callable[[Mapping[str, Any], Mapping[str, str], str], Awaitable[object]],
    ) -> _Application:
        """LiteLLM's application, which is asked for a list after that is filled, and knows models with a slash.

        `key_owner` raises an error for a wrong key, which is the application's answer to it.
        """

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            is_read = scope["type"] == "http" and scope["method"] == "GET"
            root, path = scope.get("root_path", ""), scope.get("path", "")
            asked = _LISTING.fullmatch(path.removeprefix(root)) if is_read else None
            if asked is not None:
                headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
                await key_owner(scope, headers, asked["list"] or path.removeprefix(root))
                await self.refresh(router())
            if asked is None or "/" not in (asked["name"] or ""):
                await application(scope, receive, send)
                return
            listing = (root if path.startswith(root) else "") + asked["list"]
            await _send_one(application, {**scope, "path": listing}, receive, send, name=asked["name"])

        return serve

    async def _refresh(self, router: Any) -> None:
        try:
            guards = [guard async for guard in self._guards.guarded(router)]
            looks = await asyncio.gather(*(self._look(guard) for guard in guards))
            self._publisher.publish(router, dict(each for each in looks if isinstance(each, _Shown)))
            found = [each for each in looks if isinstance(each, _Found)]
            limits = _smallest(pair for each in found for pair in each.limits.items())
            listed = {name for each in found for name in each.limits}
            inner = _smallest(pair for each in found for pair in each.inner_limits.items() if pair[0] not in listed)
            self._models = {each.place: each.models for each in found}
            # It would refuse by these numbers what is about to be compacted.
            self._map.show({} if refuses_by_window(router) else {**inner, **limits})
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            log_failure("discovery", error)

    async def _look(self, guard: GuardedDeployment) -> _Found | _Shown | None:
        deployment, target = guard.deployment, guard.deployment.target
        if "*" not in target.model:
            shown = None if deployment.is_wildcard else await self._limits(guard, target)
            return None if shown is None else _Shown(deployment.id, shown)
        if not target.is_lmstudio:
            return None
        listed = await self._windows.listed(target)
        limits: dict[str, _Limits | None] = {}
        inner: dict[str, _Limits] = {}
        for model, is_loaded in listed.items():
            if (name := _listed_name(deployment.group, target.model, model)) is None:
                continue
            named = replace(target, key=f"{deployment.id}|{model}", model=model)
            limits[name] = numbers = await self._limits(guard, named) if is_loaded else None
            if numbers is not None:
                # By this name LiteLLM looks a model up for `/model_group/info`.
                inner[f"lm_studio/{model}"] = numbers
        return _Found(_place(target), tuple(listed), limits, inner)

    async def _limits(self, guard: GuardedDeployment, target: Target) -> _Limits | None:
        """None without a window. What an overflow has taught of it may be one tenant's only, and nobody's is asked."""
        try:
            return limits_of(await self._windows.resolve(target), guard.settings)
        except CompactionError:
            return None


async def _send_one(application: _Application, scope: Any, receive: Any, send: Any, *, name: str) -> None:
    """Answers with one model of the list that `scope` asks for, in the client's format, if its key may see it."""
    answer: list[Any] = []

    async def keep(message: Any) -> None:
        answer.append(message)

    await application({**scope, "raw_path": scope["path"].encode()}, receive, keep)
    start, *rest = answer
    if start["status"] != 200:
        for message in answer:
            await send(message)
        return
    rows = json.loads(b"".join(message.get("body", b"") for message in rest))["data"]
    row = next((row for row in rows if row["id"] == name), None)
    missing = {
        "error": {"message": f"The model {name!r} does not exist", "type": "invalid_request_error", "code": "404"}
    }
    body = json.dumps(missing if row is None else row).encode()
    headers = [(key, value) for key, value in start["headers"] if key.lower() != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({**start, "status": 404 if row is None else 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _smallest(found: Iterable[tuple[str, _Limits | None]]) -> dict[str, _Limits]:
    """The limits by name: of several servers any may be asked, so the smallest window holds."""
    limits: dict[str, _Limits] = {}
    for name, numbers in found:
        if numbers is not None:
            limits[name] = min(numbers, limits.get(name, numbers), key=lambda each: each["max_input_tokens"])
    return limits


def _place(target: Target) -> _Place:
    return _Place(server_root(target.api_base or ""), target.api_key)


def _listed_name(wildcard: str, pattern: str, model: str) -> str | None:
    """The name with which a client of `wildcard` reaches a model; None if none does, or more than one star says it.

    LiteLLM puts what the wildcard's star stands for in place of the star of the deployment's `model`, here `pattern`.
    """
    before, _, after = pattern.partition("*")
    if wildcard.count("*") != 1 or pattern.count("*") != 1 or not serves(pattern, model):
        return None
    return wildcard.replace("*", model[len(before) : len(model) - len(after)])
