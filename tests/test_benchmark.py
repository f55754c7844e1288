"""The benchmark runs on a conversation of its own, and its yardsticks say what they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from benchmarks.lib import methods, transcripts
from benchmarks.lib.constraints import EXPLICIT, planted
from benchmarks.lib.directives import invented
from benchmarks.lib.measuring import JsonDict, Slot, Tally, Transcript, Turn, prompt_tokens, replay, row
from benchmarks.lib.next_action import stands, taken, tokens
from benchmarks.lib.summarisers import summary
from benchmarks.lib.superseded import CHANGES, changing, is_clear
from benchmarks.load import fleet, load
from benchmarks.quality import compaction, held_out, questions
from benchmarks.quality.conformance import Compactor, _messages, measured
from benchmarks.quality.held_out import SOURCES, Source, conversation, planted_facts
from benchmarks.quality.questions import Chat, Evidence, _asked, _values
from litellm_compaction.core.judging import judged
from litellm_compaction.core.prompts import FRAME_NOTE, frame
from litellm_compaction.simulator import Simulator, serve
from tests import virtual_time
from tests.builders import assistant, calls, result, system, user
from tests.integration.validity import searchable


def transcript() -> Transcript:
    messages = [system(), user("Port src/parser.py, and keep the port at 8080.")]
    for number in range(30):
        text = f"looked at src/file_{number}.py\n" + "some output of the tool\n" * 60
        messages += [calls(f"c{number}", content="", arguments=f'{{"n": {number}}}'), result(f"c{number}", text)]
    return Transcript("made", [*messages, assistant("Done.")], [], [{"text": "8080", "msg": 1}])


async def test_our_row_cuts_nothing_and_keeps_the_fact() -> None:
    """No truncation, all valid, less work than the server's own cut."""
    made = transcript()
    ours = row([await replay(made, 4096, methods.ours("dead", made, 4096))])
    assert (ours.truncated, ours.valid_ratio, ours.facts) == (0, 1.0, 1.0)
    stock = row([await replay(made, 4096, methods.stock(made, 4096))])
    assert stock.truncated > 0
    assert ours.stability > stock.stability


def test_a_slot_reads_only_what_it_does_not_hold() -> None:
    """A prompt that goes on where the last one ended costs its new part."""
    slot = Slot()
    slot.run((), [user("word " * 100)], "")
    first = slot.work
    slot.run((), [user("word " * 100)], "")
    assert slot.work - first < 5


def test_a_constraint_is_planted_once_and_nothing_else_changes() -> None:
    """In every place the sentence stands in one message of the user."""
    made = transcript()
    for place in ("top", "middle", "late"):
        changed = planted(made, place, EXPLICIT[0])
        assert changed is not None
        holders = [message for message in changed.messages if EXPLICIT[0] in str(message["content"])]
        assert [message["role"] for message in holders] == ["user"]


def test_a_superseded_value_is_clear_where_the_newest_comes_last() -> None:
    """Or where the older line says itself what came later; an older value alone, or behind the newest, is not."""
    change = CHANGES[0]
    older, newer = user(change.older), user(change.newer)
    assert is_clear(change, [older, newer])
    assert is_clear(change, [newer])
    assert is_clear(change, [newer, user(f"{change.older} (later: port {change.new_value})")])
    assert not is_clear(change, [newer, older])
    assert not is_clear(change, [older])


def test_a_change_is_said_twice_in_its_order() -> None:
    """Both sentences are the user's, the newer one later."""
    changed = changing(transcript(), CHANGES[1])
    assert changed is not None
    texts = [str(message["content"]) for message in changed.messages if message["role"] == "user"]
    said = [at for at, text in enumerate(texts) for each in CHANGES[1][:2] if each in text]
    assert said == [1, 2]


