"""LiteLLM's request and response shapes on one side, core messages on the other: here untyped JSON is taken apart."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from litellm_compaction.core.messages import JsonValue, Message, Request, parse_message, user_message
from litellm_compaction.proxy.client import Body, mapping
from litellm_compaction.proxy.routing import without_route

# LiteLLM's additions to a request.
_LITELLM_KEYS = frozenset({"metadata", "litellm_metadata", "proxy_server_request", "secret_fields", "model_info"})
# The OpenAI client puts the first into the body last, over the values of LiteLLM and its deployment.
_EXTRA, _PROVIDER = "extra_body", "custom_llm_provider"
# Fields that a chat and a text completion share, with those of llama.cpp, LM Studio and vLLM.
COMPLETION_KEYS = frozenset((
    "model", "stream", "stream_options", "max_tokens", "stop", "user", "ttl", "seed", "logit_bias", "temperature",
    "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repeat_penalty",
    "repetition_penalty",
))  # fmt: skip
# Fields of a chat that change nothing in the text of an answer without tools.
_CHAT_KEYS = frozenset((
    "messages", "max_completion_tokens", "n", "logprobs", "tools", "functions", "response_format", "store",
    "parallel_tool_calls", "metadata", "service_tier", "prompt_cache_key", "safety_identifier",
))  # fmt: skip
# Bounds on the answer; llama.cpp's own goes before the others there (tools/server, `n_predict`).
_OWN_LIMIT = "n_predict"
_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", _OWN_LIMIT)
# Each shapes a whole document, and not the rest of one: OpenAI's; llama.cpp's own two (tools/server); vLLM's newer
# and older ones ("Structured Outputs"); SGLang's two; Ollama's (api/chat).
DOCUMENT_KEYS = (
    "response_format", "grammar", "json_schema", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "structural_tag", "regex", "ebnf", "format",
)  # fmt: skip
# Answers to each prompt: a server writes them at once (llama.cpp, tools/server, `n` and `n_cmpl`; vLLM `best_of`).
_ANSWERS = ("n", "n_cmpl", "best_of")
# Of `extra_body`: what shapes the prompt or bounds the answer, and so is guarded like the same keys outside of it, and
# what only the deployment decides.
_LIFTED = frozenset((
    *_OUTPUT_LIMITS, *_ANSWERS, "messages", "prompt", "tools", "functions", "tool_choice", "function_call", "stop",
    "logprobs", "top_logprobs", "response_format", "stream_options",
))  # fmt: skip
_NOT_THE_CLIENTS = frozenset({"model", "stream", _PROVIDER})
_TOOLS = ("tools", "functions")  # The second name is the older one.
# Servers hand these to the chat template besides messages and tools: vLLM all of them ("Chat API", extra parameters;
# `suffix` is for text completions), llama.cpp the arguments (tools/server, "merge the template args"), LM Studio the
# effort. Grammars and schemas of the answer, predictions and biases are in no prompt.
EXTRAS = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "suffix")
# Less than the least margin in tokens, so that no ordinary `{"enable_thinking": false}` makes a count an estimate.
_LEAST_EXTRAS_CHARS = 64
_NUMBER = re.compile(r"\s*[+-]?\d{1,18}(\.\d*)?\s*", re.ASCII)
# OpenAI's limit of log probabilities for a token.
_MOST_LOGPROBS = 20
# OpenAI's limit of stop strings, which some servers check.
_MOST_STOPS = 4
# Bounds on thinking, tokens before efforts: Anthropic's, OpenRouter's, llama.cpp's own two, Gemini's (below 0 there is
# none); OpenAI's chats, LiteLLM's own form of that, OpenAI's responses and OpenRouter, Anthropic.
_THOUGHTS = tuple(path.split(".") for path in (
    "thinking.budget_tokens", "reasoning.max_tokens", "thinking_budget_tokens", "reasoning_budget_tokens",
    "generationConfig.thinkingConfig.thinkingBudget", "reasoning_effort", "reasoning_effort.effort", "reasoning.effort",
    "output_config.effort",
))  # fmt: skip
_HIGH_EFFORTS = ("high", "xhigh", "max")
# These make a stream report its usage; by these Ollama refuses a prompt that is too long, also one to be counted.
REPORTS_USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
_REFUSES = {_EXTRA: {"truncate": False, "shift": False}}
# vLLM's words for a last message that goes on (its OpenAI-compatible server, "Chat API").
GOES_ON: Mapping[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
# Anthropic's stop reasons.
_CLIENTS_LIMIT, _WINDOWS_END = "max_tokens", "model_context_window_exceeded"
# The data of an event of its that ends a message, as LiteLLM writes it.
_DATA = re.compile(rb"(?<=\Aevent: message_delta\ndata: )\{.*\}(?=\n)")
# LiteLLM's name for a server of which it knows OpenAI's chat alone, an address where there is none, and the key of a
# deployment's `model_info` for its own arguments meanwhile.
_CHATS_ALONE, _NOWHERE, _OWN = "custom_openai", "http://guarded.invalid/v1", "litellm_compaction_own"
_OF_DEPLOYMENTS = ("model", _PROVIDER, "api_base", "base_url", "api_key", "litellm_credential_name", "model_info")


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int


def _at(value: object, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    return value


def _with_inner(body: Body) -> Body:
    return {**body, **mapping(body.get(_EXTRA))}


def decode(body: Body) -> Request | None:
    """The request in a chat completion's body; None if its shape is not ours to judge, so that it goes on unchanged."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    return Request(
        messages=tuple(map(_message, messages)),
        tools=tuple(_tools(body)),
        tool_choice=body.get("tool_choice"),
        extras=extras_of(body),
    )


