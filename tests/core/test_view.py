"""Where a conversation may be cut, which messages are protected, and which are a client's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import newest_user_index, parse_message, system_prefix_length
from litellm_compaction.core.view import is_persons, latest_cut, legal_cuts, request_indices
from tests.builders import (
    ADDITIONS,
    JsonDict,
    agent_conversations,
    assistant,
    calls,
    conversation,
    image,
    parsed,
    raw_conversations,
    result,
    system,
    user,
)

ROUND = [calls("1", "2"), result("1", "x"), result("2", "y")]
BETWEEN = [*ROUND[:2], {"role": "user", "content": [image()]}, ROUND[2]]


@pytest.mark.parametrize(
    ("raw", "cuts", "protected"),
    [
        ([], (), set()),
        ([system()], (), {0}),
        ([user("u")], (), {0}),
        ([system(), user("u")], (), {0, 1}),
        ([system(), user("u"), assistant("a")], (2,), {0, 1, 2}),
        ([system(), user("u"), assistant("a"), user("v")], (2, 3), {0, 3}),
        ([user("u"), *ROUND], (1,), {0, 1, 2, 3}),
        ([user("u"), *ROUND, assistant("a"), user("v")], (1, 4, 5), {5}),
        ([user("u"), *ROUND, *ROUND], (1, 4), {0, 4, 5, 6}),
        ([user("u"), assistant("a"), user("v"), *ROUND], (1, 2, 3), {2, 3, 4, 5}),
        ([user("u"), assistant("a"), system("late"), user("v")], (1, 3), {3}),
        ([user("u"), assistant("a"), result("orphan", "x")], (1,), {0, 2}),
        # Anything may stand between the results of a round, which also is one if each call has a message of its own.
        ([user("u"), *BETWEEN, assistant("a"), user("v")], (1, 5, 6), {6}),
        ([user("u"), *BETWEEN], (1,), {0, 1, 2, 3, 4}),
        ([user("u"), calls("1"), calls("2"), *ROUND[1:]], (1,), {0, 1, 2, 3, 4}),
        ([user("u"), calls("1"), calls("2"), *ROUND[1:], assistant("a"), user("v")], (1, 5, 6), {6}),
    ],
)
def test_cuts_and_protected_messages(raw: list[JsonDict], cuts: tuple[int, ...], protected: set[int]) -> None:
    """Cuts lie before users and assistants up to the protected tail; lead, newest request and tail are protected."""
    messages = parsed(raw)
    assert legal_cuts(messages) == cuts
    assert conversation(messages).protected == protected


@given(raw_conversations() | agent_conversations())
def test_a_cut_never_divides_a_round(raw: list[JsonDict]) -> None:
    """Behind every cut each result has its call, before it each call its result; the protected tail stays whole."""
    messages = parsed(raw)
    for cut in legal_cuts(messages):
        assert system_prefix_length(messages) < cut <= latest_cut(messages)
        for side in (messages[:cut], messages[cut:]):
            called = sorted(call.id for message in side for call in message.calls)
            assert called == sorted(message.call_id for message in side if message.role == "tool")


@given(raw_conversations())
def test_whatever_is_longer_than_its_protected_part_can_be_cut(raw: list[JsonDict]) -> None:
    """Only conversations that are protected from beginning to end have no cut, but for a lone request in front."""
    messages = parsed(raw)
    protected = conversation(messages).protected
    assert newest_user_index(messages) in protected
    if len(protected) < len(messages):
        assert legal_cuts(messages)[-1] == latest_cut(messages)


REMINDER, NOTE, DETAILS, TEXT_RESULT, PLAIN, SKILLS = (user(text) for text in ADDITIONS)
TASK, LONG = user("Port the parser."), user("word " * 1000)
SHOT: JsonDict = {"role": "user", "content": [image()]}
VOICE: JsonDict = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}


@pytest.mark.parametrize(
    ("raw", "requests", "cut"),
    [
        # A reminder behind results: the round is still open, and the task is still the task.
        ([TASK, *ROUND, REMINDER], (0, 4), 1),
        ([TASK, *ROUND, NOTE, system("late")], (0, 4), 1),
        ([TASK, *ROUND, *ROUND, PLAIN], (0, 7), 4),
        ([TASK, *ROUND, assistant("Done."), user("Thanks, next."), *ROUND, REMINDER], (5, 9), 6),
        # The client's bulk behind the first prompt, recognized or not.
        ([TASK, REMINDER], (0, 1), 0),
        ([TASK, SKILLS], (0, 1), 1),
        ([TASK, SKILLS, *ROUND], (0, 1), 2),
        ([TASK, SKILLS, *ROUND, *ROUND, NOTE], (0, 1, 8), 5),
        # An interruption by the person looks like an addition: both stay.
        ([TASK, *ROUND, user("Stop! Do the tests first.")], (0, 4), 1),
        # Results as text: the newest is kept as the newest, the task as the task.
        ([TASK, assistant("<read_file>"), TEXT_RESULT, assistant("<read_file>"), TEXT_RESULT], (0, 4), 4),
        # A person who writes twice, and one who only speaks: the last word counts.
        ([user("a"), user("b"), user("c")], (0, 2), 2),
        ([TASK, assistant("a"), user("b"), REMINDER], (2, 3), 2),
        ([TASK, assistant("a"), user("b")], (2,), 2),
        # An image without a word asks for nothing, unless there is nothing else; a voice may.
        ([LONG, *ROUND, SHOT, *ROUND], (0, 4), 5),
        ([TASK, assistant("a"), user("b"), SHOT], (2, 3), 2),
        ([SHOT, LONG, *ROUND, NOTE], (1, 5), 2),
        ([SHOT, *ROUND, NOTE], (0, 4), 1),
        ([LONG, *ROUND, VOICE, *ROUND], (4,), 5),
        # What is too long to be kept on a doubt is left to the record.
        ([LONG, *ROUND, PLAIN], (4,), 1),
    ],
)
def test_additions_are_neither_the_request_nor_the_end_of_a_round(
    raw: list[JsonDict], requests: tuple[int, ...], cut: int
) -> None:
    """Whatever stands behind results, they are open until an assistant answers; the person's last request stays."""
    messages = parsed(raw)
    assert request_indices(messages) == requests
    assert latest_cut(messages) == cut
    assert conversation(messages).protected >= {*request_indices(messages), *range(cut, len(raw))}


