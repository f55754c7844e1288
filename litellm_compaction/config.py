"""The operator's settings, with unit, default and reason; everything else is refused at start.

`callback_settings.litellm_compaction` in config.yaml becomes `Settings`, `model_info.compaction` of a deployment
becomes `DeploymentSettings`, and `Settings.for_deployment` joins the two.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, get_origin

import regex
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from litellm_compaction.core.budget import RESERVES_MAX_RATIO
from litellm_compaction.core.strategies import STRATEGIES
from litellm_compaction.errors import ConfigError
from litellm_compaction.places import ENVIRONMENT_PREFIX, EXAMPLES, PROXYS_OWN, is_redis, parse_redis, store_url

_MAX_PATTERN_CHARS = 2000


class _Among:
    """A validator of pydantic's: a name must stand in a table, which may still grow."""

    def __init__(self, table: Mapping[str, object]) -> None:
        self.table = table

    def __call__(self, name: str) -> str:
        if name not in self.table:
            *first, last = map(repr, self.table)
            raise ValueError(f"Input should be {', '.join(first)} or {last}")
        return name


StrategyName: TypeAlias = Annotated[str, AfterValidator(_Among(STRATEGIES))]


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The words that a setting may have; empty for a number, a switch, or a name of the operator's."""
    return _choices((*field.metadata, field.annotation))


def _choices(parts: Sequence[object]) -> tuple[str, ...]:
    for part in parts:
        if get_origin(part) is Literal:
            return tuple(map(str, get_args(part)))
        if isinstance(part, AfterValidator) and isinstance(part.func, _Among):
            return tuple(part.func.table)
        if found := _choices(get_args(part)):
            return found
    return ()


