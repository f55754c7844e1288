"""Fills LiteLLM's lists of models: what LM Studio lists behind wildcards, and the window of each loaded model.

LiteLLM alone lists nothing for `lm_studio/*`, so that a chat client's menu is empty, and LM Studio's OpenAI endpoint
does not tell the window, by which clients steer their own compaction. So each model gets a deployment of its own in the
router, like the wildcard's. The lists are filled just before one is read, from the same cached reading of LM Studio as
requests use: a reload shows within seconds, and no server is asked while nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from litellm_compaction.concurrency import Kept
from litellm_compaction.errors import CompactionError
from litellm_compaction.proxy import litellm_inside as litellm_router
from litellm_compaction.proxy.presence import Application, Route
from litellm_compaction.proxy.refusals import failing_open
from litellm_compaction.proxy.routing import (
    Deployment,
    DeploymentSelector,
    id_of,
    is_listed_here,
    limits_of,
    listed_id,
    serves,
)
from litellm_compaction.windows.windows import Windows

# Only below the proxy's own root: behind other prefixes are routes that pass requests through.
_LISTING = re.compile(r"(/v1)?/models(/.+)?|(/v[12])?/model/info|/model_group/info")
# A server that does not answer delays a list by no more than this; what it lists shows the next time.
_LIMIT_S = 2.0


class Discovery:
    """Keeps LiteLLM's lists of models as LM Studio's are."""

    def __init__(self, windows: Windows, guards: DeploymentSelector) -> None:
        self._windows, self._guards = windows, guards
        # By the ids of deployments: our numbers, which are none of the operator's.
        self._written: dict[str, Mapping[str, int]] = {}
        self._filled: Kept[Any, None] = Kept(self._fill, lambda _: 0.0, most=1)
        # The reads of lists, which are filled first; keys are the business of LiteLLM's application.
        self.route = Route("GET", _LISTING.fullmatch, self._serve)

    async def refresh(self, router: Any) -> None:
        """Fills the lists by LM Studio's present one; never raises, and waits 2 s at most."""
        if router is not None:
            await self._filled.soon(router, wait_s=_LIMIT_S)

    async def _serve(self, application: Application, scope: Any, receive: Any, send: Any) -> None:
        await self.refresh(litellm_router.current_router())
        await application(scope, receive, send)

    async def _fill(self, router: Any) -> None:
        with failing_open("discovery"):
            guarded = [each async for each in self._guards.guarded(router) if each.target.is_lmstudio]
            added: dict[str, tuple[str, str, str]] = {}
            limits: dict[str, Mapping[str, int]] = {}
            await asyncio.gather(*(self._look(each, added, limits) for each in guarded))
            for id_ in map(id_of, litellm_router.deployments(router)):
                if is_listed_here(id_) and id_ not in added:
                    router.delete_deployment(id=id_)
            for id_, (wildcard_id, name, model) in added.items():
                litellm_router.add(router, wildcard_id, id_, name, model)
            # It would refuse by these numbers what is about to be compacted.
            shown = {} if litellm_router.setting(router, litellm_router.CHECKS) else limits
            litellm_router.rewrite_info(router, lambda info: self._rewritten(info, shown))

    def _rewritten(self, info: Mapping[str, Any], limits: Mapping[str, Mapping[str, int]]) -> Mapping[str, Any]:
        """A deployment's `model_info` with its limits, and without those shown before; the operator's numbers stay."""
        id_ = str(info.get("id"))
        before = self._written.pop(id_, {})
        written = {key: value for key, value in info.items() if key not in before or value != before[key]}
        if written.get("max_input_tokens") is None and id_ in limits:
            self._written[id_] = {key: tokens for key, tokens in limits[id_].items() if written.get(key) is None}
        return {**written, **self._written.get(id_, {})}

    async def _look(
        self, deployment: Deployment, added: dict[str, tuple[str, str, str]], limits: dict[str, Mapping[str, int]]
    ) -> None:
        """Adds, by the ids of deployments, what a server lists behind a wildcard, and the limits of what is loaded.

        Of a model that is the id of the wildcard's deployment, the name by which clients reach it, and the model's own.
        """
        target = deployment.target
        targets = {} if "*" in deployment.group or "*" in target.model else {deployment.id: target}
        models = await self._windows.listed(target) if "*" in target.model else {}
        for model in models:
            if (name := _listed_name(deployment.group, target.model, model)) is not None:
                id_ = listed_id(deployment.id, model)
                added[id_] = deployment.id, name, f"{deployment.provider}/{model}"
                targets[id_] = replace(target, key=f"{id_}|{model}", model=model)
        for id_, one in targets.items():
            # One that is not loaded has none. What an overflow has taught of a window may be one tenant's only, and
            # nobody's is asked.
            with contextlib.suppress(CompactionError):
                limits[id_] = limits_of(await self._windows.resolve(one), deployment.settings)


def _listed_name(wildcard: str, pattern: str, model: str) -> str | None:
    """The name with which a client of `wildcard` reaches a model; None if none does, or more than one star says it.

    LiteLLM puts what the wildcard's star stands for in place of the star of the deployment's `model`, here `pattern`.
    """
    before, _, after = pattern.partition("*")
    if wildcard.count("*") != 1 or pattern.count("*") != 1 or not serves(pattern, model):
        return None
    return wildcard.replace("*", model[len(before) : len(model) - len(after)])