def _tools(body: Body) -> Sequence[Any]:
    """The list by the newer name, else by the older one: no server reads both."""
    lists = (value for key in _TOOLS if (value := body.get(key)) and isinstance(value, Sequence))
    return next(lists, ())


def _message(value: object) -> Message:
    """Anything that is no message takes room like one, and its server has the last word on it."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_none=True)
    if not isinstance(value, Mapping):
        return user_message(value if isinstance(value, str) else json.dumps(value, default=str))
    # A copy: what other callbacks change in place shows.
    plain = {**value}
    if plain.get("role") == "tool" and isinstance(parts := plain.get("content"), list):
        # LiteLLM leaves references to tools out on the way to the server.
        left = [part for part in parts if _at(part, "type") != "tool_reference"]
        plain["content"] = left or "" if len(left) < len(parts) else parts
    if isinstance(plain.get("role"), str):
        return parse_message(plain)
    return replace(parse_message({**plain, "role": "unknown"}), raw=plain)


def extras_of(body: Body) -> Mapping[str, JsonValue]:
    """The fields that a server may write into the prompt besides what `decode` reads; none if they are tiny."""
    given = _with_inner(body)
    extras = {key: given[key] for key in EXTRAS if given.get(key) is not None}
    # A server that is asked to count gets what it will be sent.
    extras |= {key: body[key] for key in _TOOLS if body.get(key) and body[key] is not _tools(body)}
    is_tiny = not extras or len(json.dumps([*extras.values()], default=str)) <= _LEAST_EXTRAS_CHARS
    return {} if is_tiny and not Request(messages=(), extras=extras).has_own_template else extras


def decode_text(body: Body) -> Request | None:
    """All prompts of a text completion: texts as messages, token ids by their number; None without any."""
    if "prompt" not in body:
        return None
    listed = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    pieces = [piece for each in listed for piece in (each if isinstance(each, list) else [each])]
    # What is neither takes room like a text, and its server has the last word on it.
    odd = (piece for piece in pieces if type(piece) is not int)
    texts = [piece if isinstance(piece, str) else json.dumps(piece, default=str) for piece in odd]
    if ids := len(pieces) - len(texts):
        # A text between ids has at most a token for each of its bytes.
        return Request(messages=(user_message(""),), token_ids=ids + len("".join(texts).encode("utf-8", "replace")))
    return Request(messages=tuple(map(user_message, texts or [""])), extras=extras_of(body))


def is_same_request(body: Body, request: Request) -> bool:
    """True if a body says the same as `request`; LiteLLM may have written it in other words."""

    messages = body.get("messages")
    if not isinstance(messages, list) or len(messages) != len(request.messages):
        return False
    same = all(map(_is_same_message, messages, request.messages))
    return same and (tuple(_tools(body)), extras_of(body)) == (request.tools, request.extras)


def _is_same_message(value: object, message: Message) -> bool:
    # Of nothing but texts it is told without reading it.
    if all(type(each) is str for each in message.raw.values()) and value == message.raw:
        return True

    def said(each: Message) -> object:
        return each.is_system or each.role, each.text.strip(), each.other_parts, each.calls, each.call_id

    # Read anew: a guardrail may have masked a text inside of a content part, which both share.
    return said(_message(value)) == said(message)


def _limit(value: object) -> int | None:
    """A number as lenient servers read it, in quotes too, without its fraction; None for what is none."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, float) and math.isfinite(value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def asked_output_tokens(body: Body) -> int | None:
    """The client's limit for the answer: the smallest of all spellings; None without a limit."""
    limits = map(_limit, map(body.get, _OUTPUT_LIMITS))
    return min((limit for limit in limits if limit is not None and limit >= 0), default=None)


