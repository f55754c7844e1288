"""Which user messages are a client's own, by their form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.cut_points import is_injected
from litellm_compaction.core.messages import parse_message
from tests.builders import JsonDict, assistant, image, user

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
        "# AGENTS.md instructions\n<INSTRUCTIONS>Tabs.</INSTRUCTIONS>\n<environment_context>x</environment_context>",
        "<permissions instructions>read only</permissions instructions>",
        "[read_file for 'src/a.py'] Result:\n1 | import os\n\n" + DETAILS,
        "[ERROR] You did not use a tool in your previous response! Please retry with a tool use.",
        "The following skills are available for use with the Skill tool:\n- commit: commits",
        "",
        "   ",
        None,
    ],
)
def test_additions_are_recognized(content: object) -> None:
    """Wrapped, announced, results as text, and messages that say nothing."""
    assert is_injected(parse_message({"role": "user", "content": content}))


@pytest.mark.parametrize(
    "content",
    [
        "Port the parser.",
        f"{REMINDER}\nPort the parser.",
        f"Port the parser.\n{REMINDER}",
        [{"type": "text", "text": REMINDER}, {"type": "text", "text": "Port the parser."}],
        [{"type": "text", "text": REMINDER}, image()],
        f"<task>\nPort the parser.\n</task>\n{DETAILS}",
        "[ask_followup_question for 'Which?'] Result:\n<answer>\nThe second.\n</answer>\n" + DETAILS,
        "[write_to_file for 'a.py'] Result:\nThe user denied this.\n<feedback>\nNot there.\n</feedback>",
        "<command-name>/review</command-name>\n<command-args>main</command-args>",
        "What does <system-reminder> mean?",
        "<system-reminder>unclosed",
        "[1, 2, 3] Result: what is this list?",
        "<b>bold</b>",
    ],
)
def test_what_a_person_wrote_is_not(content: object) -> None:
    """One word outside the wrappers, or a doubt, is enough."""
    assert not is_injected(parse_message({"role": "user", "content": content}))


@pytest.mark.parametrize("message", [assistant(REMINDER), {"role": "system", "content": REMINDER}])
def test_only_user_messages_are_asked_about(message: JsonDict) -> None:
    """The other roles say themselves who wrote them."""
    assert not is_injected(parse_message(message))


@given(
    st.lists(st.sampled_from([REMINDER, DETAILS, "<skill>", "</skill>", "</system-reminder>", "x", "\n"]), max_size=9)
)
def test_words_outside_count(pieces: list[str]) -> None:
    """Any order of whole and torn wrappers is read without trouble; a whole word beside whole ones is the person's."""
    text = "".join(pieces)
    assert not is_injected(parse_message(user(f"Please {text}")))
    is_injected(parse_message(user(text)))


def test_a_flood_of_wrappers_is_read_in_no_time() -> None:
    """Torn or whole: the time does not grow with their square."""
    for text in ("<skill>" * 200_000, "<skill></skill>" * 100_000, "</skill>" * 200_000):
        assert not is_injected(parse_message(user(text)))


def test_text_of_millions_of_characters_is_the_persons() -> None:
    """Looking for additions at both ends of 200 MB copied them several times, for 0.3 s each."""
    text = "<system-reminder>\n" + "word " * 400_000 + "\n</system-reminder>"
    assert is_injected(parse_message(user(text[:1_000] + text[-1_000:])))
    assert not is_injected(parse_message(user(text)))
