"""The client's side: its wishes, the places of notices, and the one answer that it reads.

An answer has one id, one role, one finish_reason, and one usage, whatever it is made of (promise P6). A line in the
text is for people who read it: a program takes it for the model's words.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from litellm_compaction.core.messages import Request
from litellm_compaction.events import AnswerOutcome
from litellm_compaction.proxy.answer.sse import Chunk, Received
from litellm_compaction.proxy.client import headers_of, metadata_of, sections_of_owners

Place: TypeAlias = Literal["content", "reasoning", "off"]
Choice: TypeAlias = Literal["auto", "content", "reasoning", "off"]

# Open WebUI forwards the user's identity by headers of these names if ENABLE_FORWARD_USER_INFO_HEADERS is on.
_CHAT_HEADER_PREFIX = "x-openwebui-"
# Every browser begins so; Electron's programs too, and many of those are editors with an agent inside.
_BROWSER_PREFIX, _NO_BROWSER = "mozilla/", "electron/"
# Routes on which thoughts are a delta of their own, and the one on which those of a whole answer have their own field.
_ROUTES_WITH_THOUGHTS, _ROUTE_WITH_THOUGHTS_APART = ("/chat/completions", "/messages"), "/chat/completions"
_USAGE_DETAILS = "completion_tokens_details"


class Notices(NamedTuple):
    """The places of notices in one answer.

    Attributes:
        before: while nothing of the answer has been sent.
        within: after its beginning. The seam can lie in a code block, a diff or JSON.
        after: at its end, if the window has cut it. Nothing follows that a thought could break.
    """

    before: Place
    within: Place
    after: Place

    @property
    def at_the_end_only(self) -> Notices:
        """The same for JSON and for whole answers: nothing before the end, and no text."""
        return Notices("off", "off", "reasoning" if self.after == "reasoning" else "off")


SILENT = Notices("off", "off", "off")


def notices_for(configured: Choice, body: Mapping[str, Any]) -> Notices:
    """The places of notices for the client of a request, whose `body` has LiteLLM's metadata."""
    metadata = metadata_of(body)
    chosen = _chosen_for_owner(metadata) or configured
    route = str(metadata.get("user_api_key_request_route") or "")
    if not body.get("stream") and not route.endswith(_ROUTE_WITH_THOUGHTS_APART):
        return SILENT
    if chosen != "auto":
        return Notices(chosen, chosen, chosen)
    if body.get("stream") and shows_text_to_people(headers_of(body)):
        return Notices("content", "content", "content")
    # LiteLLM's own option writes thoughts into the text.
    has_thoughts = route.endswith(_ROUTES_WITH_THOUGHTS) and not body.get("merge_reasoning_content_in_choices")
    return Notices("reasoning", "off", "reasoning") if has_thoughts else SILENT


def shows_text_to_people(headers: Mapping[str, Any]) -> bool:
    """A client says that a person reads its answers as they are; it is a program otherwise."""
    named = {name.lower(): str(value).lower() for name, value in headers.items()}
    agent = named.get("user-agent", "")
    is_browser = agent.startswith(_BROWSER_PREFIX) and _NO_BROWSER not in agent
    return is_browser or any(name.startswith(_CHAT_HEADER_PREFIX) for name in named)