def asked_thoughts_tokens(original: Body) -> float | None:
    """A client's own bound on thinking in its body as it came: infinite for high effort, None for none."""
    for value in (_at(original, *path) for path in _THOUGHTS):
        if (limit := _limit(value)) is not None or value in _HIGH_EFFORTS:
            return math.inf if limit is None or limit < 0 else limit
    return None


def asks_for_usage(body: Body) -> bool:
    return bool(_at(body, "stream_options", "include_usage"))


def is_structured(body: Body) -> bool:
    """The answer is a document: JSON mode, a schema or a grammar, in which no notice may stand."""
    given = _with_inner(body)
    shapes = (value for key in DOCUMENT_KEYS if (value := given.get(key)) not in (None, "", "text"))
    return any(_at(value, "type") != "text" for value in shapes)


def stops(body: Body) -> tuple[str, ...]:
    """The strings at which the client wants the answer to end."""
    stop = body.get("stop")
    return tuple(each for each in (stop if isinstance(stop, list) else [stop]) if isinstance(each, str) and each)


def can_be_continued(body: Body) -> bool:
    """True if an answer can be joined from two: not with several choices or log probabilities."""
    return body.get("n") in (None, 1) and asked_answers(body) == 1 and not body.get("logprobs")


def asked_logprobs(body: Body) -> int:
    """The number of log probabilities that a client wants for each token: its own one, and those of others."""
    if not body.get("logprobs"):
        return 0
    # A text completion has their number in the first field.
    others = (_limit(body.get(key)) or 0 for key in ("logprobs", "top_logprobs"))
    return 1 + min(max(others), _MOST_LOGPROBS)


def asked_answers(body: Body) -> int:
    """The number of answers that a client wants: to each prompt of a text, by the field that asks for most."""
    prompt, given = body.get("prompt"), _with_inner(body)
    texts = [str(given[key]) for key in _ANSWERS if key in given]
    are_many = isinstance(prompt, list) and not any(type(each) is int for each in prompt)
    # As lenient servers read them.
    answers = max([1, *(int(float(text)) for text in texts if _NUMBER.fullmatch(text))])
    return answers * max(len(prompt or ()), 1) if are_many else answers


def client_texts(body: Body) -> Callable[[], str]:
    """Gives every text in a request, for telling a server's words from the client's; holds no LiteLLM object."""
    sent = [value for key, value in body.items() if key not in _LITELLM_KEYS and isinstance(value, (str, list, dict))]
    return lambda: "\n".join(each for each in _parts(sent) if isinstance(each, str))


def to_json(body: Body) -> bytes:
    """A body with objects of libraries as bytes: ASCII, since lone surrogates, which clients do send, have no UTF-8."""
    return json.dumps(body, separators=(",", ":"), default=lambda each: each.model_dump(exclude_unset=True)).encode()


def _parts(value: object) -> Iterator[object]:
    """All values and keys in JSON, which may be nested deeper than Python calls may be."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, Mapping):
            waiting += [*part, *part.values()]
        elif isinstance(part, list):
            waiting += part


def encode(messages: Sequence[Message], *, like: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """The list for LiteLLM, untouched messages with the client's own keys; roles as in `like`, which LiteLLM wrote."""
    encoded = [dict(message.raw) for message in messages]
    # It makes `developer` a `system` message for servers that do not know that role.
    if like and all(message.get("role") != "developer" for message in like):
        return [{**each, "role": "system"} if each.get("role") == "developer" else each for each in encoded]
    return encoded


