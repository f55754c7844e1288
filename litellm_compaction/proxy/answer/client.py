"""The client's side: its wishes, the places of notices, and the one answer that it reads.

An answer has one id, one role, one finish_reason, and one usage, whatever it is made of (promise P6). A line in the
text is for people who read it: a program takes it for the model's words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from litellm_compaction.core.cuts import open_think
from litellm_compaction.core.messages import DONE_NOTICE, START_NOTICE, THINK_END, Request
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


# ------------------------------------------------------------------ its wishes


class Notices(NamedTuple):
    """The places of notices in one answer."""

    before: Place  # While nothing of the answer has been sent.
    within: Place  # After its beginning. The seam can lie in a code block, a diff or JSON.
    after: Place  # At its end, if the window has cut it. Nothing follows that a thought could break.


SILENT = Notices("off", "off", "off")


def notices_for(configured: Choice, body: Mapping[str, Any]) -> Notices:
    """The places of notices for a request's client; an operator chooses for a key, else for its team."""
    metadata, is_stream = metadata_of(body), bool(body.get("stream"))
    if not is_stream and not _route(body).endswith(_ROUTE_WITH_THOUGHTS_APART):
        return SILENT
    sections = [each for each in sections_of_owners(metadata) if isinstance(each, Mapping)]
    # YAML's bare `off`.
    values: list[Any] = ["off" if each.get("notices") is False else each.get("notices") for each in sections]
    chosen: Choice = next((value for value in values if value in get_args(Choice)), configured)
    if chosen != "auto":
        return Notices(chosen, chosen, chosen)
    if is_stream and shows_text_to_people(headers_of(body)):
        return Notices("content", "content", "content")
    # LiteLLM's own option writes thoughts into the text.
    has_thoughts = shows_late_thoughts(body) and not body.get("merge_reasoning_content_in_choices")
    return Notices("reasoning", "off", "reasoning") if has_thoughts else SILENT


def shows_late_thoughts(body: Mapping[str, Any]) -> bool:
    """Thoughts behind the answer's first words reach the client; LiteLLM makes broken events of them elsewhere."""
    return _route(body).endswith(_ROUTES_WITH_THOUGHTS)


def _route(body: Mapping[str, Any]) -> str:
    return str(metadata_of(body).get("user_api_key_request_route") or "")


