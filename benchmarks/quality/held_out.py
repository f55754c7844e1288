"""Conversations of other kinds than those the package was tuned on, made from public repositories.

    python benchmarks/quality/held_out.py FOLDER --checkouts CHECKOUTS --clone
    python benchmarks/quality/compaction.py TUNED --held-out FOLDER/validate-a

Each is read at a fixed commit (`git show`) and written as JSON: `messages`, `tools`, `facts`. Their licences are their
owners'; no data is part of this project. The halves are fixed here, before anything was measured: figures of
`validate-a` may be looked at while something is tuned, those of `validate-b` once, at the end. `validate-c` has kinds
that neither half has, for a change that was tuned on both.

Facts are planted by a rule, so that nobody chooses what suits us (`planted_facts`).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.measuring import count, rendered
from benchmarks.lib.next_action import stands, tokens
from benchmarks.lib.transcripts import (
    Convert,
    called,
    channel,
    character,
    claude_code,
    codex,
    critical_role,
    daily_dialog,
    drama,
    gemini_cli,
    hotels_japanese,
    notebook,
    phone,
    reports,
    restaurants_hindi,
    said,
    several,
)
from tests.integration.validity import JsonDict, searchable

_HOST = "https://github.com"
_MOST_FACTS = 12
# One or two that happen to repeat are chance.
_LEAST_FACTS = 4
_LEAST_DISTANCE = 4


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a conversation comes from.

    Attributes:
        name: of its file.
        half: `validate-a`, `validate-b` or `validate-c`.
        repository: on GitHub, `owner/name`.
        commit: at which `path`, one file or several with ", " between them, is read.
        licence: of the repository at that commit.
        convert: from the file's bytes to messages, possibly more than are used.
        note: what is not as it was recorded.
        most_tokens: how much of it is used.
    """

    name: str
    half: str
    repository: str
    commit: str
    path: str
    licence: str
    convert: Convert
    note: str
    most_tokens: int = 24_000


def main() -> None:
    """Writes one file for each source whose repository is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--checkouts", type=Path, help="folder with clones, each named as its repository")
    parser.add_argument("--clone", action="store_true", help="fetch what --checkouts lacks, a gigabyte or more")
    parser.add_argument("--list", action="store_true", help="name the repositories, commits and licences")
    chosen = parser.parse_args()
    if chosen.list:
        print("\n".join(f"{s.half} {s.name:24} {s.repository}@{s.commit[:12]} {s.licence}: {s.note}" for s in SOURCES))
        return
    if not chosen.folder or not chosen.checkouts:
        parser.error("name a folder to write to, and --checkouts")
    for source in SOURCES:
        if chosen.clone:
            _fetch(source, chosen.checkouts)
        data = _read(source, chosen.checkouts)
        if data is None:
            print(f"{source.name:24} not read: {source.repository} at {source.commit[:12]} is not there")
            continue
        made = conversation(source, data)
        target = chosen.folder / source.half / f"{source.name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(made, ensure_ascii=False, indent=1), encoding="utf-8")
        size, facts = sum(count(rendered(message)) for message in made["messages"]), len(made["facts"])
        print(f"{source.half} {source.name:24} {len(made['messages'])} messages, {size} tokens, {facts} facts")


def _fetch(source: Source, checkouts: Path) -> None:
    """Gets the commit alone, on whatever branch or pull request it is."""
    folder = checkouts / source.repository.partition("/")[2]
    git = ["git", "-C", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ".git").exists() and not (folder / "HEAD").exists():
        subprocess.run([*git, "init", "--quiet"], check=True)
    if subprocess.run([*git, "cat-file", "-e", source.commit], capture_output=True, check=False).returncode != 0:
        address = f"{_HOST}/{source.repository}"
        subprocess.run([*git, "fetch", "--quiet", "--depth", "1", address, source.commit], check=False)


def _read(source: Source, checkouts: Path) -> bytes | None:
    folder = checkouts / source.repository.partition("/")[2]
    if not folder.exists():
        return None
    files = [f"{source.commit}:{path}" for path in source.path.split(", ")]
    read = subprocess.run(["git", "-C", str(folder), "show", *files], capture_output=True, check=False)
    return read.stdout if read.returncode == 0 else None


def conversation(source: Source, data: bytes) -> JsonDict:
    """What is written for a source."""
    messages = _bounded(in_turn(source.convert(data)), source.most_tokens)
    return {
        "source": f"github.com/{source.repository}@{source.commit[:12]} {source.path}",
        "licence": source.licence,
        "note": source.note,
        "messages": messages,
        "tools": _inferred_tools(messages),
        "facts": planted_facts(source.name, messages),
    }


def in_turn(messages: Iterator[JsonDict]) -> list[JsonDict]:
    """User and assistant in turn: neighbours of one role become one message; nothing before the first user's."""
    found: list[JsonDict] = []
    for message in messages:
        if not found and message["role"] not in ("system", "user"):
            continue
        if len(found) == 1 and found[0]["role"] == "system" and message["role"] == "assistant":
            continue
        last = found[-1] if found else {"role": ""}
        if message["role"] == last["role"] != "tool":
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            texts = [text for text in (last["content"], message["content"]) if text]
            found[-1] = {**last, "content": "\n".join(texts), **({"tool_calls": calls} if calls else {})}
        else:
            found.append(message)
    return found