def _chosen_for_owner(metadata: Mapping[str, Any]) -> Choice | None:
    """The operator's choice for the key, else for its team: `{"compaction": {"notices": "content"}}`."""
    sections = sections_of_owners(metadata)
    values = [section.get("notices") for section in sections if isinstance(section, Mapping)]
    # YAML's bare `off`.
    chosen: list[Choice] = [value or "off" for value in values if value is False or value in get_args(Choice)]
    return next(iter(chosen), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The client's wishes, as far as the loop has to know.

    Attributes:
        output_tokens: its limit for the answer, None for none.
        is_json: structured output: one document, no notice in it.
        wants_usage: the stream must end with a usage chunk.
        stops: strings at which the answer ends.
        thoughts_tokens: its own bound on thinking, infinite for as much as the model likes; None if it names none.
        is_whole: the client gets the answer in one piece, so that nothing of it can be out before its end.
        client_text: gives every text that the client sent, in whatever field.
    """

    request: Request
    output_tokens: int | None
    is_json: bool
    notices: Notices
    wants_usage: bool
    stops: tuple[str, ...] = ()
    thoughts_tokens: float | None = None
    is_whole: bool = False
    client_text: Callable[[], str] = str


@dataclass(slots=True)
class Progress:
    """An answer as far as its client has it, and its cost; of the `lost_tokens` nothing can ever reach the client.

    `text` is that since the model last looked something up; what came before is `earlier_text`.
    """

    text: list[str] = field(default_factory=list)
    reasoning: str = ""
    completion_tokens: int = 0
    lost_tokens: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    usages: list[Mapping[str, Any]] = field(default_factory=list)
    restarts: int = 0
    lookups: int = 0
    delivered: bool = False
    earlier_text: str = ""

    @property
    def sent_text(self) -> str:
        return "".join(self.text)

    @property
    def given_tokens(self) -> int:
        return self.completion_tokens - self.lost_tokens

    @property
    def whole_text(self) -> str:
        return self.earlier_text + self.sent_text

    @property
    def is_json(self) -> bool:
        try:
            json.loads(self.whole_text)
        except ValueError:
            return False
        return True

    def begin_anew(self) -> None:
        """Forgets an answer of which the client has nothing."""
        self.lost_tokens = self.completion_tokens
        self.text.clear()
        self.reasoning = ""

    def part(self) -> str:
        """What goes between the text so far and the rest, which begins as an answer of its own."""
        parting = "\n\n" if self.sent_text.strip() else ""
        self.earlier_text += self.sent_text + parting
        self.text.clear()
        self.reasoning = ""
        return parting

    def usage(self, details: Mapping[str, Any]) -> dict[str, Any]:
        """The first prompt, all generated tokens, and beside that the cost of all that came in between."""
        prompt, completion = next(iter(self.prompt_tokens), 0), self.completion_tokens
        counted = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        first = {key: value for key, value in next(iter(self.usages), {}).items() if key != _USAGE_DETAILS}
        total: Counter[str] = Counter()
        parts = [part for usage in self.usages if isinstance(part := usage.get(_USAGE_DETAILS), Mapping)]
        # A leg that was stopped tells none, and those of the others are no sum.
        for part in parts if len(parts) == len(self.usages) else ():
            total.update({key: value for key, value in part.items() if isinstance(value, int)})
        own_details = {_USAGE_DETAILS: dict(total)} if total else {}
        return {**first, **counted, **own_details, **({"compaction": details} if details else {})}

    def details(self, outcome: AnswerOutcome, receipt: Mapping[str, str]) -> dict[str, Any]:
        """{} for an answer that has come at once; `receipt` is that of a record applied after the headers had gone."""
        if not self.restarts and not self.lookups and not receipt and outcome == "completed":
            return {}
        found = {"lookups": self.lookups} if self.lookups else {}
        prompts = list(self.prompt_tokens)
        return {"outcome": outcome, "restarts": self.restarts, "prompt_tokens": prompts, **found, **receipt}


class OneAnswer:
    """Puts deltas of all legs, and notices, into chunks of one answer."""

    def __init__(self, progress: Progress, notices: Notices) -> None:
        self._progress = progress
        self._notices = notices
        self._base: Chunk = {}
        self._role_sent = False

    def written(self, chunk: Chunk, deltas: Sequence[Chunk]) -> list[Chunk]:
        """What the client gets for `chunk`, which says `deltas`: the chunk itself if it says all of them and no more.

        Most chunks do: writing each anew would be most of our cost for a stream.
        """
        if not self._base and not chunk.get("error"):
            self._base = {key: value for key, value in chunk.items() if key not in ("choices", "usage")}
        if not isinstance(chunk, Received) or len(deltas) != 1 or chunk.get("id") != self._base.get("id"):
            return self.dressed(deltas)
        choices = chunk["choices"]
        if len(choices) == 1 and choices[0].get("finish_reason") is None and not chunk.get("usage"):
            own = {key: value for key, value in choices[0]["delta"].items() if value}
            has_role = own.pop("role", None) is not None
            if own == deltas[0] and has_role != self._role_sent:
                self._role_sent = self._progress.delivered = True
                return [chunk]
        return self.dressed(deltas)

    def dressed(self, deltas: Iterable[Chunk]) -> list[Chunk]:
        """`deltas` as chunks of the one answer: the first stream's id, one role."""
        return [self._dressed(delta) for delta in deltas]

    def _dressed(self, delta: Chunk) -> Chunk:
        delta = {key: value for key, value in delta.items() if key != "role"}
        if not self._role_sent:
            delta = {"role": "assistant", **delta}
        self._role_sent = self._progress.delivered = True
        return {**self._base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def notice(self, text: str) -> list[Chunk]:
        """`text` as a chunk that delivers nothing of the answer; [] if the client is not told here."""
        return self._told(self._notices.within if self._progress.delivered else self._notices.before, text)

    def closing_notice(self, text: str) -> list[Chunk]:
        return self._told(self._notices.after, text)

    def _told(self, place: Place, text: str) -> list[Chunk]:
        if place == "off":
            return []
        return [self._undelivered("content" if place == "content" else "reasoning_content", text)]

    @property
    def is_silent(self) -> bool:
        """Its client has nothing of it, not even a notice."""
        return not self._role_sent

    def opening(self) -> Chunk:
        """The first chunk of an answer that has to wait: empty, so that the client knows that one comes."""
        return self._undelivered("content", "")

    def _undelivered(self, key: str, text: str) -> Chunk:
        if not self._base:
            self._base = {"id": f"chatcmpl-{id(self):x}", "object": "chat.completion.chunk", "created": 0, "model": ""}
        delivered = self._progress.delivered
        chunk = self._dressed({key: text})
        self._progress.delivered = delivered
        return chunk

    def ending(self, reason: str, usage: Mapping[str, Any] | None) -> list[Chunk]:
        """The last chunks; no usage if the client did not ask."""
        chunks: list[Chunk] = [{**self._base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}]
        return chunks if usage is None else [*chunks, {**self._base, "choices": [], "usage": usage}]


def joined(chunks: Iterable[Chunk]) -> Chunk:
    """The chunks of an answer's legs, each call in one, as the one completion for a client that wants no stream."""
    envelope: Chunk = {}
    message: dict[str, Any] = {"role": "assistant"}
    last: dict[str, Any] = {}
    usage = None
    for chunk in chunks:
        envelope.update((key, value) for key, value in chunk.items() if key not in envelope and key != "choices")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            last |= {key: value for key, value in choice.items() if value is not None}
            for key, value in choice["delta"].items():
                goes_on = key != "role" and isinstance(value, (str, list)) and isinstance(message.get(key), type(value))
                if value is not None:
                    message[key] = message[key] + value if goes_on else value
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_whole_call(call) for call in calls]
    message.setdefault("content", None if calls or "refusal" in message else "")
    choice = {**last, "index": 0, "message": message, "finish_reason": last.get("finish_reason") or "stop"}
    del choice["delta"]
    return {**envelope, "object": "chat.completion", "choices": [choice], "usage": usage}


def _whole_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", **{key: value for key, value in call.items() if key != "index" and value is not None}}
