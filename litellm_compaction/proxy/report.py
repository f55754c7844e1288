"""Gathers the facts about a deployment: its window, its counts, its ways to go on at the limit.

For `doctor`, the page, and the log at start. Loads no LiteLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace

from litellm_compaction.config import Settings
from litellm_compaction.engine import KnownWays
from litellm_compaction.errors import CompactionError, ServerUnavailable
from litellm_compaction.proxy.routing import WAYS_OF, Carrier, Deployment, carrier_of, serves
from litellm_compaction.tokenizers.registry import Sources, TokenizerSource, usable_soon, why_broken
from litellm_compaction.tokens.begun import renders_exactly
from litellm_compaction.windows.windows import Target, Window, Windows

# By the kind of a tokenizer's source.
_WORDS = {
    "operator": "{}, as the operator wrote",
    "pack": "{}, the model's own from this package",
    "stand_in": "{}, a stand-in that errs high until calibrated by usage",
    "heuristic": "four characters a token, as the operator wrote",
}


@dataclass(slots=True)
class DeploymentReport:
    """The report of one deployment, or of one loaded model of a wildcard."""

    target: Target
    carrier: Carrier  # Carries a running answer over the limit.
    window: Window | None = None
    absence: CompactionError | None = None  # Why there is no window.
    source: TokenizerSource | None = None  # Counts its prompts; None without a window.
    failure: str = ""  # Why the vocabulary that should count cannot, and the remedy.
    goes_on: str = ""  # The best way in which its server goes on with an answer, in words.
    model_settings: str = ""  # How LM Studio's own settings make the model answer, in words; "" if it was not asked.
    warnings: tuple[str, ...] = ()  # Those of them that work against this package, and the better choices.

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
        limit_s: for each window.
        is_patient: waits until the counter has been loaded, and asks LM Studio what is loaded now.
    """

    windows: Windows
    sources: Sources
    known_ways: KnownWays
    limit_s: float
    is_patient: bool = False

    async def reports(self, deployment: Deployment, settings: Settings) -> list[DeploymentReport]:
        """One report, or one for each loaded model of a wildcard; the wildcard's own if there is none."""
        carrier, targets = carrier_of(deployment, settings), list[Target]()
        # Otherwise its own report says why.
        with contextlib.suppress(CompactionError, asyncio.TimeoutError):
            targets = await asyncio.wait_for(targets_of(self.windows, deployment), self.limit_s)
        reports = [DeploymentReport(target, carrier) for target in targets or [deployment.target]]
        for report in reports:
            await self._fill(report)
        return reports

    async def _fill(self, report: DeploymentReport) -> None:
        target, windows = report.target, self.windows
        try:
            window = await asyncio.wait_for(windows.resolve(target), self.limit_s)
            if self.is_patient:
                window = await asyncio.wait_for(windows.confirmed(target, window), self.limit_s)
        except asyncio.TimeoutError:
            report.absence = ServerUnavailable(f"its server did not answer within {self.limit_s:g} s.")
            return
        except CompactionError as error:
            report.absence = error
            return
        report.window = window
        if (server_settings := await windows.model_settings(target)) is not None:
            report.model_settings, report.warnings = server_settings.words, server_settings.warnings
        report.source = self.sources.source(target, window.architecture)
        family = report.source.family
        if self.is_patient:
            # Loaded as the proxy would: only then is known whether it can be.
            await usable_soon(family)
            report.failure = why_broken(family.vocabulary)
        # Every source that is no server's leads to the last way, but for LM Studio's models.
        can_render = windows.instance(target) is not None or renders_exactly(family)
        possible = [way for way in WAYS_OF[report.carrier] if can_render or way != "raw"]
        report.goes_on = self.known_ways.in_words(target, window.source, possible)


def counted_by(source: TokenizerSource) -> str:
    """Names the vocabulary and the chat template that count, and where they come from."""
    vocabulary = _WORDS[source.kind].format(source.path or source.family.vocabulary)
    template = f"{source.family.template}, from this package" if source.family.template else "estimated by a formula"
    return f"{vocabulary}; template: {template}"
