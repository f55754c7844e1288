"""Readers of public formats: from the bytes of a file to messages, for `quality/held_out.py`.

Each reader keeps the order and the words. One speaker is the assistant, everything else is the user; where several
speak, their names stand before their lines.
"""

from __future__ import annotations

import html
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.integration.validity import JsonDict

Convert = Callable[[bytes], Iterator[JsonDict]]
# Agents cut long results before they send them; those that are recorded whole would fill a small context alone.
_RESULT_CHARACTERS = 6_000
# Of what others say in a row: scenes in which the assistant does not appear are no message to it.
_MOST_LINES = 20


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


def play(assistant: str, lines: Sequence[tuple[str, str]], role: str) -> Iterator[JsonDict]:
    """Lines of several speakers, one of whom is the assistant; of others' lines in a row the last twenty.

    Args:
        assistant: its name, or "" for who speaks most.
        lines: speaker and text.
        role: the system line, with `{}` for the assistant's name.
    """
    spoken = Counter[str]()
    for speaker, text in lines:
        spoken[speaker] += len(text)
    own = assistant or spoken.most_common(1)[0][0]
    yield said("system", role.format(own))
    for is_own, run in itertools.groupby(lines, key=lambda line: line[0] == own):
        texts = [text if is_own else f"{speaker}: {text}" for speaker, text in run]
        yield said("assistant" if is_own else "user", "\n".join(texts if is_own else texts[-_MOST_LINES:]))


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


def notebook(data: bytes) -> Iterator[JsonDict]:
    """A Jupyter notebook: its text is the user's, each cell of code a call with what it printed."""
    yield said("system", "You are a data analyst. You run Python for the user.")
    for index, cell in enumerate(json.loads(data)["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield said("user", re.sub(r"<img[^>]*>|!\[[^]]*\]\([^)]*\)", "", source))
        elif source:
            texts = [each.get("text") or each.get("data", {}).get("text/plain") or () for each in cell["outputs"]]
            yield called(f"call_{index}", "python", {"code": source})
            yield result(f"call_{index}", "".join("".join(text) for text in texts))


def reports(pages: slice) -> Convert:
    """Pages of annual reports (TAT-QA) with questions; half of a page's questions come after the next page."""

    def convert(data: bytes) -> Iterator[JsonDict]:
        chosen = json.loads(data)[pages]
        yield said("system", "You answer questions about pages of annual reports.")
        later: list[JsonDict] = []
        for page in chosen:
            table = "\n".join(" | ".join(cells) for cells in page["table"]["table"])
            text = "\n".join(paragraph["text"] for paragraph in page["paragraphs"])
            yield said("user", f"{text}\n{table}")
            half = len(page["questions"]) // 2
            for question in [*page["questions"][:half], *later]:
                yield said("user", question["question"])
                yield said("assistant", _answer(question))
            later = page["questions"][half:]

    def _answer(question: JsonDict) -> str:
        answer = question["answer"]
        text = ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
        reason = f" ({question['derivation']})" if question["derivation"] else ""
        return f"{text} {question['scale']}".strip() + reason

    return convert


def critical_role(data: bytes) -> Iterator[JsonDict]:
    """A session of a role-playing game; the game master is the assistant."""
    turns = json.loads(data)["TURNS"]
    lines = [(" and ".join(turn["NAMES"]).title(), " ".join(turn["UTTERANCES"])) for turn in turns]
    yield from play("Matt", lines, "You are {}, the master of a role-playing game. The players' names stand first.")


def character(name: str) -> Convert:
    """Scenes of Chinese novels and series (CharacterEval) in which one character speaks."""

    def convert(data: bytes) -> Iterator[JsonDict]:
        # One scene is asked about several times.
        scenes = dict.fromkeys(each["context"] for each in json.loads(data) if each["role"] == name)
        lines = [line.split("：", 1) for scene in scenes for line in scene.split("\n") if "：" in line]
        yield from play(name, [(speaker, text) for speaker, text in lines], "你是{}。请以这个人物的身份说话。")

    return convert


def drama(role: str) -> Convert:
    """A play in TEI; who speaks most is the assistant."""

    def convert(data: bytes) -> Iterator[JsonDict]:
        lines: list[tuple[str, str]] = []
        for speech in re.findall(r"<sp\b.*?</sp>", data.decode(), re.DOTALL):
            speaker, _, spoken = speech.partition("</speaker>")
            lines.append((_plain(speaker).strip(" .:").title(), _plain(spoken)))
        yield from play("", lines, role)

    return convert


def _plain(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", markup)).split())


_CHANNEL = re.compile(r"^.*?\[[\d:]+\] <([^>]+)> (.*)$", re.MULTILINE)


def channel(data: bytes) -> Iterator[JsonDict]:
    """A support channel of IRC; who writes most is the assistant."""
    lines = [(name, text.strip()) for name, text in _CHANNEL.findall(data.decode(errors="replace"))]
    yield from play("", lines, "You are {} and help in a support channel. The others' names stand first.")


def phone(data: bytes) -> Iterator[JsonDict]:
    """Phone calls, one short utterance a line (`A|text|act`)."""
    yield said("system", "You are on the phone with a stranger and talk about what comes up.")
    for line in data.decode().splitlines():
        if line:
            speaker, text, _ = line.split("|")
            yield said("user" if speaker == "A" else "assistant", text)


_PLACEHOLDER = re.compile(r"\b[a-z]\w*_(?:phone|address|post_code)\b")


def _number(placeholder: re.Match[str]) -> str:
    return f"01223 {zlib.crc32(placeholder[0].encode()) % 900_000 + 100_000}"


def restaurants_hindi(data: bytes) -> Iterator[JsonDict]:
    """Dialogues about restaurants in Hindi and English mixed; calls and the first twenty lines of results are text.

    Placeholders such as `sala_thong_phone` become a number that their name decides.
    """
    yield said("system", "Aap ek restaurant assistant hain.")
    results = 0
    for line in _PLACEHOLDER.sub(_number, data.decode()).splitlines():
        text, tab, answer = line.partition(" ")[2].partition("\t")
        results = 0 if tab else results + 1
        if text and results <= _MOST_LINES:
            yield said("user", text)
        if answer:
            yield said("assistant", answer)


def hotels_japanese(data: bytes) -> Iterator[JsonDict]:
    """Customers who look for a place to stay, and one adviser."""
    yield said("system", "あなたは宿泊の相談を受けるオペレーターです。")
    for dialogue in several(data):
        for turn in dialogue["utterances"]:
            yield said("assistant" if turn["name"].startswith("operator") else "user", turn["text"])


def daily_dialog(role: str) -> Convert:
    """Everyday dialogues, one a line (XDailyDialog)."""

    def convert(data: bytes) -> Iterator[JsonDict]:
        yield said("system", role)
        for line in data.decode().splitlines():
            turns = [turn.strip() for turn in line.split("\t")[0].split("__eou__") if turn.strip()]
            for index, turn in enumerate(turns[: len(turns) // 2 * 2]):
                yield said(("user", "assistant")[index % 2], turn)

    return convert
