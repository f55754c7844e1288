"""Checks a config file as written, before any server is asked. Loads no LiteLLM.

`service.py` raises the first finding with which the proxy must not start, `doctor` and `up` print them all. LiteLLM
ignores keys that it does not know, so settings in a wrong place would count as not written: `mode: observe` one level
too high would leave the guard acting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, NamedTuple

from litellm_compaction.config import DeploymentSettings, Settings, deployment_settings_from, settings_from
from litellm_compaction.errors import ConfigError
from litellm_compaction.master_key import KEY_VARIABLE
from litellm_compaction.places import ENVIRONMENT_PREFIX
from litellm_compaction.proxy.client import mapping
from litellm_compaction.tokenizers.registry import check_tokenizer

SECTION = "litellm_compaction"
SETTINGS_PLACE = f"callback_settings.{SECTION}"
HANDLER = f"{SECTION}.handler"
API_BASE_VARIABLE = "LM_STUDIO_API_BASE"

_LIKENESS_RATIO = 0.92
# Places of our settings that nobody reads: surely ours, and maybe. LiteLLM would send those in litellm_params to the
# model's server. `mode` is its own key in model_info (chat, embedding, …), and another callback, or a later LiteLLM,
# may use the word `compaction` for itself.
_OURS = frozenset(f"callback_settings.{name}" for name in Settings.model_fields)
_ITS_SETTINGS = "|".join(DeploymentSettings.model_fields.keys() - {"mode"})
_MAYBE_OURS = re.compile(
    r"(?!model_list)(.*\.)?compaction|model_list\[\d+\]"
    rf"((\.litellm_params)?\.compaction|(\.(litellm_params|model_info))?\.({_ITS_SETTINGS}))"
)
_NOT_READ = (
    f"settings are not read here: move them to `{SETTINGS_PLACE}` (top level), those of one deployment to its "
    "`model_info: {compaction: {…}}`."
)


class Finding(NamedTuple):
    """A problem makes `doctor` fail, and its message names the remedy; with an `error` the proxy refuses to start.

    One that `passes` does so when a server comes: `up` starts with it.
    """

    level: Literal["problem", "note"]
    place: str
    message: str
    error: ConfigError | None = None
    passes: bool = False


problem, note = partial(Finding, "problem"), partial(Finding, "note")


def check_config(data: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that a config file itself shows, in the order of a reader's interest.

    `data` is the file as LiteLLM reads it, its includes merged in; `environ` is for values such as `os.environ/NAME`.
    """
    listed = mapping(data.get("litellm_settings")).get("callbacks")
    # LiteLLM takes a bare string for a list of one, which replaces all other callbacks.
    if not isinstance(listed, list) or listed.count(HANDLER) != 1:
        line = f'write `callbacks: ["{HANDLER}"]` under `litellm_settings`'
        yield problem("litellm_settings.callbacks", f"the plug-in must be listed once, or nothing is guarded: {line}.")
    settings = settings_from(None)
    try:
        settings = settings_from(mapping(data.get("callback_settings")).get(SECTION)).with_store(environ)
        check_tokenizer(settings.tokenizer, f"{SETTINGS_PLACE}.tokenizer")
    except ConfigError as error:
        yield _refused(SETTINGS_PLACE, error)
    if settings.mode != "guard":
        meaning = "nothing is changed, only logged" if settings.mode == "observe" else "nothing is done"
        where = "where a deployment has no mode of its own. Write `mode: guard` to guard."
        yield note(f"{SETTINGS_PLACE}.mode", f"mode is {settings.mode}: {meaning} {where}")
    for place, key, value in _walk(data, ""):
        is_like = get_close_matches(key.lower(), (SECTION, HANDLER), cutoff=_LIKENESS_RATIO)
        is_ours = place in _OURS or (is_like and place != SETTINGS_PLACE)
        if is_ours or _MAYBE_OURS.fullmatch(place):
            yield problem(place, _NOT_READ, ConfigError(f"{place}: {_NOT_READ}") if is_ours else None)
        name = value.removeprefix(ENVIRONMENT_PREFIX) if isinstance(value, str) else value
        # The start sets some itself.
        if name != value and name not in (KEY_VARIABLE, API_BASE_VARIABLE) and not environ.get(str(name)):
            yield problem(place, f"the environment variable {name} is not set: set it where the proxy starts.")
    deployments = entries_of(data)
    if not deployments:
        yield problem("model_list", "there is no deployment: add one, as in the shipped config.yaml.")
    for index, entry in enumerate(deployments):
        yield from _deployment(entry, entry_name(entry, index), settings)


def entries_of(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    entries = data.get("model_list")
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def entry_name(entry: Mapping[str, Any], index: int) -> str:
    name = entry.get("model_name")
    return name if isinstance(name, str) and name else f"model_list[{index}]"


def _refused(place: str, error: ConfigError) -> Finding:
    return problem(place, f"the proxy refuses to start with it: {str(error).removeprefix(f'{place}: ')}", error)


def _walk(value: object, section: str) -> Iterator[tuple[str, str, object]]:
    """All that a value holds, at any depth: place, key, value; the items of a list by their numbers."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        place = f"{section}[{key}]" if isinstance(value, list) else f"{section}.{key}".removeprefix(".")
        yield place, str(key), inner
        yield from _walk(inner, place)


def _deployment(entry: Mapping[str, Any], name: str, settings: Settings) -> Iterator[Finding]:
    params, info = mapping(entry.get("litellm_params")), mapping(entry.get("model_info"))
    if not isinstance(params.get("model"), str) or not params["model"]:
        yield problem(f"{name}: litellm_params.model", "it is missing: name the model, such as lm_studio/*.")
    place = f"model_info.compaction of {name!r}"
    try:
        own = deployment_settings_from(info.get("compaction"), place)
        settings.for_deployment(own, place)
        check_tokenizer(own.tokenizer, f"{place}.tokenizer")
    except ConfigError as error:
        yield _refused(place, error)