def _bounded(messages: Sequence[JsonDict], most_tokens: int) -> list[JsonDict]:
    """The first messages within the bound on tokens, up to one of the assistant."""
    sizes = itertools.accumulate(count(rendered(message)) for message in messages)
    kept = [message for message, size in zip(messages, sizes, strict=True) if size <= most_tokens]
    while kept and kept[-1]["role"] != "assistant":
        kept.pop()
    return kept


def _inferred_tools(messages: Sequence[JsonDict]) -> list[JsonDict]:
    """Schemas that the recorded calls fit."""
    properties: dict[str, dict[str, JsonDict]] = {}
    kinds = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    for message in messages:
        for call in message.get("tool_calls", ()):
            known = properties.setdefault(call["function"]["name"], {})
            for key, value in json.loads(call["function"]["arguments"]).items():
                known[key] = {"type": kinds.get(type(value), "string")}
    return [
        {
            "type": "function",
            "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": known}},
        }
        for name, known in properties.items()
    ]


def planted_facts(name: str, messages: Sequence[JsonDict]) -> list[JsonDict]:
    """Four to twelve values that a later answer of the assistant, at least four messages on, uses again; else none.

    A value is an unguessable token of the answer (`next_action.tokens`: with a digit and of three characters or more,
    or an address, a path or a quotation of six or more), which stands first in one message behind the system's. Where
    there are not twelve, words that are capitalized inside sentences and nowhere small, and runs of katakana, are taken
    as well, of those that stand in a fiftieth of the messages at most: names. Which ones, a hash of the conversation's
    and the value's own text decides.
    """
    texts = [searchable([message]) for message in messages]
    first_at: dict[str, int] = {}
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for value in sorted(tokens(message) | set(_NAME.findall(texts[index]))):
            start = next((at for at in range(index + 1) if value in texts[at]), 0)
            if start > 0 and index - start >= _LEAST_DISTANCE and stands(value, texts[start]):
                first_at.setdefault(value, start)
    values = [value for value in first_at if _is_unguessable(value)]
    most = max(len(messages) // 50, 3)
    everything = "\n".join(texts)
    said = set(_NAME.findall(everything))
    names = [value for value in said & set(first_at) if value.lower() == value or not stands(value.lower(), everything)]
    names = [value for value in names if sum(value in text for text in texts) <= most]
    chosen = [*sorted(values, key=_order(name)), *sorted({*names} - {*values}, key=_order(name))][:_MOST_FACTS]
    if len(chosen) < _LEAST_FACTS:
        return []
    return sorted(({"text": value, "msg": first_at[value]} for value in chosen), key=lambda fact: fact["msg"])


_NAME = re.compile(r"(?<=[a-zà-ÿа-яё] )[A-ZÀ-ÞА-ЯЁ][a-zà-ÿа-яё]{3,24}\b|[\u30a1-\u30fa\u30fc]{4,20}")


def _is_unguessable(value: str) -> bool:
    has_digit = any(map(str.isdigit, value))
    return (has_digit and len(value) >= 3) or (len(value) >= 6 and re.search(r"[@/ ]|[^\x00-\x7f]", value) is not None)


def _order(name: str) -> Callable[[str], str]:
    return lambda value: hashlib.sha256(f"{name} {value}".encode()).hexdigest()


_BASH = re.compile(r"```(?:bash|sh)?\n(.*?)\n```", re.DOTALL)


def _mini_swe_agent(data: bytes) -> Iterator[JsonDict]:
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


def _swe_agent(data: bytes) -> Iterator[JsonDict]:
    """Several files, one behind the other, are one session."""
    for number, recorded in enumerate(several(data)):
        for message in recorded["history"]:
            if number == 0 or message["role"] != "system":
                yield said(message["role"], message["content"])


def _tau_airline(*episodes: int) -> Convert:
    def convert(data: bytes) -> Iterator[JsonDict]:
        recorded = json.loads(data)
        for episode in episodes:
            for index, message in enumerate(recorded[episode]["traj"]):
                if message["role"] != "system" or episode == episodes[0]:
                    yield _renumbered(message, f"{episode}_{index}")

    # A provider's ids may be the same in two episodes; each result answers the call before it.
    def _renumbered(message: JsonDict, name: str) -> JsonDict:
        episode, _, index = name.partition("_")
        kept = {"role": message["role"], "content": message.get("content") or ""}
        if message["role"] == "tool":
            return {**kept, "tool_call_id": f"call_{episode}_{int(index) - 1}"}
        calls = [{**call, "id": f"call_{name}"} for call in (message.get("tool_calls") or ())[:1]]
        return {**kept, **({"tool_calls": calls} if calls else {})}

    return convert


_LINE = re.compile(r"^(user|assistant|tool): ", re.MULTILINE)


def _tau_retail(episodes: slice) -> Convert:
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


def locomo(member: str) -> Convert:
    def convert(data: bytes) -> Iterator[JsonDict]:
        recorded = json.loads(zipfile.ZipFile(io.BytesIO(data)).read(member))
        person, friend = recorded["speaker_a"], recorded["speaker_b"]
        yield said("system", f"You are {friend}, a friend of {person}. You write to each other now and then.")
        for session in itertools.count(1):
            if f"session_{session}" not in recorded:
                return
            yield said("user", f"[{recorded[f'session_{session}_date_time']}]")
            for turn in recorded[f"session_{session}"]:
                yield said("user" if turn["speaker"] == person else "assistant", turn.get("text") or "")

    return convert


def _meeting(data: bytes) -> Iterator[JsonDict]:
    """Who speaks most is the assistant, the others are the user, each line with its speaker's name."""
    turns = json.loads(data)["meeting_transcripts"]
    spoken: dict[str, int] = {}
    for turn in turns:
        spoken[turn["speaker"]] = spoken.get(turn["speaker"], 0) + len(turn["content"])
    assistant = max(spoken, key=lambda speaker: spoken[speaker])
    yield said("system", f"You are {assistant} in a meeting. What the others say has their names before it.")
    for turn in turns:
        is_own = turn["speaker"] == assistant
        yield said("assistant", turn["content"]) if is_own else said("user", f"{turn['speaker']}: {turn['content']}")


def _bcontrast(data: bytes) -> Iterator[JsonDict]:
    yield said("system", "Sie nehmen Bestellungen und Termine am Telefon entgegen.")
    for dialogue in json.loads(data).values():
        for turn in dialogue:
            is_customer = turn["speaker"] == "customer"
            yield said("user", turn["source"]) if is_customer else said("assistant", turn["target"])


def _crosswoz(data: bytes) -> Iterator[JsonDict]:
    archive = zipfile.ZipFile(io.BytesIO(data))
    member = next(name for name in archive.namelist() if name.endswith(".json") and "MACOSX" not in name)
    yield said("system", "你是北京的旅行助手。")
    for dialogue in json.loads(archive.read(member)).values():
        for turn in dialogue["messages"]:
            yield said("user" if turn["role"] == "usr" else "assistant", turn["content"])


def _russian_multiwoz(data: bytes) -> Iterator[JsonDict]:
    """Lines in turn; a dialogue that ends with the customer's thanks goes on with the next one's answer."""
    yield said("system", "Вы помощник туристического бюро.")
    for dialogue in re.split(r"\n\s*\n", data.decode("utf-8-sig").strip()):
        lines = [line.strip() for line in dialogue.split("\n") if line.strip()]
        for index, line in enumerate(lines[: len(lines) // 2 * 2]):
            yield said(("user", "assistant")[index % 2], line)


def _real_persona_chat(data: bytes) -> Iterator[JsonDict]:
    yield said("system", "あなたは友人と雑談しています。")
    for dialogue in json.loads(data):
        for turn in dialogue["utterances"]:
            yield said("user" if turn["interlocutor"] == "user" else "assistant", turn["text"])


_MINI = {
    "repository": "gruckion/mini-swe-agent",
    "commit": "d12a71affd95403b036b2bdbd827349b77bfffb9",
    "licence": "MIT",
}
_SWE = {"repository": "SWE-agent/SWE-agent", "commit": "3ea751c087f32b16e039a2233dd6eefecef325d5", "licence": "MIT"}
_TAU = {"repository": "sierra-research/tau-bench", "commit": "59a200c6d575d595120f1cb70fea53cef0632f6b"}
_LOCOMO = {"repository": "snap-research/locomo", "commit": "e76cdff4a04fce19090596d49862fe87a5c15aaa"}
_QMSUM = {"repository": "Yale-LILY/QMSum", "commit": "83d7768c1f2b4dfeb091385d3dc7e239b8e5bb7e", "licence": "MIT"}
_MINI_PATH = "swebench_results/20251118_gemini-3-pro-74pct/trajs/{0}/{0}.traj.json"
_CTF = "trajectories/demonstrations/ctf/"
_COMMANDS = "commands in code blocks became calls"
_AS_TEXT = "commands and their output are text"
_FRIENDS = "a system line and date marks added; one friend is the assistant; no licence file at this commit"
_LOCOMO_PATH = "data/locomo10.zip"
_MEETING = "who speaks most is the assistant"
_CODEX = "agent_outputs/2/1/sessions/2026/01/15/rollout-2026-01-15"
_SHORTENED = "without thinking; results are cut to 6,000 characters; tool schemas inferred"
_RUNS = "of others' lines in a row the last twenty; a system line added"
_JOINED = "short dialogues joined as one session; a system line added"
SOURCES = (
    Source(
        **_MINI,
        name="mini_django_11138",
        half="validate-a",
        path=_MINI_PATH.format("django__django-11138"),
        convert=_mini_swe_agent,
        note=_COMMANDS,
    ),
    Source(
        **_MINI,
        name="mini_pylint_6528",
        half="validate-b",
        path=_MINI_PATH.format("pylint-dev__pylint-6528"),
        convert=_mini_swe_agent,
        note=_COMMANDS,
    ),
    Source(
        **_SWE,
        name="sweagent_ctf_web",
        half="validate-a",
        path=f"{_CTF}web/i_got_id_demo.traj",
        convert=_swe_agent,
        note=_AS_TEXT,
    ),
    Source(
        **_SWE,
        name="sweagent_ctf_three",
        half="validate-b",
        path=f"{_CTF}crypto/katy.traj, {_CTF}forensics/flash.traj, {_CTF}crypto/BabyTimeCapsule.traj",
        convert=_swe_agent,
        note=f"{_AS_TEXT}; three tasks of one agent joined",
    ),
    Source(
        name="claude_code_sessions",
        half="validate-b",
        repository="jimmc414/cctrace",
        commit="4b4d4add0bb3a65359ccf50501c6792e2fc13ba5",
        path=".claude-sessions/phase0-investigation/session/main.jsonl",
        licence="MIT",
        convert=claude_code(is_whole=True),
        note="without thinking; tool schemas inferred",
        most_tokens=60_000,
    ),
    Source(
        **_TAU,
        name="tau_airline_03_08",
        half="validate-a",
        path="historical_trajectories/gpt-4o-airline.json",
        licence="MIT",
        convert=_tau_airline(3, 58),
        note="two customers of one agent joined (tasks 3 and 8); tool schemas inferred",
    ),
    Source(
        **_TAU,
        name="tau_retail_few_shot",
        half="validate-b",
        path="few_shot_data/MockRetailDomainEnv-few_shot.jsonl",
        licence="MIT",
        convert=_tau_retail(slice(18, 25)),
        note="seven customers of one agent joined; calls were not recorded, results are text; a system line added",
    ),
    Source(
        **_LOCOMO,
        name="locomo_41",
        half="validate-a",
        path=_LOCOMO_PATH,
        licence="not stated",
        convert=locomo("data/multimodal_dialog/locomo10_v2/41.json"),
        note=_FRIENDS,
    ),
    Source(
        **_LOCOMO,
        name="locomo_26",
        half="validate-b",
        path=_LOCOMO_PATH,
        licence="not stated",
        convert=locomo("data/multimodal_dialog/locomo10_v2/26.json"),
        note=_FRIENDS,
    ),
    Source(
        **_QMSUM,
        name="meeting_academic",
        half="validate-a",
        path="data/Academic/test/Bed003.json",
        convert=_meeting,
        note=_MEETING,
    ),
    Source(
        **_QMSUM,
        name="meeting_committee",
        half="validate-b",
        path="data/Committee/test/education_4.json",
        convert=_meeting,
        note=_MEETING,
    ),
    Source(
        name="orders_german",
        half="validate-a",
        repository="Unbabel/BConTrasT",
        commit="96f33050c704eea1c10da6e8effcfb5495539e74",
        path="dev.json",
        licence="CC BY-SA 4.0",
        convert=_bcontrast,
        note=_JOINED,
        most_tokens=16_000,
    ),
    Source(
        name="travel_russian",
        half="validate-b",
        repository="vonCount/Russian-MultiWOZ",
        commit="1bd77673533e568ba0746ee304f758296f8dc77f",
        path="interim/v1/russian/dev_dialogues_001_ru.txt",
        licence="MIT",
        convert=_russian_multiwoz,
        note=_JOINED,
        most_tokens=16_000,
    ),
    Source(
        name="travel_chinese",
        half="validate-a",
        repository="thu-coai/CrossWOZ",
        commit="df82c9fdff91b9b130f2d6b89110d3870ba6260e",
        path="data/crosswoz/val.json.zip",
        licence="Apache-2.0",
        convert=_crosswoz,
        note=_JOINED,
        most_tokens=16_000,
    ),
    Source(
        name="chat_japanese",
        half="validate-a",
        repository="nu-dialogue/real-persona-chat",
        commit="28d0b6b3865b29cabc26c230a2db37cdf315e937",
        path="llm_dialogue_system/GPT-4.json",
        licence="CC BY-SA 4.0",
        convert=_real_persona_chat,
        note=_JOINED,
        most_tokens=16_000,
    ),
    Source(
        name="chat_italian",
        half="validate-b",
        repository="liuzeming01/XDailyDialog",
        commit="6e7ecf54c9f169215b4b8c18995c7aac74117127",
        path="data/it_test_human.txt",
        licence="Apache-2.0",
        convert=daily_dialog("Rispondi in italiano."),
        note=_JOINED,
        most_tokens=16_000,
    ),
    Source(
        name="codex_incident",
        half="validate-c",
        repository="itbench-hub/ITBench-SRE-Agent",
        commit="29c782af74f4f204457e3c7a87084f925a3919f9",
        path=f"{_CODEX}T14-26-37-019bc31f-c491-7c61-993a-5763f5b072a3.jsonl",
        licence="not stated",
        convert=codex,
        note=f"{_SHORTENED}; from pull request 11 (git fetch origin refs/pull/11/head)",
        most_tokens=60_000,
    ),
    Source(
        name="codex_incident_long",
        half="validate-c",
        repository="itbench-hub/ITBench-SRE-Agent",
        commit="29c782af74f4f204457e3c7a87084f925a3919f9",
        path=f"{_CODEX}T14-12-52-019bc313-2cee-7763-b8b7-cdeaeeeb2319.jsonl",
        licence="not stated",
        convert=codex,
        note=f"{_SHORTENED}; from pull request 11 (git fetch origin refs/pull/11/head)",
        most_tokens=60_000,
    ),
    Source(
        name="gemini_cli_admin",
        half="validate-c",
        repository="mischa-thisness/M-Gemini",
        commit="3bad8d462ef0a93165eb373a44f09a77910e5ecd",
        path="Archives/session-2026-01-11T00-25-17b4d5e9.json",
        licence="CC0 1.0",
        convert=gemini_cli,
        note=_SHORTENED,
        most_tokens=60_000,
    ),
    Source(
        name="gemini_cli_project",
        half="validate-c",
        repository="mischa-thisness/M-Gemini",
        commit="3bad8d462ef0a93165eb373a44f09a77910e5ecd",
        path="Archives/session-2026-01-01T01-15-376d5da4.json",
        licence="CC0 1.0",
        convert=gemini_cli,
        note=_SHORTENED,
        most_tokens=40_000,
    ),
    Source(
        name="claude_code_design",
        half="validate-c",
        repository="entireio/cli",
        commit="394f81fab87f71aa8938d91ff7a067c524ff344b",
        path="26/2159058f4e/0/full.jsonl",
        licence="MIT",
        convert=claude_code(),
        note=f"{_SHORTENED}; from the branch entire/checkpoints/v1",
        most_tokens=60_000,
    ),
    Source(
        name="claude_code_review",
        half="validate-c",
        repository="entireio/cli",
        commit="394f81fab87f71aa8938d91ff7a067c524ff344b",
        path="47/672e4ef20f/0/full.jsonl",
        licence="MIT",
        convert=claude_code(),
        note=f"{_SHORTENED}; from the branch entire/checkpoints/v1",
        most_tokens=60_000,
    ),
    Source(
        name="analysis_housing",
        half="validate-c",
        repository="ageron/handson-ml3",
        commit="e3f3f9e66d58cfa1d068a498433063a1d3fba9ef",
        path="02_end_to_end_machine_learning_project.ipynb",
        licence="Apache-2.0",
        convert=notebook,
        note="a notebook: its text is the user's, its code became calls",
        most_tokens=40_000,
    ),
    Source(
        name="documents_reports",
        half="validate-c",
        repository="NExTplusplus/TAT-QA",
        commit="870accc41953dcde885aabeb963d94aabdc0fbc3",
        path="dataset_raw/tatqa_dataset_dev.json",
        licence="MIT",
        convert=reports(slice(0, 60)),
        note="half of a page's questions come after the next page; a system line added",
    ),
    Source(
        name="role_play_game",
        half="validate-c",
        repository="RevanthRameshkumar/CRD3",
        commit="7fd4515eea411f0f9c5d0a03a8b6b8b2da464e81",
        path="data/cleaned data/C1E003.json",
        licence="CC BY-SA 4.0",
        convert=critical_role,
        note=f"the game master is the assistant; {_RUNS}",
    ),
    Source(
        name="role_play_chinese",
        half="validate-c",
        repository="morecry/CharacterEval",
        commit="fa232e6a9c3ec5d074240333fbffdf015b79533f",
        path="data/test_data.jsonl",
        licence="not stated",
        convert=character("吕子乔"),
        note=f"{_JOINED}; {_RUNS}",
    ),
    Source(
        name="drama_spanish",
        half="validate-c",
        repository="dracor-org/spandracor",
        commit="79c0e29bc79b9e62d2867a2550fbb062461bd0d3",
        path="tei/galdos-electra.xml",
        licence="CC0 1.0",
        convert=drama("Eres {} en una obra de teatro. Los demás hablan con su nombre delante."),
        note=f"{_MEETING}; {_RUNS}",
    ),
    Source(
        name="drama_russian",
        half="validate-c",
        repository="dracor-org/rusdracor",
        commit="b178c0401ffcf58b209104e90e38ff718f188fd8",
        path="tei/ostrovsky-les.xml",
        licence="CC0 1.0",
        convert=drama("Вы {} в пьесе. Перед репликами других стоят их имена."),
        note=f"{_MEETING}; {_RUNS}",
    ),
    Source(
        name="chat_german",
        half="validate-c",
        repository="liuzeming01/XDailyDialog",
        commit="6e7ecf54c9f169215b4b8c18995c7aac74117127",
        path="data/de_dev_human.txt",
        licence="Apache-2.0",
        convert=daily_dialog("Antworten Sie auf Deutsch."),
        note=_JOINED,
    ),
    Source(
        name="restaurants_hindi",
        half="validate-c",
        repository="sumanbanerjee1/Code-Mixed-Dialog",
        commit="9df1d4dc800548a883f8bc1a9ce4116c77aebc02",
        path="data/hindi/dialog-dstc2-dev.txt",
        licence="Apache-2.0",
        convert=restaurants_hindi,
        note=f"{_JOINED}; Hindi in Latin letters; calls and results are text; numbers stand for placeholders",
    ),
    Source(
        name="hotels_japanese",
        half="validate-c",
        repository="megagonlabs/asdc",
        commit="f37d6575c73602adcb8ae3687520726793baa672",
        path=", ".join(f"data/main/dialog/json/{number:03}.json" for number in range(1, 41)),
        licence="CC BY 4.0",
        convert=hotels_japanese,
        note=_JOINED,
    ),
    Source(
        name="channel_support",
        half="validate-c",
        repository="jkkummerfeld/irc-disentanglement",
        commit="82ed04f9627a45d0d6f2ec3c8683c88eb408a0d5",
        path=", ".join(f"data/new-domains/stripe.{number}.ascii.txt" for number in range(3)),
        licence="CC BY 4.0",
        convert=channel,
        note=f"many tiny turns; {_MEETING}; {_RUNS}",
    ),
    Source(
        name="phone_calls",
        half="validate-c",
        repository="NathanDuran/Switchboard-Corpus",
        commit="2aec5da98f15808d578c83328b871907b9d31f05",
        path="swda_data/val_set.txt",
        licence="GPL-3.0",
        convert=phone,
        note=f"{_JOINED}; many tiny turns",
    ),
)


if __name__ == "__main__":
    main()