def shows_text_to_people(headers: Mapping[str, Any]) -> bool:
    """A client says that a person reads its answers as they are; it is a program otherwise."""
    named = {name.lower(): str(value).lower() for name, value in headers.items()}
    agent = named.get("user-agent", "")
    is_browser = agent.startswith(_BROWSER_PREFIX) and _NO_BROWSER not in agent
    return is_browser or any(name.startswith(_CHAT_HEADER_PREFIX) for name in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The client's wishes, as far as the loop has to know."""

    request: Request
    output_tokens: int | None  # Its limit for the answer.
    is_json: bool  # Structured output: one document, no notice in it.
    notices: Notices
    wants_usage: bool  # The stream must end with a usage chunk.
    stops: tuple[str, ...] = ()  # Strings at which the answer ends.
    thoughts_tokens: float | None = None  # Its own bound on thinking, infinite for as much as the model likes.
    is_whole: bool = False  # It gets the answer in one piece, so that nothing of it can be out before its end.
    takes_late_thoughts: bool = True  # As `shows_late_thoughts` has it.
    client_text: Callable[[], str] = str  # Gives every text that it sent, in whatever field.


# ------------------------------------------------------------------ the one answer


@dataclass(slots=True)
class Cost:
    """The cost of an answer's legs; of the `lost_tokens` nothing can ever reach the client."""

    completion_tokens: int = 0
    lost_tokens: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    usages: list[Mapping[str, Any]] = field(default_factory=list)
    restarts: int = 0
    lookups: int = 0

    @property
    def given_tokens(self) -> int:
        return self.completion_tokens - self.lost_tokens

    def usage(self, details: Mapping[str, Any]) -> dict[str, Any]:
        """The first prompt, all generated tokens, and beside that the cost of all that came in between."""
        prompt, completion = next(iter(self.prompt_tokens), 0), self.completion_tokens
        counted = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        first = dict(next(iter(self.usages), {}))
        if len(self.usages) > 1:
            # A leg that was stopped tells none, and those of the others are no sum.
            first.pop("completion_tokens_details", None)
        return {**first, **counted, **({"compaction": details} if details else {})}

    def details(self, outcome: AnswerOutcome, receipt: Mapping[str, str]) -> dict[str, Any]:
        """{} for an answer that has come at once; `receipt` is that of a record applied after the headers had gone."""
        if not self.restarts and not self.lookups and not receipt and outcome == "completed":
            return {}
        lookups = {"lookups": self.lookups} if self.lookups else {}
        prompts = list(self.prompt_tokens)
        return {"outcome": outcome, "restarts": self.restarts, "prompt_tokens": prompts, **lookups, **receipt}


class OneAnswer:
    """The client's answer so far: deltas of all legs, and notices, in chunks of one."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        # The text ends where a stop would have cut it: no white space follows.
        self.is_settled = True
        # Since the model last looked something up; what came before is `earlier_text`.
        self.text: list[str] = []
        self.earlier_text = self.reasoning = ""
        # The client has some of the model's words; or nothing, not even a notice.
        self.is_delivered, self.is_silent = False, True
        self.waits_since_s: float  # For its server, by the event loop's clock.
        self._notices = asked.notices
        if asked.is_json or asked.is_whole:
            # Nothing before the end, and no text.
            self._notices = SILENT._replace(after="reasoning") if asked.notices.after == "reasoning" else SILENT
        self._base: Chunk = {}

    @property
    def sent_text(self) -> str:
        return "".join(self.text)

    @property
    def whole_text(self) -> str:
        return self.earlier_text + self.sent_text

    def begin_anew(self) -> None:
        """Forgets an answer of which the client has nothing."""
        self.text, self.reasoning = [], ""

    def part(self) -> list[Chunk]:
        """Ends the text so far: the rest begins as an answer of its own."""
        parting = "\n\n" if self.sent_text.strip() else ""
        self.earlier_text += self.sent_text + parting
        self.begin_anew()
        return self.dressed([{"content": parting}] if parting else [])

    def close_thoughts(self) -> list[Chunk]:
        """Ends the thoughts inside which the text stops, so that the rest is none; [] elsewhere."""
        if not open_think(self.sent_text):
            return []
        self.text.append(f"\n{THINK_END}\n\n")
        return [{"content": self.text[-1]}]

    def written(self, chunk: Chunk, deltas: Sequence[Chunk]) -> list[Chunk]:
        """Writes `deltas` for the client as one answer's: as the `chunk` itself if it says all of them and no more.

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
            if own == deltas[0] and has_role == self.is_silent:
                self.is_silent, self.is_delivered = False, True
                return [chunk]
        return self.dressed(deltas)

    def dressed(self, deltas: Iterable[Chunk]) -> list[Chunk]:
        """`deltas` as chunks of the one answer: the first stream's id, one role."""
        chunks = [self._dressed(delta) for delta in deltas]
        self.is_delivered = self.is_delivered or bool(chunks)
        return chunks

    def _dressed(self, delta: Chunk) -> Chunk:
        if not self._base:
            self._base = {"id": f"chatcmpl-{id(self):x}", "object": "chat.completion.chunk", "created": 0, "model": ""}
        own = {key: value for key, value in delta.items() if key != "role"}
        role = {"role": "assistant"} if self.is_silent else {}
        self.is_silent = False
        return {**self._base, "choices": [{"index": 0, "delta": {**role, **own}, "finish_reason": None}]}

    def starts(self) -> list[Chunk]:
        """Tells that a compaction is made; [] if the client is not told here."""
        parting = "\n\n" if self.is_delivered else ""
        return self._notice(f"{parting}{START_NOTICE}\n\n")

    def done(self) -> list[Chunk]:
        return self._notice(f"{DONE_NOTICE}\n\n")

    def ends(self, why: str) -> list[Chunk]:
        return self._notice(f"\n\n{why}", self._notices.after)

    def _notice(self, text: str, place: Place | None = None) -> list[Chunk]:
        """`text` as a chunk that delivers nothing of the answer."""
        place = place or (self._notices.within if self.is_delivered else self._notices.before)
        key = "content" if place == "content" else "reasoning_content"
        return [] if place == "off" else [self._dressed({key: text})]

    def opening(self) -> Chunk:
        """The first chunk of an answer that has to wait: empty, so that the client knows that one comes."""
        return self._dressed({"content": ""})

    def ending(self, reason: str, usage: Mapping[str, Any] | None) -> list[Chunk]:
        """The last chunks; no usage if the client did not ask."""
        chunks: list[Chunk] = [{**self._base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}]
        return chunks if usage is None else [*chunks, {**self._base, "choices": [], "usage": usage}]

    def is_cut_document(self) -> bool:
        """It is asked for as a document, begins like JSON, as one of a grammar need not, and is none."""
        try:
            if self.asked.is_json and self.whole_text.lstrip()[:1] in '{["':
                json.loads(self.whole_text)
        except ValueError:
            return True
        return False


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
        whole = [{key: value for key, value in call.items() if key != "index" and value is not None} for call in calls]
        message["tool_calls"] = [{"type": "function", **call} for call in whole]
    message.setdefault("content", None if calls or "refusal" in message else "")
    choice = {**last, "index": 0, "message": message, "finish_reason": last.get("finish_reason") or "stop"}
    del choice["delta"]
    return {**envelope, "object": "chat.completion", "choices": [choice], "usage": usage}
