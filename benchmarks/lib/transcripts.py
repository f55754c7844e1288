"""Readers of public formats: from the bytes of a file to messages, for `quality/held_out.py`.

Each reader keeps the order and the words. One speaker is the assistant, everything else is the user.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.integration.validity import JsonDict

Convert = Callable[[bytes], Iterator[JsonDict]]
# Agents cut long results before they send them; those that are recorded whole would fill a small context alone.
_RESULT_CHARACTERS = 6_000


def said(role: str, content: str) -> JsonDict:
    """A message of text."""
    return {"role": role, "content": content}


def called(identifier: str, name: str, arguments: JsonDict, content: str = "") -> JsonDict:
    """A message of the assistant that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": identifier, "type": "function", "function": function}],
    }


def result(identifier: str, content: str) -> JsonDict:
    """A tool's result, without the middle of one that is longer than 6,000 characters."""
    return {"role": "tool", "tool_call_id": identifier, "content": _cut(content)}


def _cut(text: str) -> str:
    half = _RESULT_CHARACTERS // 2
    if len(text) <= _RESULT_CHARACTERS:
        return text
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def several(data: bytes) -> Iterator[Any]:
    """JSON values that stand one behind the other."""
    text, at = data.decode("utf-8-sig"), 0
    while at < len(text):
        value, at = json.JSONDecoder().raw_decode(text, at)
        yield value
        at += len(text[at:]) - len(text[at:].lstrip())


def codex(data: bytes) -> Iterator[JsonDict]:
    """A rollout of the Codex CLI, without its reasoning."""
    for line in data.decode().splitlines():
        entry = json.loads(line)
        item = entry["payload"]
        if entry["type"] != "response_item":
            continue
        if item["type"] == "message":
            yield said(item["role"], _cut("\n".join(part["text"] for part in item["content"])))
        elif item["type"] == "function_call":
            yield called(item["call_id"], item["name"], json.loads(item["arguments"] or "{}"))
        elif item["type"] == "function_call_output":
            yield result(item["call_id"], str(item["output"]))


def gemini_cli(data: bytes) -> Iterator[JsonDict]:
    """A session of the Gemini CLI, without its thoughts."""
    for message in json.loads(data)["messages"]:
        if message["type"] == "user":
            yield said("user", _cut(message["content"]))
        elif message["type"] == "gemini":
            yield said("assistant", message["content"])
            for call in message.get("toolCalls", ()):
                yield called(call["id"], call["name"], call["args"])
                answers = [part["functionResponse"]["response"] for part in call.get("result") or ()]
                texts = [str(answer.get("output") or answer.get("error") or "") for answer in answers]
                yield result(call["id"], "\n".join(texts))


_COMMAND = re.compile(r"<(command-name|local-command-\w+|command-message)>.*", re.DOTALL)


def claude_code(*, is_whole: bool = False) -> Convert:
    """A session of Claude Code, without thinking and calls that got no result.

    Args:
        is_whole: with results at full length, the client's own commands and what its helpers did.
    """

    def convert(data: bytes) -> Iterator[JsonDict]:
        entries = [json.loads(line) for line in data.decode().splitlines()]
        entries = [entry for entry in entries if entry["type"] in ("user", "assistant")]
        if not is_whole:
            entries = [entry for entry in entries if not entry.get("isMeta") and not entry.get("isSidechain")]
        messages = [entry["message"] for entry in entries]
        cut: Callable[[str], str] = str if is_whole else _cut
        answered = {part["tool_use_id"] for part in _parts(messages) if part["type"] == "tool_result"}
        seen: set[str] = set()
        for message in messages:
            for part in _parts([message]):
                if part["type"] == "text" and (is_whole or not _COMMAND.match(part["text"])):
                    yield said(message["role"], cut(part["text"]))
                elif part["type"] == "tool_use" and part["id"] in answered:
                    seen.add(part["id"])
                    yield called(part["id"], part["name"], part["input"])
                elif part["type"] == "tool_result" and part["tool_use_id"] in seen:
                    content = part["content"]
                    if not isinstance(content, str):
                        content = "\n".join(each.get("text", "") for each in content)
                    yield {"role": "tool", "tool_call_id": part["tool_use_id"], "content": cut(content)}

    return convert


def _parts(messages: Sequence[JsonDict]) -> Iterator[JsonDict]:
    for message in messages:
        content = message["content"]
        yield from [{"type": "text", "text": content}] if isinstance(content, str) else content