@given(agent_conversations())
def test_results_that_nobody_has_read_are_protected(raw: list[JsonDict]) -> None:
    """With their calls, and with everything behind them; the newest user message and the person's last words too."""
    messages = parsed(raw)
    read = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=0)
    unread = [at for at in range(read, len(messages)) if messages[at].role == "tool"]
    protected = conversation(messages).protected
    assert protected >= ({read, *range(unread[0], len(messages))} if unread else set())
    users = [at for at, message in enumerate(messages) if message.role == "user"]
    assert users[-1] in protected
    own = [at for at in users if is_persons(messages[at])]
    # Of a person who shows something and says nothing about it, the words before it are the last ones.
    assert ([at for at in own if messages[at].text or "image_url" not in messages[at].other_parts] or own)[
        -1
    ] in protected
    for cut in legal_cuts(messages):
        assert cut <= latest_cut(messages)


@given(agent_conversations(), st.data())
def test_more_messages_never_make_an_older_one_the_request(raw: list[JsonDict], data: st.DataObject) -> None:
    """So what one turn has pinned is enough for the next one."""
    messages = parsed(raw)
    before = messages[: data.draw(st.integers(1, len(messages)))]
    old = {index for index in request_indices(messages) if index < len(before)}
    assert old <= set(request_indices(before))


REMINDER = "<system-reminder>\nThe todo list is empty.\n</system-reminder>"
DETAILS = "<environment_details>\n# Time\n10:00\n</environment_details>"


@pytest.mark.parametrize(
    "content",
    [
        REMINDER,
        f"  {REMINDER}\n\n{REMINDER}\n",
        [{"type": "text", "text": REMINDER}, {"type": "text", "text": DETAILS}],
        "Operator note (not from the user): the following was originally a mid-conversation reminder.\nHi.",
        # As LiteLLM 1.106 sends the surroundings that Claude Code 2.1.332 tells after the first prompt.
        [
            {"type": "text", "text": "Operator note (not from the user): the following was originally a reminder."},
            {"type": "text", "text": "# Environment\nYou have been invoked in the following environment:"},
        ],
        "# AGENTS.md instructions for /src\n\n<INSTRUCTIONS>\nUse tabs.\n</INSTRUCTIONS>",
        "[read_file for 'src/a.py'] Result:\n1 | import os\n\n" + DETAILS,
        "[ERROR] You did not use a tool in your previous response! Please retry with a tool use.",
        "",
        "   ",
        None,
    ],
)
def test_additions_are_recognized(content: object) -> None:
    """Wrapped, announced, results as text, and messages that say nothing."""
    assert not is_persons(parse_message({"role": "user", "content": content}))


def test_long_texts_are_read_in_no_time() -> None:
    """Torn or whole wrappers: the time does not grow with their square; millions of characters are the person's."""
    for text in ("<skill>" * 200_000, "<skill></skill>" * 100_000, "</skill>" * 200_000):
        assert is_persons(parse_message(user(text)))
    text = "<system-reminder>\n" + "word " * 400_000 + "\n</system-reminder>"
    assert not is_persons(parse_message(user(text[:1_000] + text[-1_000:])))
    assert is_persons(parse_message(user(text)))