def added(body: Body, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` for `body`; of a key that is an object in both, the body's other members stay."""
    # Each object is a new one: LiteLLM takes keys out of those that it gets.
    both = {key: {**mapping(body.get(key)), **value} for key, value in fields.items() if isinstance(value, Mapping)}
    return {**fields, **both}


def refusing(body: Body, provider: str) -> dict[str, Any]:
    """The keys by which Ollama refuses a prompt whose oldest messages it would drop in silence; {} for others."""
    return added(body, _REFUSES) if provider in ("ollama", "ollama_chat") else {}


def with_output_limit(body: Body, limit_tokens: int) -> dict[str, Any]:
    """The keys that bound the answer; a value that is not a number stays, for the server to refuse."""
    given = [key for key in _OUTPUT_LIMITS if body.get(key) is not None]
    odd = {key for key in given if key != _OWN_LIMIT and _limit(body[key]) is None}
    # llama.cpp takes its default, no bound at all, for a value of another type (common, `json_value`).
    bounds = ("max_tokens", *given, *([_OWN_LIMIT] if odd else []))
    return {key: limit_tokens for key in bounds if key not in odd}


def can_be_begun(body: Body) -> bool:
    """True if a text completion can be asked for with all that the client wants of its answer."""
    wanted = {key for key, value in body.items() if value is not None}
    return wanted <= COMPLETION_KEYS | _CHAT_KEYS and not is_structured(body) and not body.get("tools")


def begun(body: Body, prompt: str, end_of_turn: str) -> dict[str, Any]:
    """A chat's body as that of a text completion, which ends at the template's `end_of_turn`, too ("" for none)."""
    kept = {key: value for key, value in body.items() if key in COMPLETION_KEYS and value is not None}
    ends = [*stops(body), *filter(None, [end_of_turn])]
    return {**kept, "prompt": prompt, **({"stop": ends} if 0 < len(ends) <= _MOST_STOPS else {})}


def without_overrides(body: Body, provider: str) -> Body:
    """The arguments of a call to a guarded deployment of `provider`, without those that would send it another way."""
    extra, theirs = mapping(body.get(_EXTRA)), _LIFTED | _NOT_THE_CLIENTS
    is_other_way = bool(provider) and body.get(_PROVIDER) not in (None, provider)
    changed = {**body, _PROVIDER: provider} if is_other_way else body
    if not theirs.isdisjoint(extra):
        lifted = {key: value for key, value in extra.items() if key in _LIFTED}
        changed = {**changed, **lifted, _EXTRA: {key: value for key, value in extra.items() if key not in theirs}}
    return changed


def to_chats_alone(body: Body, provider: str) -> dict[str, Any]:
    """The arguments of a call as to a server that has chats alone, so that LiteLLM makes one; without its address."""
    own = {key: body[key] for key in _OF_DEPLOYMENTS if key in body}
    name = without_route(str(body.get("model")).removeprefix(f"{provider}/"))
    # By these endpoints LiteLLM would send messages and responses as they came (llms/openai_like).
    hidden = {"model_info": {"supported_endpoints": None, _OWN: (name, own)}}
    place = {_PROVIDER: _CHATS_ALONE, "model": f"{_CHATS_ALONE}/{name}", "api_base": _NOWHERE}
    return {**{key: value for key, value in body.items() if key not in own}, **place, **added(body, hidden)}


def from_chats_alone(body: Body) -> Body:
    """The arguments of a call that LiteLLM has made of such a one, with its deployment's own; others as they are."""
    own = _at(body, "model_info", _OWN)
    # A client that names another model meanwhile, as it can over a WebSocket, does not get this one's server.
    if not isinstance(own, tuple) or str(body.get("model")).removeprefix(f"{_CHATS_ALONE}/") != own[0]:
        return body
    return {**{key: value for key, value in body.items() if key not in _OF_DEPLOYMENTS}, **own[1]}


def as_chat(body: Body) -> dict[str, Any]:
    """The keys of a call to a chat that keep LiteLLM from asking for a response, past the client that we give."""
    # LiteLLM's own word to itself, as it makes a chat of a response (main.py).
    return {"model": without_route(str(body.get("model"))), "_skip_responses_api_bridge": True}


def usage_of(response: object) -> Usage | None:
    """The usage that a response or chunk carries, if it is complete."""
    usage = _at(response, "usage")
    prompt, completion = (_limit(_at(usage, f"{part}_tokens")) for part in ("prompt", "completion"))
    if prompt is None or completion is None or prompt <= 0:
        return None
    # Part of the prompt, as OpenAI defines it; if it is more, the server leaves it out of the other number.
    cached = _limit(_at(usage, "prompt_tokens_details", "cached_tokens")) or 0
    return Usage(prompt + cached if cached > prompt else prompt, completion)


def with_details(answer: Any, details: Mapping[str, Any] | None) -> Any:
    """LiteLLM's answer, or a chunk or event of one, with `details` of its end in the usage."""
    if details is None:
        return answer
    if isinstance(answer, (bytes, bytearray)):
        with suppress(ValueError):
            return _DATA.sub(lambda data: json.dumps(_ended(json.loads(data[0]), details)).encode(), answer)
        return answer
    if isinstance(answer, dict):
        return _ended(answer, details) if answer.get("type") == "message" else answer
    usage: Any = _at(answer, "usage") or _at(answer, "response", "usage")
    if usage is not None:
        usage.compaction = dict(details)
    return answer


def _ended(said: Mapping[str, Any], details: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message of Anthropic's, or of the event that ends it: LiteLLM logs the object that it has made."""
    fields: dict[str, Any] = {"usage": {"compaction": dict(details)}} if isinstance(said.get("usage"), Mapping) else {}
    is_cut, reasons = details["outcome"] != "completed", (said.get("stop_reason"), _at(said, "delta", "stop_reason"))
    if is_cut and _CLIENTS_LIMIT in reasons:
        # LiteLLM has no `finish_reason` for Anthropic's own word, and writes the client's limit.
        reason = {"stop_reason": _WINDOWS_END}
        fields |= reason if "stop_reason" in said else {"delta": reason}
    return {**said, **added(said, fields)}
