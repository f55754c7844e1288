"""Gathers the facts about a deployment: its window, its counts, its ways to go on at the limit.

For `doctor`, the page, and the log at start. Loads no LiteLLM.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from litellm_compaction.config import Settings
from litellm_compaction.engine import KnownWays, Standing
from litellm_compaction.errors import CompactionError, ModelNotLoaded, WindowUnread
from litellm_compaction.proxy.routing import WAYS_OF, Carrier, Deployment, carrier_of, serves
from litellm_compaction.tokenizers.registry import usable_soon, why_broken
from litellm_compaction.tokenizers.sources import Kind, Sources, TokenizerSource
from litellm_compaction.tokens.begun import renders_exactly
from litellm_compaction.windows.lmstudio import ListedModel, WantedModel
from litellm_compaction.windows.windows import Target, Window, Windows

_WORDS: Mapping[Kind, str] = {
    "operator": "{}, as the operator wrote",
    "lm_studio_file": "LM Studio's file {}",
    "server_file": "the server's own file {}",
    "pack": "{}, the model's own from this package",
    "stand_in": "{}, a stand-in that errs high until calibrated by usage",
    "heuristic": "four characters a token, as the operator wrote",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentReport:
    """The report of one deployment, or of one loaded model of a wildcard.

    Attributes:
        carrier: carries a running answer over the limit.
        absence: why there is no window; None also for a wildcard without loaded models, and without an answer in time.
        source: counts its prompts; None without a window, but for models that are not loaded.
        failures: the faults of the sources that should have come before it, and their remedies.
        standing: the ways in which its server goes on with an answer.
        model_settings: how LM Studio's own settings make the model answer, in words; "" if it was not asked.
        warnings: those of them that work against this package, and the better choices.
    """

    target: Target
    carrier: Carrier
    window: Window | None = None
    absence: CompactionError | None = None
    architecture: str = ""
    source: TokenizerSource | None = None
    failures: tuple[str, ...] = ()
    standing: Standing = field(default_factory=Standing)
    model_settings: str = ""
    warnings: tuple[str, ...] = ()


async def targets_of(windows: Windows, deployment: Deployment) -> list[Target]:
    """The deployment's target, or those of the loaded models of its wildcard, keyed as requests are."""
    target = deployment.target
    if "*" not in target.model:
        return [target]
    names = [name for name in await windows.loaded(target) if serves(target.model, name)]
    return [replace(target, key=f"{deployment.id}|{name}", model=name) for name in names]


class Reporter:
    """Looks at deployments by the same cached reads as requests do.

    Args:
        limit_s: for each question to a server.
        is_patient: waits until the counter has been loaded, and asks LM Studio about its settings.
    """

    def __init__(
        self,
        windows: Windows,
        sources: Sources,
        known_ways: KnownWays,
        *,
        limit_s: float,
        is_patient: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._windows = windows
        self._sources = sources
        self._known_ways = known_ways
        self._limit_s = limit_s
        self._is_patient = is_patient
        self._environ = environ

    async def reports(self, deployment: Deployment, settings: Settings) -> list[DeploymentReport]:
        """One report, or one for each loaded model of a wildcard; the wildcard's own if there is none."""
        try:
            targets = await asyncio.wait_for(targets_of(self._windows, deployment), self._limit_s)
        except (CompactionError, asyncio.TimeoutError):
            targets = []
        if not targets:
            return [self.blank(deployment, settings, deployment.target)]
        return [await self.report(deployment, settings, target) for target in targets]

    async def report(
        self, deployment: Deployment, settings: Settings, target: Target, listed: ListedModel | None = None
    ) -> DeploymentReport:
        """Reports a target: the deployment's, or that of a model of its wildcard.

        `listed` is the model as LM Studio lists it: it names the future counter of a model that is not loaded.
        """
        found = self.blank(deployment, settings, target)
        try:
            window = await asyncio.wait_for(self._window(target), self._limit_s)
        except asyncio.TimeoutError:
            return found
        except ModelNotLoaded as error:
            found = replace(found, absence=error)
            return await self._counted(found, listed.architecture, listed.wanted) if listed is not None else found
        except CompactionError as error:
            return replace(found, absence=error)
        if (said := self._windows.model_settings(target)) is not None:
            found = replace(found, model_settings=said.in_words(), warnings=tuple(said.works_against()))
        return await self._counted(replace(found, window=window), window.architecture, window.wanted)

    def blank(self, deployment: Deployment, settings: Settings, target: Target) -> DeploymentReport:
        return DeploymentReport(target=target, carrier=carrier_of(deployment, settings, self._environ))

    async def _window(self, target: Target) -> Window:
        window = await self._windows.resolve(target)
        return await self._windows.confirmed(target, window) if self._is_patient else window

    async def _counted(
        self, found: DeploymentReport, architecture: str, wanted: WantedModel | None
    ) -> DeploymentReport:
        target, window = found.target, found.window
        source = await self._sources.source(target, architecture, wanted, patient=self._is_patient)
        failures = list(source.failures)
        if self._is_patient:
            # Loaded as the proxy would: only then is known whether it can be.
            source, more = await _in_use(source)
            failures += more
        if window is not None and window.template:
            family = await self._sources.in_effect(source, window.template, patient=self._is_patient)
            source = replace(source, family=family)
        # Every source that is no server's leads to the last way, but for LM Studio's models.
        can_render = self._windows.instance(target) is not None or renders_exactly(source.family)
        said_by = window.source if window is not None else ""
        standing = self._known_ways.standing(target, said_by, can_render=can_render)
        return replace(
            found,
            architecture=architecture,
            source=source,
            failures=tuple(failures),
            standing=standing.among(WAYS_OF[found.carrier]),
        )


async def _in_use(source: TokenizerSource) -> tuple[TokenizerSource, list[str]]:
    """The source with its vocabulary loaded, or its stand-in and the faults; 0.1–2 s in a thread."""
    planned = source.family
    family = await usable_soon(planned)
    if family.vocabulary != planned.vocabulary:
        failure = why_broken(planned.vocabulary) or f"The vocabulary {planned.vocabulary} cannot be loaded."
        instead = replace(source, kind="stand_in", family=family, path=None)
        return instead, [f"{failure} {family.vocabulary} counts meanwhile."]
    if family.template != planned.template:
        failure = f"The chat template {planned.template} cannot be read: reinstall litellm-compaction."
        return replace(source, family=family), [f"{failure} A formula counts meanwhile."]
    return source, []


def why_unasked(absence: CompactionError) -> str:
    """Says why summaries do not go to a pruning model whose window is not known."""
    if isinstance(absence, ModelNotLoaded):
        return "it is not loaded, and loading it could evict the model that is asked"
    if isinstance(absence, WindowUnread):
        return "its server does not answer"
    return "its context length is unknown: write model_info.compaction.context_length for it"


def tokenizer_name(source: TokenizerSource) -> str:
    return str(source.path) if source.path is not None else source.family.vocabulary


def source_words(source: TokenizerSource) -> str:
    return _WORDS[source.kind].format(tokenizer_name(source))


def template_words(source: TokenizerSource) -> str:
    if source.template == "formula":
        return "estimated by a formula"
    if source.template == "file" and source.path is None:
        return "the one that LM Studio says is in effect"
    return "the file's own" if source.template == "file" else f"{source.family.template}, from this package"
