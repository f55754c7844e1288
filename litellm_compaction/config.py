"""The operator's settings, with unit, default and reason; everything else is refused at start.

`Settings` are `callback_settings.litellm_compaction` in config.yaml, `DeploymentSettings` a `model_info.compaction`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args, get_origin

import pydantic
import regex
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from litellm_compaction.core.prompts import STRATEGIES
from litellm_compaction.errors import ConfigError
from litellm_compaction.places import ENVIRONMENT_PREFIX, FORMS, PROXYS_OWN, is_redis, parse_redis


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The numbers that no operator has to choose; `Settings.constants` hands them out, and a test may put others."""

    # Those of settings that are read from now on.
    current: ClassVar[Constants]

    # Set aside for the answer: a share of the remaining window, and so much at least, but 10 % of the window at most.
    output_buffer_ratio: float = 0.20
    output_buffer_min_tokens: int = 1000
    # A request that leaves less room for an answer is refused; the second is for models that think first.
    answer_min_tokens: int = 256
    reasoning_answer_min_tokens: int = 1024
    # Share of the window for the thinking before one answer; above 0.5 the streaming limit comes first.
    reasoning_budget_ratio: float = 0.50
    keep_images: int = 3
    clear_tool_results: bool = True
    # Longest summary (a twelfth of the window, too), and most jobs for one request; without any no model is asked.
    summary_max_tokens: int = 800
    max_summary_calls: int = 4
    # LM Studio may take so long to load a model; a stream that waits for a compaction is silent so long at most.
    warm_up_timeout_s: float = 600.0
    heartbeat_s: float = 10.0
    window_cache_s: float = 5.0
    # LM Studio is asked by the protocol of its own SDKs; after a slow answer not for a while.
    ask_server: bool = True
    ask_server_timeout_s: float = 1.0
    # A request may queue so long for context that others share.
    admission_timeout_s: float = 300.0


Constants.current = Constants()


def _strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise ValueError(f"Input should be one of {', '.join(map(repr, STRATEGIES))}")
    return name


StrategyName: TypeAlias = Annotated[str, AfterValidator(_strategy)]


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The words that a setting may have; empty for a number, a switch, or a name of the operator's."""
    if AfterValidator(_strategy) in field.metadata:
        return tuple(STRATEGIES)
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


Ratio = Annotated[float, Field(gt=0.0, lt=1.0)]

SAME_MODEL = "__same__"
AUTO_TOKENIZER = "auto"
# SQLite's own `:memory:` would be lost with each of our connections, and we do not read options after `?`.
_STORE = re.compile(r"memory://|sqlite://(/(?!:memory:)[^?#\n]+)?")
_OFF_OR_ON = ("admission", "background", "keep_originals", "mode", "notices", "page", "recall")


class _Section(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)

    @field_validator(*_OFF_OR_ON, mode="before", check_fields=False)
    @classmethod
    def _yaml_words(cls, value: object) -> object:
        # YAML 1.1 reads a bare `off` as false, and `on` as true.
        return ("off", "on")[value] if isinstance(value, bool) else value


_SETTINGS_PLACE = "callback_settings.litellm_compaction"
_SectionT = TypeVar("_SectionT", bound=_Section)


# Those that can be changed at run time, in the page's order.
LIVE = ("pruning_model", "strategy", "notices", "mode", "pre_request_ratio", "streaming_ratio", "target_ratio")


