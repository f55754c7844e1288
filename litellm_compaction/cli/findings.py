"""What is wrong in a config file as written, before any server is asked. Called by `doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from litellm_compaction.cli.config_file import API_BASE_VARIABLE, ConfigFile, Section
from litellm_compaction.config import (
    DeploymentSettings,
    Settings,
    deployment_settings_from,
    settings_from,
)
from litellm_compaction.errors import ConfigError
from litellm_compaction.master_key import KEY_VARIABLE
from litellm_compaction.proxy.misplaced import SETTINGS_PLACE, misplaced
from litellm_compaction.proxy.routing import BYPASS_VARIABLE, is_bypassed, unknown_model
from litellm_compaction.tokenizers.sources import check_sources, check_tokenizer
from litellm_compaction.windows.lmstudio import DEFAULT_API_BASE

HANDLER = "litellm_compaction.handler"

_CALLBACK_LINE = f'write `callbacks: ["{HANDLER}"]` under `litellm_settings`'
# `--num_workers` and its default (litellm/proxy/proxy_cli.py, 1.106.2).
_WORKERS_VARIABLES = ("NUM_WORKERS", "DEFAULT_NUM_WORKERS_LITELLM_PROXY")
_OTHER_CALLBACK_LISTS = ("success_callback", "failure_callback", "service_callback", "input_callback")
# `mode` is LiteLLM's own key in model_info (chat, embedding, …).
_OWN_KEYS = frozenset(DeploymentSettings.model_fields) - {"mode"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to know; a problem makes `doctor` fail, and its message says what to do."""

    level: Literal["problem", "note"]
    place: str
    message: str


def problem(place: str, message: str) -> Finding:
    """Something that must be changed."""
    return Finding(level="problem", place=place, message=message)


def note(place: str, message: str) -> Finding:
    """Something to know."""
    return Finding(level="note", place=place, message=message)