# A longer instruction takes a small model's window from the conversation.
_MAX_BYTES = 16 * 1024
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@functools.lru_cache(maxsize=64)
def read_prompt(strategy: StrategyName, path: str) -> str:
    """The prompt in the file `path`, with the placeholders of `strategy`; read once in the life of a process.

    Raises:
        ValueError: it cannot be read, or its placeholders are not the strategy's; says what is allowed.
    """
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{strategy}: {path}: {error.strerror}; allowed: a readable text file") from None
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{strategy}: {path}: longer than allowed: {_MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{strategy}: {path}: allowed: text in UTF-8") from None
    required, optional = STRATEGIES[strategy].placeholders
    found = set(_PLACEHOLDER.findall(text))
    unknown = sorted(found - {*required, *optional})
    missing = [name for name in required if name not in found]
    if unknown or missing:
        wrong = [*(f"unknown placeholder {{{name}}}" for name in unknown), *(f"without {{{name}}}" for name in missing)]
        known = ", ".join(f"{{{name}}}" for name in required)
        more = ", ".join(f"{{{name}}}" for name in optional)
        raise ValueError(f"{strategy}: {path}: {', '.join(wrong)}; required: {known}; allowed besides: {more}")
    return text


Mode = Literal["guard", "observe", "off"]
Ratio = Annotated[float, Field(gt=0.0, lt=1.0)]

SAME_MODEL = "__same__"
AUTO_TOKENIZER = "auto"
RESERVES = ("system_reserve_tokens", "output_reserve_tokens", "safety_buffer_tokens")
# A trigger below this would compact every request.
_LEAST_THRESHOLD_TOKENS = 256
_Reserve = Annotated[int, Field(ge=0, le=10_000_000)]
# SQLite's own `:memory:` would be lost with each of our connections, and we do not read options after `?`.
_STORE = re.compile(r"memory://|sqlite://(/(?!:memory:)[^?#\n]+)?")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator(
        *("admission", "background", "keep_originals", "mode", "notices", "page", "recall", "redact"),
        mode="before",
        check_fields=False,
    )
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        # YAML 1.1 reads a bare `off` as false.
        return "off" if value is False else value

    @field_validator("page", "redact", mode="before", check_fields=False)
    @classmethod
    def _yaml_on(cls, value: object) -> object:
        return "on" if value is True else value

    @field_validator("threshold_tokens", check_fields=False)
    @classmethod
    def _threshold_is_off_or_large(cls, value: int | None) -> int | None:
        if value is not None and 0 < value < _LEAST_THRESHOLD_TOKENS:
            raise ValueError(f"allowed: 0 (the ratio decides), or at least {_LEAST_THRESHOLD_TOKENS} tokens")
        return value


_SETTINGS_PLACE = "callback_settings.litellm_compaction"
_SectionT = TypeVar("_SectionT", bound=_Section)


class Live(NamedTuple):
    """Marks a setting that can be changed at run time; `text` is shown on the page in place of its description."""

    label: str
    text: str = ""


_PRUNING_MODEL = Live(
    "Pruning model",
    "Model used to compact conversation history when approaching the context limit. Choose a fast, capable model.",
)
# Marks a setting that a deployment may have of its own.
_OF_DEPLOYMENT = object()


class Settings(_Section):
    """Global settings under `callback_settings: litellm_compaction:`."""

    pruning_model: Annotated[str, _PRUNING_MODEL, _OF_DEPLOYMENT] = Field(
        SAME_MODEL,
        min_length=1,
        description="`model_name` that writes summaries; `__same__`: the model that answers.",
    )
    strategy: Annotated[StrategyName, Live("Strategy"), _OF_DEPLOYMENT] = Field(
        "summary",
        description="How the old part is condensed. summary: a record, then recent messages. prune: the model "
        "chooses the messages to drop. handoff: a record and the last request.",
    )
    notices: Annotated[Literal["auto", "content", "reasoning", "off"], Live("Notices"), _OF_DEPLOYMENT] = Field(
        "auto",
        description="Where a streaming client reads of a compaction. auto: people (browsers, Open WebUI with "
        "its user headers) in the text; programs in a thought before the answer, or at the end of "
        "a cut one. content, reasoning: always there. off: nowhere.",
    )
    mode: Annotated[Mode, Live("Mode"), _OF_DEPLOYMENT] = Field(
        "guard",
        description="guard: compacts. observe: only logs and counts the compactions that it would make. off: disabled.",
    )
    pre_request_ratio: Annotated[Ratio, Live("Compact a prompt above"), _OF_DEPLOYMENT] = Field(
        0.80,
        description="Compact before sending if prompt + output buffer are above this share of the window.",
    )
    streaming_ratio: Annotated[Ratio, Live("Carry an answer over at"), _OF_DEPLOYMENT] = Field(
        0.90, description="Stop, compact and continue a running answer at this share of the window."
    )
    # Windows of 8,192 tokens and more leave thoughts of 500 to 4,000 alone (an estimate, no measurement). At 0.25 only
    # those of 16,000 would; above 0.5 the streaming limit comes first, behind any prompt that was compacted (0.4).
    reasoning_budget_ratio: Annotated[float, Live("End a thought at"), _OF_DEPLOYMENT] = Field(
        0.50,
        ge=0.0,
        le=1.0,
        description="Share of the window for the thinking before one answer; then the thought is ended and "
        "the model answers. 0: only the window ends it. A client's own budget comes first; a "
        "request for high effort has no limit but the window.",
    )
    target_ratio: Annotated[Ratio, Live("Compact down to"), _OF_DEPLOYMENT] = Field(
        0.40, description="Share of the window that a compaction shrinks to. Low, so that compactions are rare."
    )
    output_buffer_ratio: Annotated[float, Live("Set aside for the answer"), _OF_DEPLOYMENT] = Field(
        0.20, ge=0.0, lt=1.0, description="Share of the remaining window that is set aside for the answer."
    )
    output_buffer_min_tokens: int = Field(
        1000, ge=0, description="Least tokens set aside for the answer; at most 10 % of the window."
    )
    threshold_tokens: Annotated[int, _OF_DEPLOYMENT] = Field(
        0,
        ge=0,
        le=100_000_000,
        description="Compact above this many tokens of conversation (system messages and tools not counted). "
        "Replaces the ratio and the reserves. 0: off. A prompt that does not fit is always "
        "compacted.",
    )
    system_reserve_tokens: Annotated[_Reserve, _OF_DEPLOYMENT] = Field(
        0,
        description="Part of the window for system messages and tools. With any reserve set, compaction begins at "
        "`pre_request_ratio` of (window − reserves), and the output buffer is not added.",
    )
    output_reserve_tokens: Annotated[_Reserve, _OF_DEPLOYMENT] = Field(
        0, description="Part of the window for the answer; see above."
    )
    safety_buffer_tokens: Annotated[_Reserve, _OF_DEPLOYMENT] = Field(
        0, description="Part of the window that stays free; see above. All reserves count for 75 % of it at most."
    )
    keep_recent_messages: int = Field(
        5, ge=1, le=1000, description="Messages at the end that stay verbatim if they fit."
    )
    keep_images: int = Field(
        3,
        ge=0,
        le=100,
        description="Newest images that stay in a compacted prompt if they fit. Those of old tool results go "
        "first, then the user's own. 0: only images of the newest message are kept.",
    )
    max_restarts: int = Field(3, ge=0, le=20, description="Restarts of one answer, over all its phases.")
    max_summary_calls: int = Field(
        4, ge=0, le=20, description="Summary jobs for one client request; 0 compacts without a model."
    )
    clear_tool_results: bool = Field(
        True,
        description="Old tool results may give way to one line each, if that alone reaches the target and "
        "saves a summary.",
    )
    tool_schemas: Literal["keep", "slim"] = Field(
        "keep",
        description="slim: send tools without examples and titles, and with shortened descriptions, since "
        "agents fill small windows with tools. The model then reads less about a tool's use.",
    )
    prompt_file: Mapping[StrategyName, str] = Field(
        {},
        description="Files with your own prompts, by strategy: `{handoff: /etc/litellm/handoff.txt}`.",
    )
    summary_max_tokens: int = Field(
        800, ge=64, le=16_000, description="Longest summary; also about a twelfth of the window at most."
    )
    summary_timeout_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="Time limit of a summary, its parts and their merging included.",
    )
    warm_up_timeout_s: float = Field(600.0, gt=0, le=7200, description="Time that LM Studio may take to load a model.")
    carrier: Literal["auto", "hooks"] = Field(
        "auto",
        description="Carries answers over the limit. auto: below LiteLLM's OpenAI client if possible. hooks: "
        "only by LiteLLM's hooks.",
    )
    heartbeat_s: float = Field(
        10.0, gt=0, le=600, description="Longest silence of a stream that waits for a compaction."
    )
    oversized_tool_result: Literal["error", "excerpt"] = Field(
        "error", description="For a tool result that cannot fit. error: refuse. excerpt: send its head and tail."
    )
    oversized_user_message: Literal["error", "excerpt"] = Field(
        "error", description="For a user message that cannot fit. error: refuse. excerpt: send its head and tail."
    )
    tokenizer: Annotated[str, _OF_DEPLOYMENT] = Field(
        AUTO_TOKENIZER,
        min_length=1,
        description="Counts prompts: the path of a model's tokenizer.json, or of its folder; the name of a "
        "similar model (`llama-3.1-8b`); `heuristic`, 4 characters a token. `auto`: the vocabularies in "
        "this package, by the model's architecture and name.",
    )
    when_not_loaded: Literal["warm_up", "error"] = Field(
        "warm_up",
        description="A model that is not loaded has no window. warm_up: load it by a one-token request. error: refuse.",
    )
    window_cache_s: float = Field(
        5.0,
        gt=0,
        le=3600,
        description="Age at which a context length is read again from the server.",
    )
    ask_server: Literal["auto", "off"] = Field(
        "auto",
        description="auto: ask LM Studio by the protocol of its own SDKs, a WebSocket on the same port, for "
        "exact counts if they decide, and for models that were loaded "
        "anew. This generates and loads nothing. off: only estimates and usage.",
    )
    ask_server_timeout_s: float = Field(
        1.0,
        gt=0,
        le=60,
        description="Time limit of one such question; after a slow answer the server is not asked for a while.",
    )
    answer_min_tokens: int = Field(
        256, ge=16, le=100_000, description="Least room for an answer; a request that leaves less is refused."
    )
    reasoning_answer_min_tokens: int = Field(
        1024, ge=16, le=100_000, description="The same for models that think before they answer."
    )
    allow_opt_out: bool = Field(
        False, description='A request may switch the guard off with metadata {"compaction": "off"}.'
    )
    admins_see_text: bool = Field(
        False,
        description="Administrators see the text of others' records on the page, not only the numbers (docs/page.md).",
    )
    admission: Literal["auto", "pool", "off"] = Field(
        "auto",
        description="Parallel requests queue for the context that they share. auto: if LM Studio tells that "
        "the model serves several at once. pool: always. off: never.",
    )
    admission_timeout_s: float = Field(
        300.0, gt=0, le=7200, description="How long a request may queue for context shared with other requests."
    )
    background: Annotated[Literal["off", "idle"], _OF_DEPLOYMENT] = Field(
        "idle",
        description="idle: write a conversation's next record ahead, while its server is idle; the next "
        "request ends that call. At most 20 an hour for each tenant and model. Only for local "
        "servers whose every user the proxy sees: off if other programs use them.",
    )
    store: str = Field(
        "sqlite://",
        # It may hold a password.
        repr=False,
        description="Where compactions are kept. `sqlite://`: a file in the user's data folder. "
        "`sqlite:////path`: another file. `memory://`: this process. `redis://…`: a Redis that "
        "several machines share (docs/scale.md).",
    )
    page: Literal["on", "off"] = Field(
        "on",
        description="The proxy serves the settings and history page at `/compaction`, to holders of its keys.",
    )
    store_ttl_s: float = Field(7 * 86_400.0, gt=0, description="An unused compaction is deleted after this time.")
    store_max_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        description="Largest size of stored data in a file or the memory; a file takes about a third more.",
    )
    keep_originals: Annotated[Literal["off", "compacted"], _OF_DEPLOYMENT] = Field(
        "off",
        description="compacted: keep the messages that a compaction covers, encrypted with the master key, "
        "for look-ups (docs/recall.md). off: keep none.",
    )
    recall: Annotated[Literal["off", "tool", "auto"], _OF_DEPLOYMENT] = Field(
        "auto",
        description="How a model finds kept messages; needs `keep_originals`. tool: a compacted request with "
        "tools gets one more tool, and the proxy answers its calls. auto: the same; a request "
        "without tools gets quotations about the person's newest words. off: nothing.",
    )
    originals_ttl_s: float = Field(
        30 * 86_400.0, gt=0, description="Kept messages are deleted after this time, looked up or not."
    )
    originals_max_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        description="Largest size of kept messages in a file or the memory; then the oldest of the largest scope go.",
    )

    redact: Literal["on", "off"] = Field(
        "on",
        description="Leave keys, tokens, passwords and the like out of stored text: the ledger, summaries, "
        "the store. The prompt keeps the user's text.",
    )
    redact_patterns: tuple[str, ...] = Field(
        (),
        max_length=100,
        description="Your own patterns (as Python's `re`) for secrets: their group `secret`, otherwise the "
        "whole match. If one takes over 0.2 s in a text, the rest of that text is left out. Use "
        "bounded quantifiers: `{1,40}`, not `+`.",
    )

    @field_validator("redact_patterns")
    @classmethod
    def _patterns_are_readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if len(pattern) > _MAX_PATTERN_CHARS:
                raise ValueError(f"too long: {len(pattern)} characters, at most {_MAX_PATTERN_CHARS}")
            try:
                compiled = regex.compile(pattern)
            except (regex.error, RecursionError, OverflowError) as error:
                raise ValueError(f"the pattern {pattern!r} cannot be read: {error}") from None
            if compiled.match("") is not None:
                raise ValueError(f"the pattern {pattern!r} matches the empty text")
        return value

    @field_validator("prompt_file")
    @classmethod
    def _prompts_are_readable(cls, value: Mapping[StrategyName, str]) -> Mapping[StrategyName, str]:
        for strategy, path in value.items():
            read_prompt(strategy, path)
        return value

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, value: str) -> str:
        if value == PROXYS_OWN or value.startswith(ENVIRONMENT_PREFIX):
            return value
        if is_redis(value):
            parse_redis(value)
        elif not _STORE.fullmatch(value):
            raise ValueError(
                "allowed: sqlite:// (a file in the user's data folder), sqlite:///relative/file, "
                f"sqlite:////absolute/file, memory://, {EXAMPLES}"
            )
        return value

    @model_validator(mode="after")
    def _ratios_are_ordered(self) -> Settings:
        if not self.target_ratio < self.pre_request_ratio <= self.streaming_ratio:
            raise ValueError(
                "target_ratio must be below pre_request_ratio, and that not above streaming_ratio "
                f"(now {self.target_ratio}, {self.pre_request_ratio} and {self.streaming_ratio} of the window)"
            )
        return self

    def with_store(self, environ: Mapping[str, str]) -> Settings:
        """These settings with a variable's value if `store` names one.

        Raises:
            ConfigError: it is not set.
        """
        try:
            url = store_url(self.store, environ)
        except ValueError as error:
            raise ConfigError(f"{_SETTINGS_PLACE}.store: {error}") from None
        return self if url == self.store else _parse(Settings, {**self.model_dump(), "store": url}, _SETTINGS_PLACE)

    def own_prompt(self, strategy: StrategyName) -> str:
        """The operator's prompt for a strategy, as read at start; "" for the built-in one."""
        path = self.prompt_file.get(strategy)
        return read_prompt(strategy, path) if path else ""

    def for_deployment(self, own: DeploymentSettings, place: str = "model_info.compaction") -> Settings:
        """These settings with a deployment's own values on top, which stand at `place`.

        Raises:
            ConfigError: the two together contradict each other.
        """
        changes = own.model_dump(exclude_none=True, exclude={"enabled", "context_length"})
        joined = _parse(Settings, {**self.model_dump(), **changes}, place) if changes else self
        if own.context_length is not None:
            joined._must_leave_room(own.context_length, place)
        return joined

    def _must_leave_room(self, window_tokens: int, place: str) -> None:
        reserves = {name: value for name in RESERVES if (value := getattr(self, name))}
        most = math.floor(RESERVES_MAX_RATIO * window_tokens)
        if sum(reserves.values()) > most and not self.threshold_tokens:
            named = " + ".join(f"{name} = {value}" for name, value in reserves.items())
            raise ConfigError(
                f"{place}: {named}: allowed together: 0 to {most}, 75 % of context_length {window_tokens}"
            )
        if self.threshold_tokens >= window_tokens:
            raise ConfigError(
                f"{place}.threshold_tokens = {self.threshold_tokens}: allowed: 0, or {_LEAST_THRESHOLD_TOKENS} to "
                f"{window_tokens - 1}, below context_length"
            )


