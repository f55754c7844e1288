"""Gathers the facts about a deployment: its window, its counts, its ways to go on at the limit.

For `doctor`, the page, and the log at start. Loads no LiteLLM.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from litellm_compaction.config import Settings
from litellm_compaction.engine import KnownWays
from litellm_compaction.errors import CompactionError
from litellm_compaction.proxy.routing import WAYS_OF, Carrier, Deployment, carrier_of, serves
from litellm_compaction.tokenizers.registry import Kind, Sources, TokenizerSource, usable_soon, why_broken
from litellm_compaction.tokens.begun import renders_exactly
from litellm_compaction.windows.windows import Target, Window, Windows

_WORDS: Mapping[Kind, str] = {
    "operator": "{}, as the operator wrote",
    "pack": "{}, the model's own from this package",
    "stand_in": "{}, a stand-in that errs high until calibrated by usage",
    "heuristic": "four characters a token, as the operator wrote",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentReport:
    """The report of one deployment, or of one loaded model of a wildcard.

    Attributes:
        carrier: carries a running answer over the limit.
        absence: why there is no window; None also without an answer in time.
        source: counts its prompts; None without a window.
        failures: the faults of the vocabulary and the template that should count, and their remedies.
        goes_on: the best way in which its server goes on with an answer, in words.
        model_settings: how LM Studio's own settings make the model answer, in words; "" if it was not asked.
        warnings: those of them that work against this package, and the better choices.
    """

    target: Target
    carrier: Carrier
    window: Window | None = None
    absence: CompactionError | None = None
    source: TokenizerSource | None = None
    failures: tuple[str, ...] = ()
    goes_on: str = ""
    model_settings: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def is_loaded(self) -> bool:
        """Its server says so: a request surely loads nothing."""
        return self.window is not None and self.window.source.startswith(("api/", "llama.cpp", "vllm"))


async def targets_of(windows: Windows, deployment: Deployment) -> list[Target]:
    """The deployment's target, or those of the loaded models of its wildcard, keyed as requests are."""
    target = deployment.target
    if "*" not in target.model:
        return [target]
    listed = await windows.listed(target)
    names = [name for name, is_loaded in listed.items() if is_loaded and serves(target.model, name)]
    return [replace(target, key=f"{deployment.id}|{name}", model=name) for name in names]


@dataclass(frozen=True, slots=True)
class Reporter:
    """Looks at deployments by the same cached reads as requests do.

    Attributes:
        limit_s: for each question to a server.
        is_patient: waits until the counter has been loaded, and asks LM Studio what is loaded now.
    """

    windows: Windows
    sources: Sources
    known_ways: KnownWays
    limit_s: float
    is_patient: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    async def reports(self, deployment: Deployment, settings: Settings) -> list[DeploymentReport]:
        """One report, or one for each loaded model of a wildcard; the wildcard's own if there is none."""
        carrier = carrier_of(deployment, settings)
        try:
            targets = await asyncio.wait_for(targets_of(self.windows, deployment), self.limit_s)
        except (CompactionError, asyncio.TimeoutError):
            targets = []
        targets = targets or [deployment.target]
        return [await self._report(DeploymentReport(target=target, carrier=carrier)) for target in targets]

    async def _report(self, report: DeploymentReport) -> DeploymentReport:
        target, windows = report.target, self.windows
        try:
            window = await asyncio.wait_for(windows.resolve(target), self.limit_s)
            if self.is_patient:
                window = await asyncio.wait_for(windows.confirmed(target, window), self.limit_s)
        except asyncio.TimeoutError:
            return report
        except CompactionError as error:
            return replace(report, absence=error)
        if (said := await windows.model_settings(target)) is not None:
            report = replace(report, model_settings=said.words, warnings=said.warnings)
        source = self.sources.source(target, window.architecture)
        if self.is_patient:
            # Loaded as the proxy would: only then is known whether it can be.
            await usable_soon(source.family)
            why = why_broken(source.family.vocabulary)
            report = replace(report, failures=(why,) if why else ())
        # Every source that is no server's leads to the last way, but for LM Studio's models.
        can_render = windows.instance(target) is not None or renders_exactly(source.family)
        possible = [way for way in WAYS_OF[report.carrier] if can_render or way != "raw"]
        goes_on = self.known_ways.in_words(target, window.source, possible)
        return replace(report, window=window, source=source, goes_on=goes_on)


def counted_by(source: TokenizerSource) -> str:
    """Names the vocabulary and the chat template that count, and where they come from."""
    vocabulary = _WORDS[source.kind].format(source.path or source.family.vocabulary)
    template = f"{source.family.template}, from this package" if source.family.template else "estimated by a formula"
    return f"{vocabulary}; template: {template}"
