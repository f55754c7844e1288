"""Conversations that are recorded: all routes, streamed and whole, both carriers, all strategies, restarts, refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from litellm_compaction.simulator import Reply
from tests.builders import answered, prose, talk, tool_round, tools
from tests.integration.bench import Group, Script, answers, edit_plan, is_summary_call
from tests.integration.restart_bench import LONG, TEXTS, Teller, asked, text_of

Route = Literal["chat", "messages", "responses", "completions"]
Carrier = Literal["auto", "hooks"]
ROUTES: Mapping[Route, str] = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "completions": "/v1/completions",
}
STRATEGIES = ("summary", "prune", "handoff")
WINDOW = 4096
# Of the window: below the trigger, over it, over the window.
_SMALL, _LONG, _HUGE = 1200, 3600, 9000


@dataclass(frozen=True)
class Scene:
    """Requests to one deployment of its own, one after the other.

    Attributes:
        bodies: of the client's requests, without `model` and `stream`.
        script: the model that answers.
        carrier: of its proxy.
        settings: of the deployment.
        headers: of the client.
    """

    name: str
    bodies: Sequence[Mapping[str, Any]]
    script: Script
    _: KW_ONLY
    route: Route = "chat"
    stream: bool = True
    carrier: Carrier = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def group(self) -> Group:
        """The deployment and its server."""
        simulator = {"chunk_tokens": 16}
        return Group(self.name, WINDOW, architecture="glm4", compaction=self.settings, simulator=simulator)


def scenes() -> list[Scene]:
    """All of them, by their names."""
    return [*_by_route(), *_by_hooks(), *_by_strategy(), *_tools(), *_others()]


def _by_route() -> Iterator[Scene]:
    for route, stream in itertools.product(ROUTES, (True, False)):
        yield from _usual(route, stream, "auto")


def _by_hooks() -> Iterator[Scene]:
    for stream in (True, False):
        yield from _usual("chat", stream, "hooks")


def _usual(route: Route, stream: bool, carrier: Carrier) -> Iterator[Scene]:
    kind = f"{route}-{'stream' if stream else 'whole'}-{carrier}"
    options: dict[str, Any] = {"route": route, "stream": stream, "carrier": carrier}
    small = talk(f"small {kind}", _SMALL)
    yield Scene(f"small-{kind}", [_body(route, small)], answers(), **options)
    long = talk(f"long {kind}", _LONG)
    later = answered(long, "Understood.", "And what comes after that?")
    yield Scene(f"long-{kind}", [_body(route, long), _body(route, later)], answers(), **options)
    huge = talk(f"huge {kind}", _HUGE)
    yield Scene(f"huge-{kind}", [_body(route, huge)], answers(), **options)
    yield Scene(
        f"talks-{kind}",
        [_body(route, asked(f"talks {kind}"))],
        Teller(Reply(LONG)),
        **options,
    )
    vast = [{"role": "user", "content": prose(f"vast {kind}", _HUGE)}]
    yield Scene(f"refused-{kind}", [_body(route, vast)], answers(), **options)


def _body(route: Route, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A conversation as the route's clients send it."""
    if route == "completions":
        return {"prompt": "\n".join(text_of(message) for message in messages)}
    if route == "responses":
        return {"input": [{"role": each["role"], "content": text_of(each)} for each in messages]}
    if route == "messages":
        system = [text_of(each) for each in messages if each["role"] == "system"]
        turns = [each for each in messages if each["role"] != "system"]
        return {"max_tokens": 8000, "messages": turns, **({"system": system[0]} if system else {})}
    return {"messages": messages}


def _by_strategy() -> Iterator[Scene]:
    for strategy, carrier in itertools.product(STRATEGIES, ("auto", "hooks")):
        kind = f"{strategy}-{carrier}"
        long = talk(f"work {kind}", _LONG)
        turns = [long, answered(long, "Understood.", "Go on."), answered(talk(f"work {kind}", _HUGE), "Good.", "Next.")]
        bodies = [{"messages": turn} for turn in turns]
        yield Scene(f"work-{kind}", bodies, _planner, carrier=carrier, settings={"strategy": strategy})


def _planner(call: Any) -> Reply:
    plan = edit_plan(text_of(call.messages[-1])) if is_summary_call(call.body) else ""
    return Reply(plan) if plan else answers()(call) or Reply("Understood.")


def _tools() -> Iterator[Scene]:
    call = Reply(tool_calls=[("tool_1", '{"path": "a.txt"}'), ("tool_2", '{"path": "b.txt", "limit": 3}')])
    for stream, carrier in itertools.product((True, False), ("auto", "hooks")):
        kind = f"{'stream' if stream else 'whole'}-{carrier}"
        options: dict[str, Any] = {"stream": stream, "carrier": carrier}
        work = talk(f"tools {kind}", 2200)
        rounds = [*work, *tool_round("tool_1", prose(f"result {kind}", 1500))]
        body = {"messages": rounds, "tools": tools(4)}
        yield Scene(f"results-{kind}", [body], answers(reply=call), **options)
        reminded = [*rounds, {"role": "user", "content": "<system-reminder>Be brief.</system-reminder>"}]
        yield Scene(f"reminded-{kind}", [{**body, "messages": reminded}], answers(), **options)


def _others() -> Iterator[Scene]:
    long = {"messages": talk("others", _LONG)}
    yield Scene("json", [{**long, "response_format": {"type": "json_object"}}], answers(reply=Reply('{"a": [1, 2]}')))
    yield Scene("opted-out", [{"messages": talk("opted out", _SMALL), "metadata": {"compaction": "off"}}], answers())
    yield Scene("now", [{"messages": talk("now", 2400), "metadata": {"compaction": {"now": True}}}], answers())
    yield Scene("quiet", [{"messages": talk("quiet", _LONG)}], answers(), settings={"notices": "off"})
    yield Scene("program", [{"messages": talk("program", _LONG)}], answers(), headers={"user-agent": "aider/0.86"})
    yield Scene("no-summary", [{"messages": talk("no summary", _LONG)}], answers(summary=Reply("")))
    yield Scene(
        "thinks", [{"messages": talk("thinks", _SMALL)}], answers(reply=Reply("Done.", reasoning="Let me see."))
    )
    yield Scene(
        "bounded", [{"messages": talk("bounded", _SMALL), "max_tokens": 40}], answers(reply=Reply(TEXTS["prose"]))
    )
    yield Scene("unguarded", [{"messages": talk("unguarded", _HUGE)}], answers(), settings={"enabled": False})