def test_tokens_are_known_by_their_form() -> None:
    """Paths, names, numbers, ids, addresses and what is quoted; no plain words, and nothing of one digit."""
    text = "I ran src/app.py:12 and np.random on user_id 4711 (lastName, A1B2), see https://a.test/x in 7 s, and/or so."
    assert tokens(assistant(text)) == {
        *("src/app.py", "12", "np.random", "user_id", "4711", "lastName", "A1B2", "https://a.test/x"),
    }
    assert tokens(assistant("我在《三体》第 12 章,写信给 wang@li.test,共 1,204.50 元")) == {
        *("三体", "12", "wang@li.test", "1,204.50"),
    }
    called = calls("c1", content="Next.", arguments='{"where": {"city": "New York", "rows": [20, 3]}, "all": true}')
    assert tokens(called) == {"New York", "20"}
    assert tokens(calls("c1", content="", arguments="no JSON " * 9 + "JG7FMM")) == {"JG7FMM"}


@pytest.mark.parametrize(
    ("token", "text", "expected"),
    [
        ("12", "in 2012", False),
        ("12", "12.5 and 1,12 and x12", False),
        ("12", "chapter 12.", True),
        ("12", "第12章", True),
        ("a.py", "src/a.py:3", True),
        ("a.py", "aa.py a.pyc", False),
        ("user_id", "my_user_id, user_id", True),
        ("2024-05-20", "on 2024-05-20, early", True),
    ],
)
def test_a_token_stands_as_a_word_of_its_own(token: str, text: str, expected: bool) -> None:
    """Part of a longer number or name is something else."""
    assert stands(token, text) is expected


def test_taken_is_what_the_newest_messages_do_not_hold() -> None:
    """Of what the answer names, that which it has from before its last three messages, the system message included."""
    client = [system("Write to ops@a.test."), user("Port x/a.py to 8080."), assistant("1"), user("2"), user("b.py_2")]
    answer = assistant("x/a.py is at 8080, ops@a.test knows, b.py_2 and new_name too.")
    assert taken(client, answer) == ["8080", "ops@a.test", "x/a.py"]
    assert taken(client[:3], answer) == []