# In the order of the page.
LIVE: Mapping[str, Live] = {
    name: mark for name, field in Settings.model_fields.items() for mark in field.metadata if isinstance(mark, Live)
}


class _DeploymentSettings(_Section):
    """`model_info: compaction:` of one deployment; the global settings fill the gaps."""

    enabled: bool | None = Field(
        None, description="true: guard it, also if it is not LM Studio. false: leave this deployment alone."
    )
    context_length: int | None = Field(
        None,
        ge=256,
        le=100_000_000,
        description="Window in tokens, used only if the server itself tells none.",
    )


if TYPE_CHECKING:

    class DeploymentSettings(_DeploymentSettings):
        # As far as they are read by name.
        tokenizer: str | None
        pruning_model: str | None

else:

    def _optional(field: FieldInfo) -> Any:
        parts = (field.annotation, *field.metadata)
        return Annotated[parts] | None, None

    DeploymentSettings = create_model(
        "DeploymentSettings",
        __base__=_DeploymentSettings,
        **{name: _optional(field) for name, field in Settings.model_fields.items() if _OF_DEPLOYMENT in field.metadata},
    )


# Settings of earlier versions, and what to do in their place; CHANGELOG.md has them, too.
_REMOVED = {
    "count": "leave it out; the server is asked wherever doubt would decide",
    "models_folder": "leave it out; for a model that this package does not know name its tokenizer.json in `tokenizer`",
    "tokenizer_download": "fetch the model's tokenizer.json yourself (`hf download`), and name its path in `tokenizer`",
}