def config_findings(file: ConfigFile, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Everything that the file itself shows, in the order of a reader's interest."""
    return (
        *_callback(file),
        *_settings(file, environ),
        *_misplaced(file),
        *_deployments(file, environ),
        *_variables(file, environ),
        *_bypass(environ),
        *_master_key(file, environ),
    )


def sharing_findings(names: Sequence[str], store: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What several worker processes mean for deployments whose requests share one context.

    Args:
        names: of those deployments.
        store: its URL; processes that share one reserve room together.
        environ: LiteLLM reads the number of workers from it, where the command line does not say one.
    """
    number = next((environ[name] for name in _WORKERS_VARIABLES if environ.get(name)), "1")
    if names and store.startswith("memory:") and number.isdecimal() and int(number) > 1:
        yield note(
            ", ".join(dict.fromkeys(names)),
            f"their requests share one context, and room in it is reserved within each of the {number} workers only: "
            "set `store: sqlite://`, which they share, or start the proxy with one worker.",
        )


def settings_or_defaults(file: ConfigFile, environ: Mapping[str, str]) -> Settings:
    """The file's settings; the defaults where they are not valid, which `config_findings` reports."""
    try:
        return settings_from(file.settings).with_store(file.data, environ)
    except ConfigError:
        return settings_from(None)


def entry_name(entry: Section, index: int) -> str:
    """How a deployment is called in a report."""
    name = entry.get("model_name")
    return name if isinstance(name, str) and name else f"model_list[{index}]"


def entry_section(entry: Section, name: str) -> Section:
    """`litellm_params` or `model_info` of a deployment; empty where there is none."""
    found = entry.get(name)
    return found if isinstance(found, Mapping) else {}


def _callback(file: ConfigFile) -> Iterator[Finding]:
    place = "litellm_settings.callbacks"
    listed = file.section("litellm_settings").get("callbacks")
    names = [listed] if isinstance(listed, str) else listed if isinstance(listed, list) else []
    if HANDLER not in names:
        alike = next((str(name) for name in names if "compaction" in str(name)), None)
        found = f"{alike!r} is not the handler" if alike else "the plug-in is not listed, so nothing is guarded"
        yield problem(place, f"{found}: {_CALLBACK_LINE}.")
    elif isinstance(listed, str):
        yield problem(place, f"a bare string replaces all other callbacks, a list adds to them: {_CALLBACK_LINE}.")
    elif names.count(HANDLER) > 1:
        yield problem(place, f"{HANDLER} is listed {names.count(HANDLER)} times: leave one.")
    for other in _OTHER_CALLBACK_LISTS:
        value = file.section("litellm_settings").get(other)
        if HANDLER in ([value] if isinstance(value, str) else value if isinstance(value, list) else []):
            yield problem(f"litellm_settings.{other}", f"this list has no request hooks: {_CALLBACK_LINE} instead.")
    shadow = file.path.parent / "litellm_compaction.py"
    if shadow.is_file():
        yield problem(str(shadow), "LiteLLM loads this file instead of the installed package: rename it.")


def _settings(file: ConfigFile, environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        settings = settings_from(file.settings).with_store(file.data, environ)
        check_sources(settings, SETTINGS_PLACE)
    except ConfigError as error:
        what = str(error).removeprefix(f"{SETTINGS_PLACE}: ").rstrip(".")
        yield problem(SETTINGS_PLACE, f"{what}. Correct it: the proxy refuses to start with it.")
        return
    if settings.mode != "guard":
        meaning = "nothing is changed, only logged" if settings.mode == "observe" else "nothing is done"
        yield note(f"{SETTINGS_PLACE}.mode", f"mode is {settings.mode}: {meaning}. Write `mode: guard` to guard.")
    yield from _pruning_model(file, settings.pruning_model, SETTINGS_PLACE)


def _pruning_model(file: ConfigFile, name: str, place: str) -> Iterator[Finding]:
    if why := unknown_model(file.data, name):
        yield problem(f"{place}.pruning_model", f"{why}. Name one of them: the proxy refuses to start with it.")


def _misplaced(file: ConfigFile) -> Iterator[Finding]:
    for found in misplaced(file.data):
        yield problem(found.place, found.advice)


def _deployments(file: ConfigFile, environ: Mapping[str, str]) -> Iterator[Finding]:
    if not file.deployments:
        yield problem("model_list", "there is no deployment: add one, as in the shipped config.yaml.")
    settings = settings_or_defaults(file, environ)
    for index, entry in enumerate(file.deployments):
        name = entry_name(entry, index)
        yield from _misplaced_in_entry(entry, name)
        model = entry_section(entry, "litellm_params").get("model")
        if not isinstance(model, str) or not model:
            yield problem(f"{name}: litellm_params.model", "it is missing: name the model, such as lm_studio/*.")
        place = f"{name}: model_info.compaction"
        try:
            own = deployment_settings_from(entry_section(entry, "model_info").get("compaction"), place)
            settings.for_deployment(own)
            if own.tokenizer is not None:
                check_tokenizer(own.tokenizer, f"{place}.tokenizer")
            if own.pruning_model is not None:
                yield from _pruning_model(file, own.pruning_model, place)
        except ConfigError as error:
            what = str(error).removeprefix(f"{place}: ").rstrip(".")
            yield problem(place, f"{what}. Correct it: the proxy refuses to start with it.")


def _misplaced_in_entry(entry: Section, name: str) -> Iterator[Finding]:
    move = "move it to `model_info: {compaction: {…}}` of this deployment"
    if "compaction" in entry:
        yield problem(f"{name}: compaction", f"settings are not read here: {move}.")
    params = entry_section(entry, "litellm_params")
    for key in sorted((_OWN_KEYS | {"compaction", "model_info"}) & params.keys()):
        target = "move it one level up, beside litellm_params" if key == "model_info" else move
        yield problem(f"{name}: litellm_params.{key}", f"LiteLLM would send this key to the model's server: {target}.")
    for key in sorted(_OWN_KEYS & entry_section(entry, "model_info").keys()):
        yield problem(f"{name}: model_info.{key}", f"settings are not read here: {move}.")


def _variables(file: ConfigFile, environ: Mapping[str, str]) -> Iterator[Finding]:
    for place, name in file.variables():
        if environ.get(name) or name == KEY_VARIABLE:
            continue
        if name == API_BASE_VARIABLE:
            yield note(
                place,
                f"{name} is not set: {DEFAULT_API_BASE} is assumed here, and set by `litellm-compaction up`. "
                "Set it for a server elsewhere.",
            )
        else:
            yield problem(place, f"the environment variable {name} is not set: set it where the proxy starts.")


def _bypass(environ: Mapping[str, str]) -> Iterator[Finding]:
    if is_bypassed(environ):
        yield problem(
            BYPASS_VARIABLE,
            "with it LiteLLM ignores the client below which answers are carried over the limit, so LiteLLM's hooks "
            "do it: unset it to get notices before the summary, and restarts on every route.",
        )


def _master_key(file: ConfigFile, environ: Mapping[str, str]) -> Iterator[Finding]:
    written: Any = file.section("general_settings").get("master_key")
    if isinstance(written, str) and written and not written.startswith("os.environ/"):
        yield note(
            "general_settings.master_key",
            f"the key stands in the file: better write os.environ/{KEY_VARIABLE} and set that variable.",
        )
    elif not environ.get(KEY_VARIABLE):
        yield note(
            KEY_VARIABLE, "it is not set here: `litellm-compaction up` makes and keeps a key; set it to use your own."
        )
