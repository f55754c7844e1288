"""What a client repeats beside a person's words is known without a list; what may be the person's stays theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.forms import lines_for, without_data
from litellm_compaction.core.refusal import with_less_data
from litellm_compaction.core.stretches import marked, own_words
from litellm_compaction.core.view import is_injected, request_indices
from tests.builders import JsonDict, assistant, budget, calls, conversation, parsed, result, user

# Two of them whole messages that a person repeats.
ASKED = [
    "Fix the parser.",
    "Say why.",
    "Run the tests again.",
    "Run the tests again.",
    "Run the tests again.",
    "Say why.",
]
LIST = "\n".join(f"src/module_{n}/handler.ts" for n in range(30))

Wrap = Callable[[int, str], str | list[str]]
CLIENTS: dict[str, Wrap] = {
    "a line in brackets below": lambda at, words: f"{words}\n\n[Turn {at} of 40. One tool a turn.]",
    "a sentence below, in each": lambda at, words: f"{words}\n\nAnswer with one tool call, and nothing else.",
    "a footer in the next line": lambda at, words: f"{words}\n(Turn {at} of 40, one tool a turn.)",
    "words around it, with a date": lambda at, words: (
        f"It is Mon, 0{at} Nov, 10:0{at}.\n\n{words}\n\n* be brief\n* be kind"
    ),
    "an element above": lambda at, words: (
        f"<state turn='{at}'>\nopen: {'abcdef'[at]}.py\nbranch: main\n</state>\n{words}"
    ),
    "code of each turn": lambda at, words: (
        f"<snippet>\nint {'abcdef'[at]};\n\nint {'uvwxyz'[at]};\n</snippet>\n\n{words}"
    ),
    "a heading and its lines": lambda at, words: f"{words}\n\n## Tabs\n- a.py\n- b.py\n- {'abcdef'[at]}.py",
    "a block of JSON": lambda at, words: (
        f'```json\n{{\n "line": {at},\n "open": ["{"abcdef"[at]}.py"]\n}}\n```\n\n{words}'
    ),
    "marks of its own": lambda at, words: f"@@CTX@@\nopen={'abcdef'[at]}.rs\nline={at}\n@@END@@\n\n{words}",
    "a part of its own": lambda at, words: [words, f"== open files ==\n{LIST}\n{'abcdef'[at]}.ts\nselected: {at}"],
    "a part in an element": lambda at, words: [f"<visible-files>\n{'uvwxyz'[at]}\n</visible-files>", words],
}


def talk(wrap: Wrap) -> list[JsonDict]:
    messages: list[JsonDict] = []
    for at, words in enumerate(ASKED):
        texts = wrap(at, words)
        content = texts if isinstance(texts, str) else [{"type": "text", "text": text} for text in texts]
        messages += [{"role": "user", "content": content}, assistant(f"Answer {at}.")]
    return messages


def said(raw: list[JsonDict]) -> list[str]:
    return [own_words(each) for each in marked(parsed(raw)) if each.role == "user"]


@pytest.mark.parametrize("wrap", CLIENTS.values(), ids=CLIENTS)
def test_what_recurs_beside_words_is_the_clients(wrap: Wrap) -> None:
    """Of whatever client; and of a person who says the same three times each word stays theirs."""
    assert said(talk(wrap)) == ASKED


@pytest.mark.parametrize(
    "texts",
    [
        ASKED,
        ["Never push.", "a", "Never push.", "b", "Never push."],
        # A rule at the end of some messages, and not of others between them.
        ["a\n\nNever push.", "b", "c\n\nNever push.", "d\n\nNever push.", "e"],
        ["First this.\n\nThen that."] * 3 + ["Well?"],
        # A form in which a person writes each time.
        [f"To do:\n- mend the crane\n- call dock {n}" for n in range(4)],
        [f"## Task\nadd case {n}\n\n## Limits\nkeep the API" for n in range(4)],
        ["# Task\n\nPort it:\n\n- a\n- b\n\n" + "word " * 400 + "now.", "Go on.", "Go on.", "Go on."],
        # An element that holds the words, by its name or since nothing else does.
        [f"<user_query>\n{each}\n</user_query>\n<state>\nbranch: main\n</state>" for each in ASKED],
        [f"<ask>\n{each}\n</ask>\n<state>\nbranch: main\n</state>" for each in ASKED],
        [f"# Question\n{each}" for each in ("What is a?", "Why b?", "How?", "And c?")],
    ],
)
def test_in_doubt_it_is_the_persons(texts: list[str]) -> None:
    """Whole messages, rules, long tasks, and what a client wraps the words into."""
    words = [text.partition("\n<state>")[0] for text in texts]
    assert said([each for text in texts for each in (user(text), assistant("Yes."))]) == words


@given(st.lists(st.sampled_from([*ASKED, "a\n\nb", "b", "<x>\na\n</x>", "L:\n- a 1", "a\n\nL:\n- a 2"]), max_size=9))
def test_a_message_with_words_is_never_empty(texts: list[str]) -> None:
    """Whatever a person repeats, something in each message is theirs."""
    assert all(said([each for text in texts for each in (user(text), assistant("Yes."))]))


@pytest.mark.parametrize(
    "text",
    [
        "<environment_context>\nx\n</environment_context>",
        "<permissions instructions>read</permissions instructions>",
        'Here is what is open in the editor.\n```json\n{\n "file": "a.py"\n}\n```',
    ],
)
@pytest.mark.parametrize("beside", [[user("Go on.")], []])
def test_an_element_or_json_of_a_program_beside_another_message(text: str, beside: list[JsonDict]) -> None:
    """Alone between a request and its answer it is the person's."""
    first = marked(parsed([user(text), *beside]))[0]
    assert is_injected(first) is bool(beside)
    assert not is_injected(marked(parsed([user("<user_request>\nx\n</user_request>"), *beside]))[0])


