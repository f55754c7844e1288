"""Conversations of other kinds than those the package was tuned on, made from public repositories.

    python benchmarks/quality/held_out.py FOLDER --checkouts CHECKOUTS --clone
    python benchmarks/quality/compaction.py TUNED --held-out FOLDER/validate-a

Each is read at a fixed commit (`git show`) and written as JSON: `messages`, `tools`, `facts`. Their licences are their
owners'; no data is part of this project. The sets are fixed here: figures of `validate-a` may be looked at while
something is tuned, those of `validate-b` once, at the end. `validate-c` has sessions as coding agents record them.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.measuring import count, rendered
from benchmarks.lib.next_action import stands, tokens
from benchmarks.lib.transcripts import (
    Convert,
    claude_code,
    codex,
    daily_dialog,
    dialogues,
    friends,
    gemini_cli,
    meeting,
    mini_swe_agent,
    russian_multiwoz,
    swe_agent,
    tau_airline,
    tau_retail,
)
from tests.integration.validity import JsonDict, searchable

_HOST = "https://github.com"
_MOST_FACTS = 12
# One or two that happen to repeat are chance.
_LEAST_FACTS = 4
_LEAST_DISTANCE = 4


class Repository(NamedTuple):
    """Where conversations come from.

    Attributes:
        name: on GitHub, `owner/name`.
        commit: at which the files are read.
        licence: of the repository at that commit.
        convert: from a file's bytes to messages, possibly more than are used.
        files: path by `SET/NAME` of the file that is written; several paths with ", " between them are one
            conversation, and what follows a `!` is the member of an archive.
        note: what is not as it was recorded.
        most_tokens: how much of a conversation is used.
    """

    name: str
    commit: str
    licence: str
    convert: Convert
    files: Mapping[str, str]
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
        for source in SOURCES:
            print(f"{source.name}@{source.commit[:12]} {source.licence}: {', '.join(source.files)}; {source.note}")
        return
    if not chosen.folder or not chosen.checkouts:
        parser.error("name a folder to write to, and --checkouts")
    for source in SOURCES:
        if chosen.clone:
            _fetch(source, chosen.checkouts)
        for name, path in source.files.items():
            _write(chosen.folder / f"validate-{name}.json", source, path, _read(source, path, chosen.checkouts))


def _fetch(source: Repository, checkouts: Path) -> None:
    """Gets the commit alone, on whatever branch or pull request it is."""
    folder = checkouts / source.name.partition("/")[2]
    git = ["git", "-C", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ".git").exists() and not (folder / "HEAD").exists():
        subprocess.run([*git, "init", "--quiet"], check=True)
    if subprocess.run([*git, "cat-file", "-e", source.commit], capture_output=True, check=False).returncode != 0:
        address = f"{_HOST}/{source.name}"
        subprocess.run([*git, "fetch", "--quiet", "--depth", "1", address, source.commit], check=False)


def _read(source: Repository, path: str, checkouts: Path) -> bytes | None:
    folder = checkouts / source.name.partition("/")[2]
    if not folder.exists():
        return None
    path, is_archive, member = path.partition("!")
    files = [f"{source.commit}:{each}" for each in path.split(", ")]
    read = subprocess.run(["git", "-C", str(folder), "show", *files], capture_output=True, check=False)
    if read.returncode != 0:
        return None
    return zipfile.ZipFile(io.BytesIO(read.stdout)).read(member) if is_archive else read.stdout


def _write(target: Path, source: Repository, path: str, data: bytes | None) -> None:
    if data is None:
        print(f"{target.stem:24} not read: {source.name} at {source.commit[:12]} is not there")
        return
    messages = _bounded(in_turn(source.convert(data)), source.most_tokens)
    made = {
        "source": f"github.com/{source.name}@{source.commit[:12]} {path}",
        "licence": source.licence,
        "note": source.note,
        "messages": messages,
        "tools": _inferred_tools(messages),
        "facts": planted_facts(target.stem, messages),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(made, ensure_ascii=False, indent=1), encoding="utf-8")
    size, facts = sum(count(rendered(message)) for message in messages), len(made["facts"])
    print(f"{target.stem:24} {len(messages)} messages, {size} tokens, {facts} facts")


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


_MINI_PATH = "swebench_results/20251118_gemini-3-pro-74pct/trajs/{0}/{0}.traj.json"
_CTF = "trajectories/demonstrations/ctf/"
_LOCOMO_PATH = "data/locomo10.zip!data/multimodal_dialog/locomo10_v2/{}.json"
_CODEX = "agent_outputs/2/1/sessions/2026/01/15/rollout-2026-01-15"
_GEMINI = "Archives/session-2026-01-"
_SHORTENED = "without thinking; results are cut to 6,000 characters; tool schemas inferred"
_JOINED = "short dialogues joined as one session; a system line added"
SOURCES = (
    Repository(
        "gruckion/mini-swe-agent",
        "d12a71affd95403b036b2bdbd827349b77bfffb9",
        "MIT",
        mini_swe_agent,
        {
            "a/mini_django_11138": _MINI_PATH.format("django__django-11138"),
            "b/mini_pylint_6528": _MINI_PATH.format("pylint-dev__pylint-6528"),
        },
        "commands in code blocks became calls",
    ),
    Repository(
        "SWE-agent/SWE-agent",
        "3ea751c087f32b16e039a2233dd6eefecef325d5",
        "MIT",
        swe_agent,
        {
            "a/sweagent_ctf_web": f"{_CTF}web/i_got_id_demo.traj",
            "b/sweagent_ctf_three": ", ".join(
                f"{_CTF}{task}.traj" for task in ("crypto/katy", "forensics/flash", "crypto/BabyTimeCapsule")
            ),
        },
        "commands and their output are text; several files are tasks of one agent, joined",
    ),
    Repository(
        "jimmc414/cctrace",
        "4b4d4add0bb3a65359ccf50501c6792e2fc13ba5",
        "MIT",
        claude_code(is_whole=True),
        {"b/claude_code_sessions": ".claude-sessions/phase0-investigation/session/main.jsonl"},
        "without thinking; tool schemas inferred",
        60_000,
    ),
    Repository(
        "sierra-research/tau-bench",
        "59a200c6d575d595120f1cb70fea53cef0632f6b",
        "MIT",
        tau_airline(3, 58),
        {"a/tau_airline_03_08": "historical_trajectories/gpt-4o-airline.json"},
        "two customers of one agent joined (tasks 3 and 8); tool schemas inferred",
    ),
    Repository(
        "sierra-research/tau-bench",
        "59a200c6d575d595120f1cb70fea53cef0632f6b",
        "MIT",
        tau_retail(slice(18, 25)),
        {"b/tau_retail_few_shot": "few_shot_data/MockRetailDomainEnv-few_shot.jsonl"},
        "seven customers of one agent joined; calls were not recorded, results are text; a system line added",
    ),
    Repository(
        "snap-research/locomo",
        "e76cdff4a04fce19090596d49862fe87a5c15aaa",
        "not stated",
        friends,
        {"a/locomo_41": _LOCOMO_PATH.format(41), "b/locomo_26": _LOCOMO_PATH.format(26)},
        "a system line and date marks added; one friend is the assistant; no licence file at this commit",
    ),
    Repository(
        "Yale-LILY/QMSum",
        "83d7768c1f2b4dfeb091385d3dc7e239b8e5bb7e",
        "MIT",
        meeting,
        {
            "a/meeting_academic": "data/Academic/test/Bed003.json",
            "b/meeting_committee": "data/Committee/test/education_4.json",
        },
        "who speaks most is the assistant",
    ),
    Repository(
        "Unbabel/BConTrasT",
        "96f33050c704eea1c10da6e8effcfb5495539e74",
        "CC BY-SA 4.0",
        dialogues(
            "Sie nehmen Bestellungen und Termine am Telefon entgegen.",
            "",
            "speaker",
            "customer",
            text={True: "source", False: "target"},
        ),
        {"a/orders_german": "dev.json"},
        _JOINED,
        16_000,
    ),
    Repository(
        "vonCount/Russian-MultiWOZ",
        "1bd77673533e568ba0746ee304f758296f8dc77f",
        "MIT",
        russian_multiwoz,
        {"b/travel_russian": "interim/v1/russian/dev_dialogues_001_ru.txt"},
        _JOINED,
        16_000,
    ),
    Repository(
        "thu-coai/CrossWOZ",
        "df82c9fdff91b9b130f2d6b89110d3870ba6260e",
        "Apache-2.0",
        dialogues("你是北京的旅行助手。", "messages", "role", "usr", text={True: "content", False: "content"}),
        {"a/travel_chinese": "data/crosswoz/val.json.zip!val.json"},
        _JOINED,
        16_000,
    ),
    Repository(
        "nu-dialogue/real-persona-chat",
        "28d0b6b3865b29cabc26c230a2db37cdf315e937",
        "CC BY-SA 4.0",
        dialogues(
            "あなたは友人と雑談しています。",
            "utterances",
            "interlocutor",
            "user",
            text={True: "text", False: "text"},
        ),
        {"a/chat_japanese": "llm_dialogue_system/GPT-4.json"},
        _JOINED,
        16_000,
    ),
    Repository(
        "liuzeming01/XDailyDialog",
        "6e7ecf54c9f169215b4b8c18995c7aac74117127",
        "Apache-2.0",
        daily_dialog("Rispondi in italiano."),
        {"b/chat_italian": "data/it_test_human.txt"},
        _JOINED,
        16_000,
    ),
    Repository(
        "itbench-hub/ITBench-SRE-Agent",
        "29c782af74f4f204457e3c7a87084f925a3919f9",
        "not stated",
        codex,
        {
            "c/codex_incident": f"{_CODEX}T14-26-37-019bc31f-c491-7c61-993a-5763f5b072a3.jsonl",
            "c/codex_incident_long": f"{_CODEX}T14-12-52-019bc313-2cee-7763-b8b7-cdeaeeeb2319.jsonl",
        },
        f"{_SHORTENED}; from pull request 11 (git fetch origin refs/pull/11/head)",
        60_000,
    ),
    Repository(
        "mischa-thisness/M-Gemini",
        "3bad8d462ef0a93165eb373a44f09a77910e5ecd",
        "CC0 1.0",
        gemini_cli,
        {
            "c/gemini_cli_admin": f"{_GEMINI}11T00-25-17b4d5e9.json",
            "c/gemini_cli_project": f"{_GEMINI}01T01-15-376d5da4.json",
        },
        _SHORTENED,
        60_000,
    ),
    Repository(
        "entireio/cli",
        "394f81fab87f71aa8938d91ff7a067c524ff344b",
        "MIT",
        claude_code(),
        {
            "c/claude_code_design": "26/2159058f4e/0/full.jsonl",
            "c/claude_code_review": "47/672e4ef20f/0/full.jsonl",
        },
        f"{_SHORTENED}; from the branch entire/checkpoints/v1",
        60_000,
    ),
)


if __name__ == "__main__":
    main()