async def test_next_action_support_is_the_share_that_the_prompt_holds() -> None:
    """A prompt that lacks one of two things counts a half; a prompt that was not compacted counts nothing."""
    filler = [message for _ in range(3) for message in (assistant("Yes."), user("Go on."))]
    answers = [message for _ in range(3) for message in (assistant("x/a.py now says 8080."), *filler[1:], *filler[:2])]
    made = Transcript("made", [user("Set 8080 in x/a.py."), *filler, *answers], [], [])

    async def halved(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        return Turn([user("About x/a.py."), *client[-2:]], is_compacted=True, is_new=True)

    async def untouched(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        return Turn(client)

    half, nothing = await replay(made, 4096, halved), await replay(made, 4096, untouched)
    assert (half.supported, half.missing, row([half]).next_ratio) == ([0.5] * 3, {"8080": 3}, 0.5)
    assert nothing.supported == []
    few = Tally("few", turns=1, bound=1, supported=[0.0, 0.0])
    assert row([half, few]).next_ratio == 0.5


def test_a_directive_without_a_source_is_invented() -> None:
    """A rule that nobody said, a fact that was made a rule and a rule with another number are; quoted ones are not."""
    client = [
        system("You must answer in JSON."),
        user("Never push to main. The port is 8080, the tests are slow. Spend at most 300 euros. 请不要修改这个文件。"),
        assistant("Understood."),
        user("Go on."),
    ]

    def found(*rules: str) -> list[str]:
        record = frame("\n".join(rules), "- Never push to main.", round_number=1)
        return invented(client, [client[0], user(f"{record}\n\nGo on.")])

    assert (
        found("## Rules that must hold", "- **Never** push to main", "Spend at most 300 euros.", "请不要修改这个文件")
        == []
    )
    assert found("- The user said never to push anything to main.") == []
    for rule in (
        *("Always run the linter first.", "The tests must never be run.", "The port must be 8080."),
        *("Spend at most 400 euros.", "必须先运行测试", "Niemals die Konfiguration ändern."),
    ):
        assert found(f"- {rule}") == [f"- {rule.rstrip('。')}"]


def test_invented_directives_are_looked_for_in_what_a_method_without_a_frame_adds() -> None:
    """Lines that are the client's own add nothing."""
    client = [user("Port it.\nYou must be quick."), assistant("Yes."), user("Go on.")]
    assert invented(client, [user("You must be quick.\nAlways ask the manager."), user("Go on.")]) == [
        "Always ask the manager."
    ]
    assert invented(client, client) == []


def test_planted_facts_are_values_that_the_assistant_comes_back_to() -> None:
    """What stands first in one message, not the system's, and again in an answer four messages later or more."""
    filler = [message for _ in range(2) for message in (assistant("Yes."), user("Go on."))]
    messages = [
        system("The key is K-9000."),
        user("Order W6679257 to wang@li.test for 232.49, rows 77, from Heidelberg, by 2024-05-20, and Never 4711."),
        *filler,
        user("Take ZX81-B."),
        assistant("W6679257, wang@li.test, 232.49, ZX81-B, K-9000, 2024-05-20 and to Heidelberg; 77."),
    ]
    facts = planted_facts("made", messages)
    assert {fact["text"] for fact in facts} == {"W6679257", "wang@li.test", "232.49", "2024-05-20", "Heidelberg"}
    assert {fact["msg"] for fact in facts} == {1}
    assert planted_facts("made", messages) == facts
    assert planted_facts("made", [*messages[:-1], assistant("W6679257 and 232.49.")]) == []


def test_a_held_out_conversation_is_one_that_a_client_could_send() -> None:
    """The system first, user and assistant in turn, as much as is wanted, up to an answer."""

    def convert(data: bytes) -> Iterator[JsonDict]:
        yield assistant("Before anybody asked.")
        yield system("Be brief.")
        yield assistant("Hello.")
        for text in data.decode().split():
            yield user(text)
            yield user("and more")
            yield assistant(f"{text}, I see")
            yield assistant("Next?")

    made = Source(
        name="made",
        half="validate-a",
        repository="a/b",
        commit="c" * 40,
        path="p",
        licence="MIT",
        convert=convert,
        note="",
        most_tokens=200,
    )
    messages = conversation(made, b"one two three " * 100)["messages"]
    roles = [message["role"] for message in messages]
    assert roles[0] == "system"
    assert roles[-1] == "assistant"
    assert all(role != after for role, after in pairwise(roles))
    assert 4 < len(messages) < 60
    assert messages[1:3] == [user("one\nand more"), assistant("one, I see\nNext?")]


def test_recorded_calls_and_results_become_tool_rounds() -> None:
    """From an agent's code blocks, from entries without their thinking, and from several files in one."""
    by_name = {source.name: source for source in SOURCES}
    block = "I look.\n\n```bash\nls -la\n```"
    mini = [system(), user("Go."), assistant(block), user("<output>a.py</output>"), assistant("Done.")]
    made = conversation(by_name["mini_django_11138"], json.dumps({"messages": mini}).encode())
    assert [message["role"] for message in made["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert "ls -la" in searchable(made["messages"])
    assert [tool["function"]["name"] for tool in made["tools"]] == ["bash"]
    entries: list[JsonDict] = [
        {"type": "summary"},
        {"type": "user", "message": user("Read a.py.")},
        {"type": "assistant", "message": assistant([{"type": "thinking", "thinking": "hm"}])},
        {
            "type": "assistant",
            "message": assistant([{"type": "tool_use", "id": "t1", "name": "Read", "input": {"n": 1}}]),
        },
        {
            "type": "assistant",
            "message": assistant([{"type": "tool_use", "id": "t2", "name": "Read", "input": {"n": 2}}]),
        },
        {"type": "user", "message": user([{"type": "tool_result", "tool_use_id": "t1", "content": "text of a.py"}])},
        {"type": "assistant", "message": assistant([{"type": "text", "text": "It is short."}])},
    ]
    data = "\n".join(map(json.dumps, entries)).encode()
    session = conversation(by_name["claude_code_sessions"], data)["messages"]
    assert [message["role"] for message in session] == ["user", "assistant", "tool", "assistant"]
    assert [call["id"] for call in session[1]["tool_calls"]] == ["t1"]
    runs = json.dumps({"history": [system("S"), user("First."), assistant("One.")]})
    joined = conversation(by_name["sweagent_ctf_three"], f"{runs}\n{runs}".encode())["messages"]
    assert [message["role"] for message in joined] == ["system", "user", "assistant", "user", "assistant"]


def test_the_halves_are_of_the_same_size_and_every_source_is_pinned() -> None:
    """Eight and eight, and seventeen of other kinds; each at a full commit, each with its licence."""
    halves = [source.half for source in SOURCES]
    assert halves.count("validate-a") == halves.count("validate-b") == 8
    assert halves.count("validate-c") == 17
    assert all(len(source.commit) == 40 and source.licence for source in SOURCES)
    assert len({source.name for source in SOURCES}) == len(SOURCES)


def test_clone_fetches_each_missing_commit_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the commit that is read; a second run fetches nothing."""
    made = tmp_path / "host" / "a" / "b"
    made.mkdir(parents=True)
    git = ["git", "-C", str(made), "-c", "user.name=n", "-c", "user.email=n@host.test"]
    (made / "p").write_text("text")
    for command in (["init", "-q"], ["add", "p"], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    source = Source(
        name="made",
        half="validate-c",
        repository="a/b",
        commit=commit,
        path="p",
        licence="MIT",
        convert=lambda data: iter([user(data.decode()), assistant("Yes.")]),
        note="",
    )
    monkeypatch.setattr(held_out, "SOURCES", (source,))
    monkeypatch.setattr(held_out, "_HOST", f"file://{tmp_path / 'host'}")
    arguments = ["held_out.py", str(tmp_path / "data"), "--checkouts", str(tmp_path / "checkouts"), "--clone"]
    monkeypatch.setattr(sys, "argv", arguments)
    held_out.main()
    written = json.loads((tmp_path / "data" / "validate-c" / "made.json").read_text())
    assert written["messages"] == [user("text"), assistant("Yes.")]
    monkeypatch.setattr(held_out, "_HOST", f"file://{tmp_path / 'gone'}")
    held_out.main()
    assert "not read" not in capsys.readouterr().out


def test_sessions_of_other_agents_become_tool_rounds() -> None:
    """Codex, Gemini and Claude Code, notebooks: the same roles, without thoughts, long results without their middle."""
    call = {"type": "function_call", "call_id": "c", "name": "shell", "arguments": '{"command": "ls"}'}
    rollout = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List it."}]},
        {"type": "reasoning", "summary": []},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "a" * 3_000 + "b" * 9_000},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Listed."}]},
    ]
    codex_lines = [{"type": "response_item", "payload": item} for item in rollout]
    answer = {"functionResponse": {"response": {"output": "Output: x"}}}
    gemini = [
        {"type": "info", "content": "Update!"},
        {"type": "user", "content": "Who?"},
        {
            "type": "gemini",
            "content": "",
            "thoughts": ["hm"],
            "toolCalls": [{"id": "g", "name": "shell", "args": {}, "result": [answer]}],
        },
        {"type": "gemini", "content": "You."},
    ]
    claude = [
        {"type": "user", "isMeta": True, "message": user("Caveat.")},
        {"type": "user", "message": user("<command-name>/ide</command-name>")},
        {"type": "user", "message": user("Read.")},
        {"type": "assistant", "message": assistant([{"type": "tool_use", "id": "t", "name": "Read", "input": {}}])},
        {"type": "user", "message": user([{"type": "tool_result", "tool_use_id": "t", "content": "text"}])},
        {"type": "assistant", "message": assistant("Done.")},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["Load."]},
        {"cell_type": "code", "source": ["1 + 1"], "outputs": [{"data": {"text/plain": ["2"]}}]},
        {"cell_type": "code", "source": ["2"], "outputs": []},
    ]
    gemini_session = json.dumps({"messages": gemini}).encode()
    read = {
        "codex": list(transcripts.codex("\n".join(map(json.dumps, codex_lines)).encode())),
        "gemini": [each for each in transcripts.gemini_cli(gemini_session) if each != assistant("")],
        "claude": list(transcripts.claude_code()("\n".join(map(json.dumps, claude)).encode())),
        "notebook": list(transcripts.notebook(json.dumps({"cells": cells}).encode()))[1:4],
    }
    rounds = {name: [message["role"] for message in messages[:3]] for name, messages in read.items()}
    assert rounds == {name: ["user", "assistant", "tool"] for name in read}
    assert read["codex"][2]["content"] == f"{'a' * 3_000}\n[6000 characters left out]\n{'b' * 3_000}"
    assert [messages[2]["content"] for name, messages in read.items() if name != "codex"] == ["Output: x", "text", "2"]
    assert read["claude"][0]["content"] == "Read."


def test_of_many_speakers_one_is_the_assistant() -> None:
    """The name that was asked for, or who speaks most; of others' lines in a row the last twenty."""
    lines = [("Ann", f"line {number}") for number in range(30)] + [
        ("Bob", "A line that is long enough to be most." * 9)
    ]
    made = list(transcripts.play("", lines, "You are {}."))
    assert made[0]["content"] == "You are Bob."
    assert made[1]["content"].splitlines() == [f"Ann: line {number}" for number in range(10, 30)]
    assert list(transcripts.play("Ann", lines, "{}"))[1]["role"] == "assistant"


def test_evidence_is_a_value_beside_its_words_or_most_words_of_a_sentence() -> None:
    """The number alone, or half of the instruction, is no evidence."""
    (value,) = _values("It ends on March 29.", ["The first sprint ends on March 29, with the login."])[:1]
    assert value.value == "29"
    assert value.stands_in("sprint ends: March 29")
    assert not value.stands_in("Chapter 29, and nothing else about it")
    assert not value.stands_in("The first sprint ends on March 290.")
    texts = {3: "Hello there. Always name versions of libraries.", 4: "Thanks."}
    wanted = {"instruction_being_tested": "Always name versions of the libraries", "source_chat_ids": [3]}
    (told,) = _asked("instruction_following", wanted, texts)
    assert told.stands_in("- Always name versions of libraries")
    assert not told.stands_in("Always name them.\nversions of libraries")
    assert _asked("instruction_following", {**wanted, "source_chat_ids": [4]}, texts) == []


def test_questions_are_judged_by_the_prompt_of_the_last_request() -> None:
    """An oracle keeps the evidence; without a summariser the middle that the server cuts is gone; the rule has both."""
    messages = [system(), user("Hello."), assistant("Hi."), user("The budget is 4711 dollars."), assistant("Oui.")]
    for number in range(60):
        messages += [user(f"question {number} " + "about it " * 40), assistant("an answer that is long " * 20)]
    told = "The budget is 4711 dollars."
    evidence = Evidence(told, "4711", frozenset({"budget", "dollars"}))
    chat = Chat(Transcript("made", messages, [], [{"text": told, "msg": 3}]), [[evidence]], is_reserved=False)
    shares = questions.measured([chat], 4096)
    assert shares["ours, ideal"] == shares["rule of forty lines"] == [1.0]
    assert shares["server cuts the middle"] == [0.0]
    assert set(shares) == {
        "ours, dead",
        "ours, extractive",
        "ours, ideal",
        "rule of forty lines",
        "server cuts the middle",
    }
    assert set(questions.measured([chat], 4096, "cuts")) == {"server cuts the middle"}


def test_the_rule_takes_no_more_tokens_than_the_record_in_whose_place_it_stands() -> None:
    """What the user said last stays, also where the record stands before it."""
    messages = [user(f"Pay {number} dollars to nr {number}, please." * 9) for number in range(40)]
    sent = [user("record " * 400 + messages[-1]["content"])]
    ruled = methods.by_rule(messages, sent)
    assert ruled[-1] == messages[-1]
    assert 300 < prompt_tokens((), ruled) <= prompt_tokens((), sent)


def test_a_table_of_tuned_data_alone_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No figure is reported without its held-out row."""
    monkeypatch.setattr(sys, "argv", ["compaction.py", str(tmp_path), "--windows", "4096", "--only", "none"])
    compaction.main()
    assert compaction.TUNED_ALONE in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--held-out", str(tmp_path)])
    compaction.main()
    assert compaction.TUNED_ALONE not in capsys.readouterr().out


def test_the_table_has_tuned_held_out_and_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three lines for each row with `--held-out`; one for each target and summariser with `--target-ratios`."""
    made = transcript()
    for name in ("tuned", "held"):
        (tmp_path / name).mkdir()
        whole = {"messages": made.messages, "tools": [], "facts": made.facts}
        (tmp_path / name / "made.json").write_text(json.dumps(whole))
    arguments = ["compaction.py", str(tmp_path / "tuned"), "--windows", "4096"]
    held = ["--held-out", str(tmp_path / "held"), "--only", "ours, dead"]
    monkeypatch.setattr(sys, "argv", [*arguments, *held])
    compaction.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("ours")]
    assert [row[2] for row in rows] == ["tuned", "held-out", "gap"]
    assert rows[0][3:] == rows[1][3:]
    assert {float(value) for value in rows[2][3:]} == {0.0}
    monkeypatch.setattr(sys, "argv", [*arguments, "--target-ratios", "0.3", "0.6"])
    compaction.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("ours")]
    assert [(row[1], row[3]) for row in rows] == [(kind, at) for at in ("0.3", "0.6") for kind in ("ideal,", "dead,")]
    # The last lines are compacted less deeply, so a prompt lasts shorter.
    assert float(rows[3][-3]) < float(rows[1][-3])


class Said(NamedTuple):
    """A turn as the conformance kit has it."""

    role: str
    text: str


def test_a_kits_session_is_left_shorter_each_round_and_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the budget, the record's constant words left out of it; the next round finds the record in the text."""
    monkeypatch.setitem(sys.modules, "compaction_kit", types.ModuleType("compaction_kit"))
    fake = types.ModuleType("compaction_kit.compacted")
    fake.CompactedContext = types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "compaction_kit.compacted", fake)
    turns = [Said("system", "Be brief."), Said("user", "Never send W6679257 to anybody.")]
    for number in range(40):
        turns += [Said("assistant", "Noted."), Said("user", f"We talked about chapter {number} of the long report.")]
    turns.append(Said("assistant", "Noted."))
    whole = sum(len(turn.text) + len(turn.role) + 4 for turn in turns)
    ours = Compactor("dead", [])
    once = ours.compact(turns, 1, budget_chars=whole // 3).text
    assert "Never send W6679257 to anybody." in once
    assert whole // 6 < len(once) <= whole // 3
    assert FRAME_NOTE not in once
    read = list(_messages([Said("system", once)]))
    assert read[0] == system("Be brief.")
    assert FRAME_NOTE in read[1]["content"]
    again = ours.compact([Said("system", once)], 2, budget_chars=whole // 3).text
    assert "Never send W6679257 to anybody." in again
    assert len(again) <= whole // 3
    framed = Compactor("dead", [], is_framed=True).compact(turns, 1, budget_chars=whole // 3).text
    assert FRAME_NOTE in framed
    assert len(framed) <= whole // 3
    assert ours.compact(turns, 1, budget_chars=20).text == ""


def test_the_kit_ranks_our_rows_among_its_own() -> None:
    """Our rows keep the budget; the kit's best keeps more of its own sessions than its worst."""
    pytest.importorskip("compaction_kit", reason="needs the extra `bench`")
    report = measured([1], [0.3], only="")
    found = {entry["compactor"]: entry for entry in report["entries"]}
    assert all(found[f"ours, {kind}"]["budget_compliant"] for kind in ("dead", "lossy", "ideal"))
    kept = {name: entry["randomized"]["overall_final_survival"] for name, entry in found.items()}
    assert kept["ours, dead"] > kept["lossy-truncation"]
    assert kept["semantic-checklist"] > kept["lossy-truncation"]


async def test_a_made_up_rule_of_a_model_is_counted() -> None:
    """Three for each new compaction that its summary stands in, none for a model that keeps to what was said."""
    facts = [{"text": "keep the port at 8080", "msg": 1}]
    made = Transcript("made", transcript().messages, [], facts)
    tallies = {kind: await replay(made, 8192, methods.every_time(kind, made, 8192)) for kind in ("ideal", "inventing")}
    assert tallies["ideal"].compactions > 0
    assert tallies["ideal"].invented == 0
    assert tallies["inventing"].invented == 3 * tallies["inventing"].compactions


@pytest.mark.parametrize(
    "said",
    [
        "The port is 8080, and the work goes on.",
        "Порт 8080, работа идёт дальше.",
        "端口是8080。这项工作还在继续。",
        "ポートは8080です。",
    ],
)
def test_a_scripted_summary_is_one_that_the_package_uses(said: str) -> None:
    """However long it is, in the conversation's own script: a rejected one would measure the dead model twice."""
    prompt = "USER\n" + f"{said}\n" * 200
    text = summary("ideal", prompt, ["8080"], 1200)
    assert "8080" in text
    assert len(text) > 1000
    assert judged(text, instruction="Write a record.", source=[said * 20]).fault == ""


def load_side(name: str, simulator: Simulator, base_url: str) -> load.Side:
    """A simulated server in the place of a worker, with this process's memory and time."""
    process = types.SimpleNamespace(pid=os.getpid())
    worker: Any = types.SimpleNamespace(base_url=base_url, headers={}, process=process, lines=[])
    asked: Any = types.SimpleNamespace(asked=lambda: load.told(simulator, is_guarded=name == "ours"))
    return load.Side(name, [worker], asked)


def test_the_load_is_judged_word_by_word() -> None:
    """A window that is never full has no errors; one that is cut tells each answer, and each prompt over it."""
    wide, narrow = load.simulated(131_072), load.simulated(4096)
    with serve(wide) as wide_url, serve(narrow) as narrow_url:
        stock, ours = load_side("stock", wide, wide_url.base_url), load_side("ours", narrow, narrow_url.base_url)
        for side in (stock, ours):
            side.run("smoke", 2, 3)
    assert stock.errors == []
    assert [asked.chats for asked in (*stock.asked, *ours.asked)] == [6, 6]
    assert any("other from" in error for error in ours.errors)
    assert any("max_tokens" in error for error in ours.errors)
    shown = load.table(stock, ours, 2)
    assert "1 restarted" in shown
    assert "asked of the server: 6 answers, 0 summaries" in shown
    assert len(wide.requests) == len(narrow.requests) == 0


def test_the_model_of_the_load_goes_on_behind_what_it_sees() -> None:
    """A continued answer lacks no word and repeats none."""
    simulator = load.simulated(131_072)
    with serve(simulator) as address:
        for said in ("", "c0t1x1 c0t1x2"):
            messages = [user("Write 4 words of c0t1x."), *([assistant(said), user("Go on.")] if said else [])]
            body = {"model": simulator.models[0].key, "messages": messages}
            httpx.post(f"{address.base_url}{load.CHAT}", json=body, trust_env=False).raise_for_status()
    assert [record.content for record in simulator.requests] == ["c0t1x1 c0t1x2 c0t1x3 c0t1x4", "c0t1x3 c0t1x4"]


def test_a_fleet_costs_the_same_for_each_conversation() -> None:
    """Store and board are asked as often for each request when twice as many records are there."""

    async def play() -> None:
        opened = fleet.opened(None, 3)
        first, second = [await opened.quarter(4, 4) for _ in range(2)]
        assert (first.requests, second.requests) == (16, 32)
        assert opened.ask.calls == 4 * (first.summaries + second.summaries) >= 4
        for each in (first, second):
            assert 1 <= each.store <= 3
            assert each.board <= 3
            assert 0 < each.stored_kb < 20
        assert opened.store_calls.keys() <= {"find", "put", "get_fact", "put_fact", "merge_fact"}
        for pod in opened.pods:
            await pod.compactor.aclose()

    virtual_time.run(play())
