"""Finds the vocabulary and template that count a deployment; the one module that knows the order of sources.

The order: what the operator wrote; the server's own file of the model, LM Studio's or llama.cpp's, if it is on this
machine; the packs of this package, by family; a stand-in that usage corrects. Settings that cannot be followed are
found at start, and by `doctor`, before a request finds them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from litellm_compaction.concurrency import Kept
from litellm_compaction.config import AUTO_TOKENIZER, Settings
from litellm_compaction.errors import ConfigError, UnusableModelFile
from litellm_compaction.templates.template import is_template
from litellm_compaction.tokenizers.families import FORMULA_ERROR, HEURISTIC, Family, family_of
from litellm_compaction.tokenizers.files import TokenizerFile, load_tokenizer_file, template_name
from litellm_compaction.tokenizers.model_files import ModelFiles
from litellm_compaction.tokenizers.registry import is_loaded
from litellm_compaction.windows.lmstudio import WantedModel
from litellm_compaction.windows.windows import Target, Window

__all__ = ["Kind", "Sources", "TokenizerSource", "with_file"]

logger = logging.getLogger("litellm_compaction")


# A header takes 0.1–0.4 s to read: worth this much of one request's time, since a stand-in might compact it for
# nothing. Whatever takes longer, or comes from a slow disk, is counted with by later requests.
_WAIT_S = 0.3
# If the pack that would count instead is not loaded either: loading both would take longer than the file alone.
_COLD_WAIT_S = 2.0
# How often folders are looked at for new files.
_RECHECK_S = 60.0
# Wildcard deployments get their model names from clients.
_MAX_QUESTIONS = 4096
_MAX_TEMPLATES = 64
# As `families.py` promises of a near family's template.
_NEAR_ERROR, _EXACT_ERROR = 0.05, 0.02
_FILE_SUFFIXES = (".gguf", ".json")


class _Question(NamedTuple):
    """The facts that decide about a source: the operator's word, LM Studio's, and the model's name.

    `wanted` is None if no file can be here.
    """

    written: str
    architecture: str
    model: str
    wanted: WantedModel | None


class Sources:
    """The sources of all deployments; without arguments the package's own vocabularies only.

    Args:
        tokenizer: the global setting; "" or `auto` is the usual order.
        files: of the LM Studio on this machine.
        is_folder_given: the operator says that `files` are those of servers elsewhere too, as in a container.
        on_failure: is told once of each file that cannot be used; None writes a warning.
        wait_s: for how long a request may wait for a file to be read.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        tokenizer: str = "",
        files: ModelFiles | None = None,
        is_folder_given: bool = False,
        on_failure: Callable[[str], None] | None = None,
        wait_s: float = _WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._files = files
        self._is_folder_given = is_folder_given
        self._on_failure = on_failure or _warn
        self._wait_s = wait_s
        self._found: Kept[_Question, TokenizerSource] = Kept(
            self._search, lambda _: _RECHECK_S, most=_MAX_QUESTIONS, clock=clock
        )
        self._templates: Kept[str, str] = Kept(_template, lambda _: math.inf, most=_MAX_TEMPLATES, clock=clock)
        self._told: set[str] = set()

    @classmethod
    def of(cls, settings: Settings, *, on_failure: Callable[[str], None] | None = None) -> Sources:
        """The sources that an operator's settings allow."""
        folder = expanded(settings.models_folder) if settings.models_folder else None
        return cls(
            tokenizer=settings.tokenizer,
            files=ModelFiles(folder),
            is_folder_given=folder is not None,
            on_failure=on_failure,
        )

    async def family(self, target: Target, window: Window) -> Family:
        """The family that counts a deployment's prompts, with the template that its server says is in effect."""
        source = await self.source(target, window.architecture, window.wanted)
        return await self.in_effect(source, window.template) if window.template else source.family

    async def source(
        self, target: Target, architecture: str, wanted: WantedModel | None, *, patient: bool = False
    ) -> TokenizerSource:
        """Returns the source that counts a deployment's prompts: from memory in microseconds. Never raises.

        A file is read in a thread, once. While that lasts, requests wait for 0.3 s from its beginning at most, 2 s
        if the next source would have to be loaded too; then the next source counts, which is exact or errs high.

        Args:
            target: the deployment.
            architecture: as LM Studio lists it; "" if it was not asked.
            wanted: as LM Studio lists the model; None if it was not asked.
            patient: wait until all has been read.
        """
        question = self._question(target, architecture, wanted)
        if not _may_have_file(question):
            return _without_file(question)
        if patient:
            return await self._found.get(question)
        wait_s = 0.0 if self._found.has(question) else self._patience_s(question)
        return await self._found.soon(question, wait_s=wait_s) or _without_file(question)

    async def in_effect(self, source: TokenizerSource, template: str, *, patient: bool = False) -> Family:
        """A source's family with another template; less sure of itself until that is ready, and if it cannot be used.

        Without the model's own vocabulary a rendered prompt cannot be counted better than by the formula.

        Args:
            source: counts the model otherwise.
            template: source of the other one.
            patient: wait until it is ready.
        """
        family = source.family
        if not family.owns_vocabulary or is_template(family.template, template):
            return family
        ready = self._templates
        name = await (ready.get(template) if patient else ready.soon(template, wait_s=self._wait_s))
        if not name:
            return replace(family, exact=False, error_ratio=max(family.error_ratio, _NEAR_ERROR))
        rendered = replace(family, template=name, tool_template="")
        return replace(rendered, exact=True, error_ratio=_EXACT_ERROR) if source.path is not None else rendered

    async def aclose(self) -> None:
        """Waits for no file any more."""
        await self._found.aclose()
        await self._templates.aclose()

    def _question(self, target: Target, architecture: str, wanted: WantedModel | None) -> _Question:
        written = target.tokenizer or self._tokenizer
        written = "" if written == AUTO_TOKENIZER else written
        is_reachable = self._is_folder_given or is_this_machine(target.api_base)
        return _Question(
            written=written,
            architecture=architecture,
            model=target.model,
            wanted=wanted if self._files is not None and is_reachable else None,
        )

    def _patience_s(self, question: _Question) -> float:
        instead = _without_file(question)
        is_cold = instead.kind == "pack" and not is_loaded(instead.family.vocabulary)
        return _COLD_WAIT_S if is_cold else self._wait_s

    async def _search(self, question: _Question) -> TokenizerSource:
        source = await asyncio.to_thread(self._search_now, question)
        for failure in source.failures:
            if failure not in self._told:
                self._told.add(failure)
                self._on_failure(failure)
        return source

    def _search_now(self, question: _Question) -> TokenizerSource:
        base = family_of(question.architecture, question.model)
        failures: list[str] = []
        for kind, path in self._places(question):
            try:
                file = load_tokenizer_file(path)
            except UnusableModelFile as error:  # noqa: PERF203 - two at most
                failures.append(str(error))
            else:
                found = with_file(base, file)
                return TokenizerSource(kind=kind, family=found, path=file.path, failures=tuple(failures))
        return replace(bundled(base), failures=tuple(failures))

    def _places(self, question: _Question) -> Iterator[tuple[Kind, Path]]:
        """The files that may hold the vocabulary, in the order of sources."""
        path = tokenizer_path(question.written) if question.written else None
        if path is not None:
            yield "operator", path
        if question.wanted is not None and question.wanted.path:
            # Relative to the folder in which the server was started, which is not known.
            own = Path(question.wanted.path)
            if own.is_absolute() and own.suffix.lower() == ".gguf" and own.is_file():
                yield "server_file", own
        elif question.wanted is not None and self._files is not None:
            found = self._files.find(question.wanted)
            if found is not None:
                yield "lm_studio_file", found