class _OwnSettings(_Section):
    """Settings that a deployment may have of its own, too."""

    pruning_model: Annotated[str, Field(min_length=1)] = SAME_MODEL
    """Model used to compact conversation history when approaching the context limit. Choose a fast, capable model: any
    `model_name`, or `__same__`, the model that answers."""
    strategy: StrategyName = "summary"
    """How the old part is condensed. summary: a record, then recent messages. prune: the model chooses the messages to
    drop. handoff: a record and the last request."""
    notices: Literal["auto", "content", "reasoning", "off"] = "auto"
    """Where a streaming client reads of a compaction. auto: people (browsers, Open WebUI with its user headers) in the
    text; programs in a thought before the answer, or at the end of a cut one. content, reasoning: always there. off:
    nowhere."""
    mode: Literal["guard", "observe", "off"] = "guard"
    """guard: compacts. observe: only logs and counts the compactions that it would make. off: disabled."""
    pre_request_ratio: Ratio = 0.80
    """Compact before sending if prompt + output buffer are above this share of the window."""
    streaming_ratio: Ratio = 0.90
    """Stop, compact and continue a running answer at this share of the window."""
    target_ratio: Ratio = 0.40
    """Share of the window that a compaction shrinks to. Low, so that compactions are rare."""
    threshold_tokens: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Compact above this many tokens of conversation (system messages and tools not counted). Replaces the ratio and
    the reserve. 0: off. A prompt that does not fit is always compacted."""
    reserve_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Part of the window that no conversation may take. With it compaction begins at `pre_request_ratio` of (window −
    reserve), and the output buffer is not added. It counts for 75 % of the window at most."""
    tokenizer: Annotated[str, Field(min_length=1)] = AUTO_TOKENIZER
    """Counts prompts: the path of a model's tokenizer.json, or of its folder; the name of a similar model
    (`llama-3.1-8b`); `heuristic`, 4 characters a token. `auto`: the vocabularies in this package, by the model's
    architecture and name."""
    background: Literal["off", "idle"] = "idle"
    """idle: write a conversation's next record ahead, while its server is idle; the next request ends that call. Only
    for local servers whose every user the proxy sees: off if other programs use them."""
    keep_originals: Literal["off", "compacted"] = "off"
    """compacted: keep the messages that a compaction covers, encrypted with the master key, for look-ups
    (docs/recall.md). off: keep none."""
    recall: Literal["off", "tool", "auto"] = "auto"
    """How a model finds kept messages; needs `keep_originals`. tool: a compacted request with tools gets one more tool,
    and the proxy answers its calls. auto: the same; a request without tools gets quotations about the person's newest
    words. off: nothing."""


class DeploymentSettings(_OwnSettings):
    """`model_info: compaction:` of one deployment; of what it leaves out the global settings decide."""

    enabled: bool | None = None
    """true: guard it, also if it is not LM Studio. false: leave this deployment alone."""
    context_length: Annotated[int | None, Field(ge=256, le=100_000_000)] = None
    """Window in tokens, used only if the server itself tells none."""

    @cached_property
    def changes(self) -> dict[str, object]:
        """The global settings that it has values of its own for."""
        return {name: getattr(self, name) for name in _OwnSettings.model_fields if name in self.model_fields_set}


NO_CHANGES = DeploymentSettings()