def settings_from(section: object) -> Settings:
    """Checks `callback_settings.litellm_compaction`; None is all defaults.

    Raises:
        ConfigError: an unknown key or a bad value; names key, value and allowed range.
    """
    return _parse(Settings, section, _SETTINGS_PLACE)


def deployment_settings_from(section: object, place: str = "model_info.compaction") -> DeploymentSettings:
    """Checks a deployment's `model_info.compaction`; `place` names it in errors.

    Raises:
        ConfigError: an unknown key or a bad value; names key, value and allowed range.
    """
    return _parse(DeploymentSettings, section, place)


def _parse(kind: type[_SectionT], section: object, place: str) -> _SectionT:
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{place} must be a mapping of settings, not {type(section).__name__}")
    try:
        return kind.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigError("; ".join(_finding(kind, section, place, found) for found in error.errors())) from None


def _finding(kind: type[_Section], section: Mapping[object, object], place: str, found: Mapping[str, object]) -> str:
    location = found["loc"]
    key, *inner = (str(part) for part in location) if isinstance(location, tuple) and location else ("",)
    if found["type"] == "extra_forbidden" and key in _REMOVED:
        return f"{place}: {key!r} was removed: {_REMOVED[key]}"
    if found["type"] == "extra_forbidden":
        near = get_close_matches(key, kind.model_fields, n=1, cutoff=0.8)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        return f"{place}: unknown key {key!r}" + (meant or f"; known keys: {', '.join(sorted(kind.model_fields))}")
    message = ": ".join((*inner[:1], str(found["msg"]).removeprefix("Value error, ")))
    if not key:
        return f"{place}: {message}"
    return f"{place}.{key} = {_shown(kind, key, section.get(key))}: {message}"


def _shown(kind: type[_Section], key: str, value: object) -> str:
    """A value in an error; of one that may hold a password, only how it begins."""
    is_open = key not in kind.model_fields or kind.model_fields[key].repr
    if is_open or not isinstance(value, str) or value.startswith("sqlite:") or not {"@", "?"} & set(value):
        return repr(value)
    return repr(f"{value.partition(':')[0]}:…" if ":" in value else "…")