async def _template(source: str) -> str:
    return await asyncio.to_thread(template_name, source)


def _may_have_file(question: _Question) -> bool:
    return tokenizer_path(question.written) is not None if question.written else question.wanted is not None


@lru_cache(maxsize=_MAX_QUESTIONS)
def _without_file(question: _Question) -> TokenizerSource:
    base = family_of(question.architecture, question.model)
    if question.written == HEURISTIC.name:
        return TokenizerSource(kind="heuristic", family=replace(HEURISTIC, reasons=base.reasons, rereads=base.rereads))
    if question.written and tokenizer_path(question.written) is None:
        named = replace(family_of("", question.written), reasons=base.reasons, rereads=base.rereads)
        return replace(bundled(named), kind="operator")
    return bundled(base)


def _warn(failure: str) -> None:
    logger.warning("tokenizer %s The next source counts meanwhile.", failure)


Kind: TypeAlias = Literal["operator", "lm_studio_file", "server_file", "pack", "stand_in", "heuristic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """The vocabulary and the template that count a deployment's prompts.

    Attributes:
        kind: the vocabulary's origin.
        family: counts with it.
        path: of the file; None if the vocabulary is not from one.
        failures: faults of the sources that should have come before it, and what to do.
    """

    kind: Kind
    family: Family
    path: Path | None = None
    failures: tuple[str, ...] = ()

    @property
    def template(self) -> Literal["file", "package", "formula"]:
        """The chat template's origin; a formula may stand for it."""
        if not self.family.template:
            return "formula"
        return "file" if self.family.template.startswith("file:") else "package"


def with_file(base: Family, file: TokenizerFile) -> Family:
    """The family counted with a file: exactly, if the file has the template too.

    Args:
        base: its costs stand for what the template refuses.
    """
    own = replace(
        base,
        vocabulary=file.vocabulary,
        template=file.template,
        tool_template=file.tool_template,
        owns_vocabulary=True,
        exact=True,
        text_ratio=1.0,
        single_digits=False,
        error_ratio=_EXACT_ERROR,
        # A tokenizer.json says nothing of that, and its model may be the same.
        rereads=file.rereads or (base.rereads and file.path.suffix.lower() != ".gguf"),
    )
    if file.template:
        return own
    error_ratio = max(base.error_ratio, _NEAR_ERROR) if base.template else FORMULA_ERROR
    return replace(own, template=base.template, exact=False, error_ratio=error_ratio)


def bundled(family: Family) -> TokenizerSource:
    """The family as this package counts it, with its own vocabulary or a stand-in."""
    return TokenizerSource(kind="pack" if family.owns_vocabulary else "stand_in", family=family)


def check_tokenizer(value: str, place: str) -> None:
    """Makes sure that a `tokenizer:` setting can be followed; reads the file, so that it is there from the start.

    Args:
        value: as written.
        place: how the key is called in errors.

    Raises:
        ConfigError: there is no such file, it cannot be used, or no such model is known.
    """
    if value in (AUTO_TOKENIZER, HEURISTIC.name):
        return
    path = tokenizer_path(value)
    if path is None:
        if family_of("", value).name == "unknown":
            raise ConfigError(
                f"{place} = {value!r}: allowed: {AUTO_TOKENIZER}, {HEURISTIC.name}, the path of a .gguf or "
                "tokenizer.json file or of the folder with it, or a model's name of a known family (llama-3.1-8b)"
            )
        return
    try:
        load_tokenizer_file(path)
    except UnusableModelFile as error:
        raise ConfigError(
            f"{place} = {value!r}: {error.problem}. Write the path of an intact .gguf or tokenizer.json file of the "
            f"model, or `{AUTO_TOKENIZER}`."
        ) from error


def check_sources(settings: Settings, place: str) -> None:
    """Makes sure that the global settings about tokenizers can be followed.

    Raises:
        ConfigError: see `check_tokenizer`; or `models_folder` is no folder.
    """
    check_tokenizer(settings.tokenizer, f"{place}.tokenizer")
    if settings.models_folder and not _is_folder(expanded(settings.models_folder)):
        raise ConfigError(
            f"{place}.models_folder = {settings.models_folder!r}: allowed: a folder that is there, as the proxy sees "
            "it, with LM Studio's <publisher>/<model> folders in it; or leave it out"
        )


def tokenizer_path(value: str) -> Path | None:
    """The path that a `tokenizer:` setting is; None if it is `auto`, `heuristic` or a model."""
    if value in (AUTO_TOKENIZER, HEURISTIC.name):
        return None
    looks_like_path = "/" in value or "\\" in value or value.lower().endswith(_FILE_SUFFIXES)
    return expanded(value) if looks_like_path or _is_folder(Path(value)) else None


@lru_cache(maxsize=256)
def is_this_machine(api_base: str | None) -> bool:
    """Returns True if an address certainly leads to the machine that the proxy runs on."""
    if not api_base:
        return False
    try:
        host = urlsplit(api_base if "//" in api_base else f"//{api_base}").hostname or ""
        return host == "localhost" or host.endswith(".localhost") or _is_own(ipaddress.ip_address(host))
    except ValueError:
        return False


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_loopback or address.is_unspecified


def expanded(value: str) -> Path:
    """The path that an operator wrote, with `~` for the home folder."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        # There is no home folder; the reader will say that there is no such file.
        return Path(value)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