class Settings(_OwnSettings):
    """Global settings under `callback_settings: litellm_compaction:`."""

    keep_recent_messages: Annotated[int, Field(ge=1, le=1000)] = 5
    """Messages at the end that stay verbatim if they fit."""
    max_restarts: Annotated[int, Field(ge=0, le=20)] = 3
    """Restarts of one answer, over all its phases."""
    summary_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Time limit of a summary, all its parts included."""
    carrier: Literal["auto", "hooks"] = "auto"
    """Carries answers over the limit. auto: below LiteLLM's OpenAI client if possible. hooks: only by LiteLLM's
    hooks."""
    oversized_tool_result: Literal["error", "excerpt"] = "error"
    """For a tool result that cannot fit. error: refuse. excerpt: send its head and tail."""
    oversized_user_message: Literal["error", "excerpt"] = "error"
    """For a user message that cannot fit. error: refuse. excerpt: send its head and tail."""
    when_not_loaded: Literal["warm_up", "error"] = "warm_up"
    """A model that is not loaded has no window. warm_up: load it by a one-token request. error: refuse."""
    allow_opt_out: bool = False
    """A request may switch the guard off with metadata {"compaction": "off"}."""
    admins_see_text: bool = False
    """Administrators see the text of others' records on the page, not only the numbers (docs/page.md)."""
    admission: Literal["auto", "pool", "off"] = "auto"
    """Parallel requests queue for the context that they share. auto: if LM Studio tells that the model serves several
    at once. pool: always. off: never."""
    # It may hold a password.
    store: Annotated[str, Field(repr=False)] = "sqlite://"
    """Where compactions are kept. `sqlite://`: a file in the user's data folder. `sqlite:////path`: another file.
    `memory://`: this process. `redis://…`: a Redis that several machines share (docs/scale.md)."""
    page: Literal["on", "off"] = "on"
    """The proxy serves the settings and history page at `/compaction`, to holders of its keys."""
    store_ttl_s: Annotated[float, Field(gt=0)] = 7 * 86_400.0
    """An unused compaction is deleted after this time."""
    store_max_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    """Largest size of data in a file or the memory; a file takes a third more. Lowered, it holds after some writes."""
    originals_ttl_s: Annotated[float, Field(gt=0)] = 30 * 86_400.0
    """Kept messages are deleted after this time, looked up or not."""
    originals_max_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024
    """Largest size of kept messages in a file or the memory; then the oldest of the largest scope go."""
    redact_patterns: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    """Your own patterns (as Python's `re`) for secrets: their group `secret`, otherwise the whole match. If one takes
    over 0.2 s in a text, the rest of that text is left out. Use bounded quantifiers: `{1,40}`, not `+`."""

    @cached_property
    def constants(self) -> Constants:
        return Constants.current

    def with_constants(self, constants: Constants) -> Settings:
        other = self.model_copy()
        vars(other)["constants"] = constants
        return other

    def with_values(self, values: Mapping[str, object], place: str = "") -> Settings:
        """These settings with others on top; WrongSettings, at `place`, says which cannot be."""
        with _refusing(Settings, values, place):
            return Settings.model_validate({**self.model_dump(), **values}).with_constants(self.constants)

    @field_validator("redact_patterns")
    @classmethod
    def _patterns_are_readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if len(pattern) > 2000:
                raise ValueError(f"too long: {len(pattern)} characters, at most 2000")
            try:
                compiled = regex.compile(pattern)
            except (regex.error, RecursionError, OverflowError) as error:
                raise ValueError(f"the pattern {pattern!r} cannot be read: {error}") from None
            if compiled.match("") is not None:
                raise ValueError(f"the pattern {pattern!r} matches the empty text")
        return value

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, value: str) -> str:
        if is_redis(value) and value != PROXYS_OWN:
            parse_redis(value)
        elif not (value == PROXYS_OWN or value.startswith(ENVIRONMENT_PREFIX) or _STORE.fullmatch(value)):
            raise ValueError(
                "allowed: sqlite:// (a file in the user's data folder), sqlite:///relative/file, "
                f"sqlite:////absolute/file, memory://, {FORMS}"
            )
        return value

    @pydantic.model_validator(mode="after")
    def _numbers_fit(self) -> Settings:
        # Almost every request would be compacted: a share of the window was meant, or thousands of tokens.
        if 0 < self.threshold_tokens < 256:
            raise ValueError(f"threshold_tokens = {self.threshold_tokens}: allowed: 0 (the ratio decides), or from 256")
        if not self.target_ratio < self.pre_request_ratio <= self.streaming_ratio:
            raise ValueError(
                "target_ratio must be below pre_request_ratio, and that not above streaming_ratio "
                f"(now {self.target_ratio}, {self.pre_request_ratio} and {self.streaming_ratio} of the window)"
            )
        return self

    def with_store(self, environ: Mapping[str, str]) -> Settings:
        """These settings with a variable's value if `store` names one; a ConfigError says that it is not set."""
        name = self.store.removeprefix(ENVIRONMENT_PREFIX)
        if name == self.store:
            return self
        if not (url := environ.get(name)):
            raise ConfigError(f"{_SETTINGS_PLACE}.store: the variable {name} is not set")
        return self.with_values({"store": url}, _SETTINGS_PLACE)

    def for_deployment(self, own: DeploymentSettings, place: str = "model_info.compaction") -> Settings:
        """These settings with a deployment's own values on top; a ConfigError at `place` says that they contradict."""
        return self.with_values(own.changes, place)


