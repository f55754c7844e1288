"""The questions that LM Studio answers about a loaded model by its SDKs' protocol, and how far its counts are believed.

Called by `windows.py`. A question that is not answered is None here: who asks goes on with what there is without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import ceil, inf
from typing import Annotated, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import JsonObject, JsonValue, Request
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.lmstudio import Tokens, text_or_empty
from litellm_compaction.windows.lmstudio_history import history_of
from litellm_compaction.windows.lmstudio_rpc import CallRefused, LMStudioRpc

logger = logging.getLogger("litellm_compaction")

# A longer question would hold others up while it is written, for more than 5 ms (CPython 3.11, 2026-11).
_MOST_CHARS = 1_000_000
# `countTokens` may add the token that begins a prompt, or a chat the beginning of the answer: no more than this.
_MOST_CONSTANT_TOKENS = 32
# A larger share of a prompt is no constant yet: a count that is 13 % too low looks like one in a short prompt.
_MOST_CONSTANT_RATIO = 0.02
# Two numbers for one prompt that are no further apart are the same.
_SAME_TOKENS, _SAME_RATIO = 2, 0.005
_DOUBTED_S = 3600.0
# An agent's tools may take so long between two requests.
_SHORT_TTL_S = 300.0
_KEPT_PRICES, _MOST_PRICE_DOUBT = 8, 0.01
_MAX_TARGETS, _MAX_TOLD = 4096, 1024


class Instance(NamedTuple):
    """A loaded copy of a model: of which server, by which key, under which identifier."""

    api_base: str
    api_key: str | None
    identifier: str


class LoadedModel(BaseModel, frozen=True):
    """A loaded copy as the protocol lists it.

    Attributes:
        reference: another one after each load.
        ttl_ms: without a request for so long it is unloaded; None for never.
    """

    identifier: str
    context_length: Tokens = Field(None, alias="contextLength")
    reference: Annotated[str, BeforeValidator(text_or_empty)] = Field("", alias="instanceReference")
    ttl_ms: Tokens = Field(None, alias="ttlMs")

    @property
    def ttl_s(self) -> float | None:
        """`ttl_ms` in seconds."""
        return self.ttl_ms / 1000 if self.ttl_ms else None


class Prediction(NamedTuple):
    """The settings with which LM Studio makes a model answer; "" and None where it does not say.

    Attributes:
        template: Jinja source of the chat template in effect; "" where it is not Jinja.
        overflow_policy: `stopAtLimit`, `truncateMiddle`, `rollingWindow`.
        thinks: whether thinking is switched on.
    """

    template: str
    overflow_policy: str
    thinks: bool | None

    def in_words(self, ttl_s: float | None) -> str:
        """For people; "" where there is nothing to say."""
        thinking = {True: "thinking on", False: "thinking off", None: ""}[self.thinks]
        overflow = f"a prompt that is too long: {self.overflow_policy}" if self.overflow_policy else ""
        ttl = f"unloaded after {ttl_s / 60:,.0f} min without a request" if ttl_s is not None else ""
        return ", ".join(filter(None, (overflow, ttl, thinking)))

    def works_against(self, ttl_s: float | None) -> list[str]:
        """What of it works against this package, and what to choose."""
        found: list[str] = []
        if self.overflow_policy == "rollingWindow":
            what = "drops the oldest messages, the system message first, of a prompt that is too long after all"
            found.append(f"LM Studio {what}: choose `stopAtLimit` as its context overflow policy.")
        if ttl_s is not None and ttl_s < _SHORT_TTL_S:
            what = f"LM Studio unloads the model after {ttl_s:,.0f} s without a request"
            why = "a load takes long, and may choose another context length"
            found.append(f"{what}; {why}: give it a longer idle time to live.")
        return found


class Told(NamedTuple):
    """What the protocol has counted of a request, and our counts of what it leaves out.

    Attributes:
        tokens: as the protocol counts.
        beside_tokens: of reasoning and extras.
        media_tokens: of its images, whose number is `images`.
    """

    tokens: int
    beside_tokens: int = 0
    media_tokens: float = 0.0
    images: int = 0


class LMStudioQuestions:
    """Asks LM Studio about its loaded models.

    Args:
        rpc: carries the questions.
        clock: seconds, monotonic.
    """

    def __init__(self, rpc: LMStudioRpc, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rpc = rpc
        self._clock = clock
        self._told: Bounded[tuple[str, int], Told] = Bounded(_MAX_TOLD)
        # Of late: an answer's tokens for each token of our estimate, and for each image.
        self._prices: Bounded[str, tuple[tuple[float, float], ...]] = Bounded(_MAX_TARGETS)
        self._constants: Bounded[str, int] = Bounded(_MAX_TARGETS)
        self._doubted_until_s: Bounded[str, float] = Bounded(_MAX_TARGETS)

    def is_usable(self, instance: Instance) -> bool:
        """Whether a question may be asked now."""
        return self._rpc.is_usable(instance.api_base, instance.api_key)

    def is_believed(self, target_key: str) -> bool:
        """Whether its counts were those of its answers, as far as both are known."""
        return self._clock() >= self._doubted_until_s.get(target_key, 0.0)

    async def tokens(self, instance: Instance, request: Request) -> int | None:
        """The tokens of a request's rendered prompt, without images and reasoning.

        Raises:
            CallRefused: the model is gone, or its template raises.
        """
        text = await self.rendered(instance, request)
        if text is None or len(text) > 4 * _MOST_CHARS:
            return None
        counted = await self._ask(instance, "countTokens", _Counted, inputString=text)
        return counted.token_count if counted is not None else None

    async def rendered(self, instance: Instance, request: Request, *, begins: bool = False) -> str | None:
        """A request as the model's template writes it, and behind it what the protocol cannot say of it.

        Args:
            instance: the loaded copy.
            request: at most 1 MB of it; a longer one gives None.
            begins: the prompt is to be sent as it is; the token that begins every prompt is the server's to add.

        Raises:
            CallRefused: as `tokens`.
        """
        chars = sum(
            len(message.text) + sum(len(call.arguments) for call in message.calls) for message in request.messages
        )
        if chars > _MOST_CHARS:
            return None
        history = history_of(request)
        rendered = await self._ask(
            instance,
            "applyPromptTemplate",
            _Rendered,
            history={"messages": history.messages},
            predictionConfigStack={"layers": []},
            opts={
                **({"toolDefinitions": history.tools} if history.tools else {}),
                **({"omitBosToken": True} if begins else {}),
            },
        )
        return rendered.formatted + history.unsaid if rendered is not None else None

    async def loaded(self, instance: Instance) -> frozenset[LoadedModel] | None:
        """Every language model that its server has loaded."""
        try:
            rows = await self._rpc.call(instance.api_base, instance.api_key, "listLoaded", None)
            return _LOADED.validate_python(rows)
        except (ServerUnavailable, ValidationError):
            return None

    async def prediction(self, instance: Instance) -> Prediction | None:
        """With which settings it would answer a request."""
        try:
            config = await self._ask(instance, "getBasePredictionConfig", _Config)
        except CallRefused:
            return None
        if config is None:
            return None
        values = {each.key.removeprefix("llm.prediction."): each.value for each in config.fields}
        thinks = values.get("reasoning.enableThinking")
        return Prediction(
            template=_jinja(values.get("promptTemplate")),
            overflow_policy=text_or_empty(values.get("contextOverflowPolicy")),
            thinks=thinks if isinstance(thinks, bool) else None,
        )

    async def is_busy(self, instance: Instance) -> bool:
        """Whether it works on a prompt or an answer, or has some waiting; False where it does not say."""
        try:
            state = await self._ask(instance, "getInstanceProcessingState", _State, throwIfNotFound=False)
        except CallRefused:
            # The call is experimental (lmstudio-js 6ec11db).
            return False
        return state is not None and (state.status != "idle" or bool(state.queued))

    def corrected(self, target_key: str, fingerprint: int, told: Told) -> int | None:
        """What a chat completion will count; its answer is compared later.

        Args:
            target_key: the deployment.
            fingerprint: of the request; 0 for one that no answer will belong to.
            told: of the request.

        Returns:
            None if it has images whose price is unknown, or not known well enough.
        """
        if fingerprint:
            self._told[target_key, fingerprint] = told
        tokens = told.tokens + self._constants.get(target_key, 0) + told.beside_tokens
        if not told.images:
            return tokens
        # Servers charge by area, or the same for each image: without knowing which, only what both say is known.
        by_area, by_number = map(max, zip(*self._prices.get(target_key, ((inf, inf),)), strict=True))
        least, most = sorted((by_area * told.media_tokens, by_number * told.images))
        return tokens + ceil(most) if most < inf and most - least <= _MOST_PRICE_DOUBT * tokens else None

    def has_price(self, target_key: str) -> bool:
        """Returns True if an answer has taught what images cost."""
        return target_key in self._prices

    def is_unconfirmed(self, target_key: str, fingerprint: int) -> bool:
        """Returns True for a prompt that the protocol has counted, of a model whose answers have confirmed no count."""
        return (target_key, fingerprint) in self._told and target_key not in self._constants

    def compare(self, target_key: str, model: str, fingerprint: int, prompt_tokens: int) -> None:
        """Holds a count against the number in the answer to the same request.

        Both are equal, or a constant apart, which is learned; otherwise the answers' numbers count for an hour.

        Args:
            target_key: the deployment.
            model: its name in logs.
            fingerprint: of the request.
            prompt_tokens: its answer's number.
        """
        told = self._told.pop((target_key, fingerprint), None)
        if told is None:
            return
        constant, known = prompt_tokens - told.tokens, self._constants.get(target_key)
        same_tokens = max(_SAME_TOKENS, _SAME_RATIO * told.tokens)
        if told.images:
            # Reasoning in older turns may not be in the number.
            if (price := constant - (known or 0)) > 0 and told.media_tokens and told.beside_tokens <= same_tokens:
                one = (price / told.media_tokens, price / told.images)
                self._prices[target_key] = (*self._prices.get(target_key, ()), one)[-_KEPT_PRICES:]
        elif told.beside_tokens:
            # A template shows it or leaves it out. Anything between is no reason for doubt.
            if known is None and min(abs(constant), abs(constant - told.beside_tokens)) <= same_tokens:
                self._constants[target_key] = 0
        elif known is None and abs(constant) <= _MOST_CONSTANT_TOKENS:
            if abs(constant) <= max(_SAME_TOKENS, _MOST_CONSTANT_RATIO * told.tokens):
                self._constants[target_key] = constant
        elif abs(constant - (known or 0)) > same_tokens:
            self._constants.pop(target_key, None)
            if self.is_believed(target_key):
                logger.warning(
                    "ask_server model=%s: LM Studio's protocol counted %d tokens and its answer %d for one prompt; for "
                    "an hour the answers' numbers count alone",
                    model,
                    told.tokens,
                    prompt_tokens,
                )
            self._doubted_until_s[target_key] = self._clock() + _DOUBTED_S

    async def aclose(self) -> None:
        """Closes the sockets."""
        await self._rpc.aclose()

    async def _ask(
        self, instance: Instance, endpoint: str, shape: type[_Shape], **parameter: JsonValue
    ) -> _Shape | None:
        """The answer about one instance; None where none comes, or another than the protocol's.

        Raises:
            CallRefused: LM Studio answered that it does not do that.
        """
        asked: JsonObject = {
            # A query for a loaded model: it loads none.
            "specifier": {"type": "query", "query": {"identifier": instance.identifier}},
            **parameter,
        }
        try:
            return shape.model_validate(await self._rpc.call(instance.api_base, instance.api_key, endpoint, asked))
        except CallRefused:
            raise
        except (ServerUnavailable, ValidationError):
            return None


def _jinja(value: object) -> str:
    if not isinstance(value, dict) or value.get("type") != "jinja":
        return ""
    jinja = value.get("jinjaPromptTemplate")
    return text_or_empty(jinja.get("template")) if isinstance(jinja, dict) else ""


_Shape = TypeVar("_Shape", bound=BaseModel)


class _Rendered(BaseModel):
    formatted: str


class _Counted(BaseModel):
    token_count: Annotated[int, Field(alias="tokenCount", gt=0)]


_LOADED = TypeAdapter(frozenset[LoadedModel])


class _Value(BaseModel):
    key: str
    value: object = None


class _Config(BaseModel):
    fields: list[_Value]


class _State(BaseModel):
    status: str
    queued: Tokens = None
