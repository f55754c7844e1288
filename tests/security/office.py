"""What is said to the office, the proxy of `conftest.py`, and a server behind it that says whatever it is told to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import httpx

from tests.integration.app import NETWORK
from tests.integration.bench import Bench, is_summary_call
from tests.integration.harness import CHAT
from tests.lmstudio_double import ChatCall, Reply

ROUTES = (CHAT, "/v1/messages", "/v1/responses")
# Guarded by a window of 4,096 tokens: LM Studio, and another server by each carrier.
GUARDED = ("small", "foreign", "foreign-hooked")
# Groups of the server of `liar` with their windows; what is learned of one is not known of another.
LIED = {**dict.fromkeys(("quoting", "quoting-hooked", "leaky", "leaky-hooked"), 4096), "honest": 8192}


def said(text: str, **fields: object) -> dict[str, Any]:
    """An answer of a chat; without usage, which would teach."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **fields}


def honest(_: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """What the server of `liar` says where no test has it say anything else."""
    return 200, said("Fine.")


def words_of(value: object) -> set[str]:
    """The words that tell whose text it is: CANARY-…"""
    return set(re.findall(r"CANARY-[a-z0-9-]+", json.dumps(value, default=str)))


def seen(call: ChatCall) -> Reply:
    """A model that says whose text it has seen."""
    text = f"Seen: {' '.join(sorted(words_of(call.messages)))}"
    return Reply(f"### Current state\n{text}" if is_summary_call(call.body) else text)


def conversation(canary: str, rounds: int) -> list[dict[str, Any]]:
    """A conversation whose every message says whose it is; 20 rounds have to be compacted for a window of 4,096."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You serve CANARY-{canary}."}]
    for number in range(rounds):
        messages.append({"role": "user", "content": f"Question {number} of CANARY-{canary} about the parser. " * 6})
        messages.append({"role": "assistant", "content": f"Answer {number} for CANARY-{canary}: it is ported. " * 6})
    return [*messages, {"role": "user", "content": f"And now, CANARY-{canary} ?"}]


def body_of(group: str, messages: list[dict[str, Any]], path: str = CHAT, **fields: object) -> dict[str, Any]:
    """A request of one of `ROUTES`."""
    if path == CHAT:
        return {"model": group, "messages": messages, "max_tokens": 50, **fields}
    texts = [message for message in messages if message["role"] != "system"]
    if path == "/v1/messages":
        return {"model": group, "messages": texts, "max_tokens": 50, **fields}
    return {"model": group, "input": texts, **fields}


def ask(bench: Bench, key: str, body: Mapping[str, Any], path: str = CHAT, **headers: str) -> httpx.Response:
    """What somebody is answered."""
    shown = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    return bench.proxy.client.post(path, content=json.dumps(body).encode(), headers=shown)


async def send(bench: Bench, key: str, body: Mapping[str, Any], path: str = CHAT, **headers: str) -> httpx.Response:
    """The same within the event loop, of the application that is open."""
    shown = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    url = f"{bench.proxy.base_url}{path}"
    answer = await NETWORK.request(httpx.Request("POST", url, content=json.dumps(body).encode(), headers=shown))
    await answer.aread()
    return answer


def action(answer: httpx.Response) -> str:
    """What was done to a request, or the status with which it was refused."""
    return answer.headers.get("x-litellm-compaction", "") if answer.status_code == 200 else str(answer.status_code)


def forget_failures(bench: Bench) -> None:
    """Takes what a test has made fail on purpose out of the lines of the log."""
    bench.proxy.lines[:] = [line for line in bench.proxy.lines if "failed_open" not in line]