def test_beside_results_a_part_that_opens_with_the_clients_words_is_all_theirs() -> None:
    """As Cline's list of what is done, between two paragraphs that it repeats; the task and the answer stay."""
    raw = [user("<task>\nPort it.\n</task>"), assistant("I look.")]
    for at, done in enumerate(["nothing yet", "the parser", "the lexer", "the printer"]):
        texts = [
            f"[read_file for '{at}.c'] Result:\nint a;\n\nint b;",
            f"# PROGRESS\n\n- [x] {done}\n\n# RULES\n- update it",
        ]
        raw += [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}, assistant("Next.")]
    raw += [user("[ERROR] You did not use a tool in your previous response!\n\n# RULES\n- update it")]
    messages = marked(parsed(raw))
    assert said(raw) == ["<task>\nPort it.\n</task>", "", "", "", "", ""]
    assert request_indices(messages) == (0, len(raw) - 1)


def _steps(note: str) -> list[JsonDict]:
    """A task, and steps behind whose results the client says where things are."""
    raw = [user(f"Port the parser.\n\n{note}"), calls("0"), result("0", "x")]
    for at in range(1, 4):
        raw += [
            assistant("Next."),
            user(f"Step {'abc'[at - 1]}.\n\n{note}"),
            calls(str(at)),
            result(str(at), "x" * 400),
        ]
    return raw


def test_stale_ones_go_first_the_newest_last() -> None:
    """Before any result, and in what nobody has answered before a file that the person attached."""
    note = f"## Open files\n{LIST}"
    messages = marked(parsed(_steps(note)))
    assert request_indices(messages) == (12,)
    assert [*lines_for(messages)][:3] == [0, 4, 8]
    assert LIST not in without_data(messages[0]).text
    assert without_data(messages[0]).text.startswith("Port the parser.\n\n## Open files\n")
    file = f"<file>\n{LIST}\n</file>"
    open_only = marked(parsed([*_steps(note), user(f"{file}\nNow?\n\n{note}")]))
    view = conversation(open_only)
    changed = with_less_data(view, budget(2 * view.floor_tokens, view), view.floor_tokens - 1)
    assert changed is not None
    assert file in changed[-1].text
    assert f"Now?\n\n## Open files\n{LIST}" not in changed[-1].text


def test_floods_are_read_in_time() -> None:
    """Whatever is repeated how often."""
    for flood in ("<a path='x'>\n" * 20_000, "x\n\n" * 80_000, "[a\n" * 80_000, "<ab-c>" * 40_000, "a\n \n" * 50_000):
        messages = parsed([user(flood), user(flood), user(flood)])
        assert [each.raw for each in marked(messages)] == [each.raw for each in messages]
