"""Gathers the facts about a deployment: its window, its counts, its ways to go on at the limit.

For `doctor`, the page, and the log at start. Loads no LiteLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from litellm_compaction.engine import KnownWays
from litellm_compaction.errors import CompactionError, ServerUnavailable
from litellm_compaction.proxy.routing import WAYS_OF, Carrier, Deployment, serves
from litellm_compaction.tokenizers.registry import Sources, TokenizerSource, usable_soon, why_broken
from litellm_compaction.windows.fetch import without_userinfo
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

    def facts(self, *, shows_places: bool) -> dict[str, str]:
        """All that is known, in words; an address, or the path of a file, is not everybody's business."""
        window, source, counting = self.window, self.source, ""
        if window is not None:
            shared = f", shared by up to {window.parallel} requests" if window.parallel > 1 else ""
            limit = f"{window.tokens:,} tokens, from {window.source}{shared}"
        elif "*" in self.target.model:
            limit = "of the model that is asked for"
        else:
            absence = self.absence or ServerUnavailable("its server does not answer")
            limit = str(absence) if shows_places else absence.for_clients
        if source is not None:
            way = f" with {counted_by(source)}" if shows_places or not source.path else ""
            counting = f"as {source.family.name}{way}"
        how = "below LiteLLM's OpenAI client" if self.carrier == "transport" else "by LiteLLM's hooks"
        facts = {
            "server": without_userinfo(self.target.api_base or "") if shows_places else "",
            "window": limit,
            "settings": self.model_settings,
            "counting": counting,
            "carrier": f"{self.carrier}: running answers are carried over the limit {how}",
            "goes on": self.goes_on,
        }
        return {about: words for about, words in facts.items() if words}

    @property
    def is_loaded(self) -> bool:
        """Its server says so: a request surely loads nothing."""
        return self.window is not None and self.window.source.startswith(("api/", "llama.cpp", "vllm"))


@dataclass(frozen=True, slots=True)
class Reporter:
    """Looks at deployments by the same cached reads as requests do, and loads their counters, as requests would."""

    windows: Windows
    sources: Sources
    known_ways: KnownWays

    async def reports(self, deployment: Deployment) -> list[DeploymentReport]:
        """One report, or one for each loaded model of a wildcard; the wildcard's own if there is none."""
        target = deployment.target
        listed = await self.windows.listed(target) if "*" in target.model else {}
        names = [name for name, is_loaded in listed.items() if is_loaded and serves(target.model, name)]
        # Keyed as requests are.
        targets = [replace(target, key=f"{deployment.id}|{name}", model=name) for name in names] or [target]
        return [await self._report(DeploymentReport(each, deployment.carrier)) for each in targets]

    async def _report(self, report: DeploymentReport) -> DeploymentReport:
        target, windows = report.target, self.windows
        try:
            report.window = window = await windows.resolve(target)
        except CompactionError as error:
            report.absence = error
            return report
        if (server_settings := await windows.model_settings(target)) is not None:
            report.model_settings, report.warnings = server_settings.words, server_settings.warnings
        report.source = self.sources.source(target, window.architecture)
        family = report.source.family
        # Only then is known whether it can be loaded.
        await usable_soon(family)
        report.failure = why_broken(family.vocabulary)
        # Every source that is no server's leads to the last way, but for LM Studio's models.
        can_render = windows.instance(target) is not None or (family.exact and family.template)
        possible = [way for way in WAYS_OF[report.carrier] if can_render or way != "raw"]
        report.goes_on = self.known_ways.in_words(target, window.source, possible)
        return report


def counted_by(source: TokenizerSource) -> str:
    """Names the vocabulary and the chat template that count, and where they come from."""
    vocabulary = _WORDS[source.kind].format(source.path or source.family.vocabulary)
    template = f"{source.family.template}, from this package" if source.family.template else "estimated by a formula"
    return f"{vocabulary}; template: {template}"