def daily_dialog(role: str) -> Convert:
    """Everyday dialogues, one a line (XDailyDialog)."""

    def convert(data: bytes) -> Iterator[JsonDict]:
        yield said("system", role)
        for line in data.decode().splitlines():
            turns = [turn.strip() for turn in line.split("\t")[0].split("__eou__") if turn.strip()]
            for index, turn in enumerate(turns[: len(turns) // 2 * 2]):
                yield said(("user", "assistant")[index % 2], turn)

    return convert


_BASH = re.compile(r"```(?:bash|sh)?\n(.*?)\n```", re.DOTALL)


def mini_swe_agent(data: bytes) -> Iterator[JsonDict]:
    """Commands in code blocks become calls, what follows them their results."""
    is_called = False
    for index, message in enumerate(json.loads(data)["messages"]):
        content = message["content"]
        if not isinstance(content, str):
            content = "\n".join(part.get("text", "") for part in content)
        block = _BASH.search(content) if message["role"] == "assistant" else None
        if block:
            yield called(f"call_{index}", "bash", {"command": block[1]}, content[: block.start()].strip())
        elif is_called:
            yield {"role": "tool", "tool_call_id": f"call_{index - 1}", "content": content}
        else:
            yield said(message["role"], content)
        is_called = block is not None


def swe_agent(data: bytes) -> Iterator[JsonDict]:
    """Several files, one behind the other, are one session."""
    for number, recorded in enumerate(several(data)):
        for message in recorded["history"]:
            if number == 0 or message["role"] != "system":
                yield said(message["role"], message["content"])


def tau_airline(*episodes: int) -> Convert:
    """Customers of an airline, one after the other."""

    def convert(data: bytes) -> Iterator[JsonDict]:
        recorded = json.loads(data)
        for episode in episodes:
            for index, message in enumerate(recorded[episode]["traj"]):
                if message["role"] == "system" and episode != episodes[0]:
                    continue
                kept = {"role": message["role"], "content": message.get("content") or ""}
                # A provider's ids may be the same in two episodes; each result answers the call before it.
                if message["role"] == "tool":
                    kept["tool_call_id"] = f"call_{episode}_{index - 1}"
                elif message.get("tool_calls"):
                    kept["tool_calls"] = [{**message["tool_calls"][0], "id": f"call_{episode}_{index}"}]
                yield kept

    return convert


_LINE = re.compile(r"^(user|assistant|tool): ", re.MULTILINE)


def tau_retail(episodes: slice) -> Convert:
    """Customers of a shop, whose calls were not recorded: results are text."""

    def convert(data: bytes) -> Iterator[JsonDict]:
        yield said("system", "You are a customer service agent of a shop. Several customers write to you in turn.")
        for line in data.decode().splitlines()[episodes]:
            parts = _LINE.split(json.loads(line)["messages_display"])
            for role, content in zip(parts[1::2], parts[2::2], strict=True):
                text = content.strip()
                if role == "tool":
                    yield said("user", f"Result: {text}")
                elif text != "None":
                    yield said(role, text)

    return convert


def friends(data: bytes) -> Iterator[JsonDict]:
    """Two friends who write to each other (LoCoMo); the second one is the assistant."""
    recorded = json.loads(data)
    person, friend = recorded["speaker_a"], recorded["speaker_b"]
    yield said("system", f"You are {friend}, a friend of {person}. You write to each other now and then.")
    names = itertools.takewhile(recorded.__contains__, (f"session_{at}" for at in itertools.count(1)))
    for session in names:
        yield said("user", f"[{recorded[f'{session}_date_time']}]")
        for turn in recorded[session]:
            yield said("user" if turn["speaker"] == person else "assistant", turn.get("text") or "")


def meeting(data: bytes) -> Iterator[JsonDict]:
    """Who speaks most is the assistant, the others are the user, each line with its speaker's name."""
    turns = json.loads(data)["meeting_transcripts"]
    spoken = Counter[str]()
    for turn in turns:
        spoken[turn["speaker"]] += len(turn["content"])
    [(assistant, _)] = spoken.most_common(1)
    yield said("system", f"You are {assistant} in a meeting. What the others say has their names before it.")
    for turn in turns:
        is_own = turn["speaker"] == assistant
        yield said("assistant", turn["content"]) if is_own else said("user", f"{turn['speaker']}: {turn['content']}")


def dialogues(system: str, turns: str, speaker: str, user: str, *, text: Mapping[bool, str]) -> Convert:
    """Dialogues in JSON, one behind the other.

    Args:
        system: the system line.
        turns: key of a dialogue's turns; "" if it is a list of them.
        speaker: key of a turn's speaker.
        user: the speaker that is the user.
        text: keys of a turn's text, by whether it is the user's.
    """

    def convert(data: bytes) -> Iterator[JsonDict]:
        yield said("system", system)
        recorded = json.loads(data)
        for dialogue in recorded.values() if isinstance(recorded, dict) else recorded:
            for turn in dialogue[turns] if turns else dialogue:
                is_user = turn[speaker] == user
                yield said("user" if is_user else "assistant", turn[text[is_user]])

    return convert


def russian_multiwoz(data: bytes) -> Iterator[JsonDict]:
    """Lines in turn; a dialogue that ends with the customer's thanks goes on with the next one's answer."""
    yield said("system", "Вы помощник туристического бюро.")
    for dialogue in re.split(r"\n\s*\n", data.decode("utf-8-sig").strip()):
        lines = [line.strip() for line in dialogue.split("\n") if line.strip()]
        for index, line in enumerate(lines[: len(lines) // 2 * 2]):
            yield said(("user", "assistant")[index % 2], line)