_RESERVE = "write the sum of the reserves as `reserve_tokens`"
_BUFFER = "set `reserve_tokens`, if more of the window has to stay free for the answer"
# Settings of earlier versions, and what to do in their place; CHANGELOG.md has them, too.
_REMOVED = {
    **{field.name: f"leave it out; it is always {field.default} now" for field in fields(Constants)},
    "count": "leave it out; the server is asked wherever doubt would decide",
    "models_folder": "leave it out; name the tokenizer.json of a model that this package does not know in `tokenizer`",
    "output_buffer_min_tokens": _BUFFER,
    "output_buffer_ratio": _BUFFER,
    "output_reserve_tokens": _RESERVE,
    "prompt_file": "leave it out; `strategy` chooses among the prompts of this package, and an extension may add one",
    "redact": "leave it out; known secrets are always left out of stored text, and `redact_patterns` adds your own",
    "safety_buffer_tokens": _RESERVE,
    "system_reserve_tokens": _RESERVE,
    "tokenizer_download": "fetch the model's tokenizer.json yourself (`hf download`), and name its path in `tokenizer`",
    "tool_schemas": "leave it out, and offer fewer or shorter tools in the client",
}


class WrongSettings(ConfigError):
    """Settings that cannot be: `problems` has a sentence by setting, "" for those that stand for the whole section."""

    def __init__(self, place: str, *problems: tuple[str, str]) -> None:
        self.problems = {key: said.lstrip(".: ") for key, said in problems}
        super().__init__("; ".join(dict.fromkeys(f"{place}{said}".lstrip(".: ") for _, said in problems)))


def settings_from(section: object) -> Settings:
    """Checks `callback_settings.litellm_compaction`; a ConfigError names each bad key, value and what is allowed."""
    return _parse(Settings, section, _SETTINGS_PLACE)


def deployment_settings_from(section: object, place: str = "model_info.compaction") -> DeploymentSettings:
    """Checks a deployment's `model_info.compaction`, as `settings_from` does; `place` names it in errors."""
    return _parse(DeploymentSettings, section, place)


def _parse(kind: type[_SectionT], section: object, place: str) -> _SectionT:
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise ConfigError(f"{place} must be a mapping of settings, not {type(section).__name__}")
    with _refusing(kind, section, place):
        return kind.model_validate(dict(section))


@contextlib.contextmanager
def _refusing(kind: type[_Section], values: Mapping[Any, object], place: str) -> Iterator[None]:
    """Puts what pydantic refuses of `values` into words."""
    try:
        yield
    except ValidationError as error:
        problems = [each for wrong in error.errors() for each in _problems(kind, values, wrong)]
        raise WrongSettings(place, *problems) from None


def _problems(kind: type[_Section], values: Mapping[Any, object], wrong: Any) -> Iterator[tuple[str, str]]:
    """One by the setting's name, or for a contradiction, which pydantic files under none, by each that it names."""
    key, *inner = map(str, wrong["loc"] or ("",))
    message = ": ".join((*inner, wrong["msg"].removeprefix("Value error, ")))
    if wrong["type"] != "extra_forbidden":
        is_open = key not in kind.model_fields or kind.model_fields[key].repr
        value = f".{key} = {values.get(key)!r}" if is_open else f".{key}"
        named = [key] if key else [name for name in kind.model_fields if re.search(rf"\b{name}\b", message)]
        yield from ((name, f"{value if key else ''}: {message}") for name in named)
    elif key in _REMOVED:
        yield key, f": {key!r} was removed: {_REMOVED[key]}"
    else:
        near = get_close_matches(key, kind.model_fields, cutoff=0.8)
        meant = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(kind.model_fields))}"
        yield key, f": unknown key {key!r}; {meant}"
