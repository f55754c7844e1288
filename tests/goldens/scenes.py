"""Ten conversations that are recorded as text: each route, streamed and whole, each strategy, refusals.

Where a running answer is cut depends on what has arrived by then, so restarts are no goldens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from tests.builders import tool_round, tools
from tests.integration.bench import Group, Script, answers, edit_plan, is_summary_call
from tests.integration.validity import text_of
from tests.lmstudio_double import ChatCall, Reply

CHAT, MESSAGES, RESPONSES, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
WINDOW = 4096
JsonDict = dict[str, Any]

_RECORD = """### Current state
All totals of the invoices are being rounded half up, with one test for each invoice.

### Pending
- [ ] the invoices that are left, and their discounts
"""


@dataclass(frozen=True)
class Scene:
    """Requests of one client to a deployment of its own, one after the other.

    Attributes:
        bodies: of the requests, without `model` and `stream`.
        script: the model that answers.
        settings: of the deployment.
        headers: of the client.
    """

    name: str
    bodies: Sequence[Mapping[str, Any]]
    script: Script
    _: KW_ONLY
    path: str = CHAT
    stream: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def group(self) -> Group:
        """The deployment and its server."""
        return Group(self.name, WINDOW, architecture="glm4", compaction=self.settings, simulator={"chunk_tokens": 16})


def work(turns: int) -> list[JsonDict]:
    """A person and an assistant who round invoices, some 130 tokens a turn."""
    said: list[JsonDict] = [
        {"role": "system", "content": "You are a careful programmer. Never touch the folder legacy/."},
        {
            "role": "user",
            "content": "Please round all totals of our invoices half up. I want one test for each invoice.",
        },
    ]
    for turn in range(1, turns + 1):
        said += [
            {
                "role": "assistant",
                "content": f"Invoice {turn}: I changed src/billing/invoice_{turn}.py, line {turn * 7}. The total was "
                f"{turn * 13}.{turn % 10}{turn % 7} EUR and is {turn * 13}.{turn % 10} EUR now. The test is "
                f"tests/test_invoice_{turn}.py; it failed with AssertionError: {turn} != {turn + 1} before, and passes "
                "now. I left the formatting of the other lines as it was, since nothing there rounds anything.",
            },
            {
                "role": "user",
                "content": f"Good. Now invoice {turn + 1}. Customer {4000 + turn} complained about it on a Monday, so "
                "look at the discount as well, and tell me which of the two was wrong before you change anything in "
                "the file. The ticket says that the sum in the mail and the sum in the file differ by a cent.",
            },
        ]
    return said


def scenes() -> list[Scene]:
    """All of them."""
    short, long = work(6), work(27)
    later = [*long, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "And the last invoice?"}]
    report = "\n".join(f"{n}. Invoice {n} of {n * 31} EUR was rounded to {n * 31}.{n % 10} EUR." for n in range(1, 230))
    pasted = [{"role": "user", "content": report * 2}]
    browser = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64) Chrome/140.0.0.0 Safari/537.36"}
    model = answers(Reply(_RECORD))
    reading = [*work(14), *tool_round("read_file", "\n".join(f"total_{n} = {n * 31}.005" for n in range(150)))]
    system, *turns = long
    return [
        Scene("below-the-trigger", [{"messages": short}], model, stream=False),
        Scene("compacted-and-reused", [{"messages": long}, {"messages": later}], model, headers=browser),
        Scene("results-kept", [{"messages": reading, "tools": tools(2)}], answers(Reply(_RECORD), _CALLS)),
        Scene("pruned", [{"messages": long}], _pruning, stream=False, settings={"strategy": "prune"}),
        Scene("handed-off", [{"messages": long}], model, stream=False, settings={"strategy": "handoff"}),
        Scene("no-summary", [{"messages": long}], answers(Reply("")), stream=False),
        Scene(
            "messages",
            [{"system": system["content"], "messages": turns, "max_tokens": 800}],
            model,
            path=MESSAGES,
        ),
        Scene("responses", [{"input": long}], answers(Reply(_RECORD), _THOUGHT), path=RESPONSES),
        Scene("refused", [{"messages": pasted, "tools": tools(2)}], model),
        Scene("text-refused", [{"prompt": report * 2}], model, path=TEXT, stream=False),
    ]


_CALLS = Reply(tool_calls=[("tool_1", '{"path": "a.txt"}'), ("tool_2", '{"path": "b.txt", "limit": 3}')])
_THOUGHT = Reply("The last one is done.", reasoning="Which one is the last? It is 27.")


def _pruning(call: ChatCall) -> Reply:
    plan = edit_plan(text_of(call.messages[-1]), _RECORD) if is_summary_call(call.body) else ""
    return Reply(plan) if plan else answers(Reply(_RECORD))(call) or Reply("")


def shown(body: Mapping[str, Any]) -> str:
    """A request as a person reads it: its fields, and each message under its role; long data is shortened."""
    lines = []
    for name, value in sorted(body.items()):
        if name not in ("messages", "input", "prompt", "system", "model"):
            lines.append(f"{name}: {_short(json.dumps(value, sort_keys=True))}")
    if "system" in body:
        lines += ["", "[system]", str(body["system"])]
    for message in body.get("messages") or body.get("input") or ():
        lines += ["", f"[{message['role']}]", *_said(message)]
    if "prompt" in body:
        lines += ["", "[prompt]", _short(str(body["prompt"]))]
    return "\n".join(lines)


def _said(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    said = [str(part.get("text", part)) for part in parts]
    if message["role"] == "tool":
        said = [_short(text) for text in said]
    calls = [
        f"-> {call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls") or ()
    ]
    return [text for text in [*said, *calls] if text]


def _short(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:200]} … ({len(text):,} characters) … {text[-60:]}"
