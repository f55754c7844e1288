"""A conversation that a client has rendered into one message is known by its form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from litellm_compaction.core.plan import with_less_data
from litellm_compaction.core.transcripts import is_client_summary, rendered_in
from tests.builders import JsonDict, assistant, budget, conversation, parsed, system, user

FIRST, LAST = "first of all 17", "last of all 17"
TEXTS = [FIRST, *(f"Number {at} says: this\n\nand that, at {at}:00." for at in range(18)), LAST]


def rendered(form: Callable[[str, str], str], user_name: str = "user", model_name: str = "assistant") -> str:
    return "\n".join(form(model_name if at % 2 else user_name, text) for at, text in enumerate(TEXTS))


LABELS = rendered(lambda role, text: f"[{role}]: {text}")
BELOW = "Now write the record."
JSON = json.dumps(
    [{"content": text, "role": "assistant" if at % 2 else "user"} for at, text in enumerate(TEXTS)], indent=1
)
LIST = str([{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(TEXTS)])
EVENTS = "\n".join(
    f"<EVENT id={at}>\nSaid by {'agent' if at % 2 else 'human'}: {text}\n</EVENT>" for at, text in enumerate(TEXTS)
)
# One turn of the person's, and the names of events differ.
AGENTS = "\n".join(
    f"{'Event (user)' if not at else 'Call by (agent)' if at % 2 else 'Result of (tool)'}:\n{text}"
    for at, text in enumerate(TEXTS)
)
MARKUP = rendered(lambda role, text: f"<|im_start|>{role}\n{text}<|im_end|>")
HEADS = rendered(lambda role, text: f"# {role.upper()}\n{text}")
TIGHT = rendered(lambda role, text: f"{role}: {' '.join(text.split())}", "Human", "AI")
INST = rendered(lambda role, text: f"[INST] {text} [/INST]" if role == "user" else text)

REQUESTS: dict[str, list[JsonDict]] = {
    "in the system message": [system(f"Write a record:\n<history>\n{LABELS}\n</history>"), user(BELOW)],
    "in an element": [system(), user(f"<conversation>\n{LABELS}\n</conversation>\n\n{BELOW}")],
    "under a heading": [user(f"### Task:\nSay its topic.\n### Chat:\n{rendered(lambda r, t: f'{r.upper()}: {t}')}")],
    "with a cue": [user(f"{BELOW}\n\n{rendered(lambda r, t: f'{r}: {t}', 'Human', 'AI')}\n\nNew record:")],
    "elements": [user(f"{BELOW}\n<BEFORE>\nx\n</BEFORE>\n{EVENTS}\n\n{BELOW}")],
    "JSON": [user(f"{BELOW}\n{JSON}\n{BELOW}")],
    "chat markup": [user(f"{BELOW}\n---\n{MARKUP}\n---")],
    "above alone": [system(), user(f"Name the topic of this chat.\n\n{TIGHT}")],
    "[INST]": [user(f"{BELOW}\n<chat>\n{INST}\n</chat>")],
    "nothing else": [system("Condense this conversation."), user(HEADS)],
    "below alone": [user(f"{TIGHT}\n\n{BELOW}\n\n- in words\n- no list")],
    "of another language": [
        system(),
        user(f"{rendered(lambda r, t: f'{r}：{t}', '用户', '助手')}\n\n请总结以上对话。"),
    ],
    "quoted, with times": [user(f"{BELOW}\n\n{rendered(lambda r, t: f'> [10:0{len(r)}] {r} — {t}', 'Nutzer', 'KI')}")],
    "an agent's": [user(f"{BELOW}\n\n{AGENTS}")],
    "a program's list": [user(f"{LIST}\n{BELOW}")],
}


@pytest.mark.parametrize("raw", REQUESTS.values(), ids=REQUESTS)
def test_a_rendered_conversation_is_known_by_its_form(raw: list[JsonDict]) -> None:
    """Wherever its instruction stands; of one that is too long the head and tail stay."""
    messages = parsed(raw)
    assert is_client_summary(messages, {})
    view = conversation(messages)
    at, window = rendered_in(messages), budget(view.tokens * 3 // 4, view)
    shown = with_less_data(view, replace(window, rules=replace(window.rules, keeps_what_fits=True)), 0)
    assert at is not None
    assert shown is not None
    (before, after), text = re.split(r"\[… \d+ tokens left out …\]", shown[at].text), messages[at].text
    assert text.startswith(before.rstrip())
    assert text.endswith(after.lstrip())


CODE = "".join(
    f'chat([{{"role": "user", "content": "{at}"}}, {{"role": "assistant"}}])\nwait({at})\n' for at in range(9)
)
PASTED = f"Here is a chat with the support:\n{rendered(lambda role, text: f'{role}: {text}')}\n\nWho is right?"


@pytest.mark.parametrize(
    ("raw", "has_tools"),
    [
        ([system(), user(PASTED)], False),
        ([user("Hi."), assistant("Hello."), user(f"<log>\n{LABELS}\n</log>\nWhy?")], False),
        ([user(f"<log>\n{LABELS}\n</log>\nWhy?")], True),
        ([user("<doc>\nThe user is right.\n</doc>\n" * 9 + "Is he?")], False),
        ([user(f"{INST}\n\n谁说得对？")], False),
        ([user(f"Make it shorter.\n```\n{CODE}```")], False),
        ([user(f"Sort it.\n{json.dumps([{'type': 'user', 'name': text} for text in TEXTS])}")], False),
        ([user("Is it right?\n" + "interface A {\n  user: string;\n  model: string;\n}\n" * 9)], False),
        ([user("user: a\nassistant: b\n" + "word " * 400)], False),
        # A few examples in a long system prompt.
        ([system("Q: a?\nA: b.\nQ: c?\nA: d.\n\n" + "Be kind. " * 90), user("Hello.")], False),
        ([system("user\nassistant\n"), user("Port the parser.")], False),
        ([user("")], False),
        ([], False),
    ],
)
def test_a_person_who_pastes_a_chat_is_a_person(raw: list[JsonDict], has_tools: bool) -> None:
    """With tools, with an answer before it, or with a question beside it; and no list of a program is a chat."""
    assert not is_client_summary(parsed(raw), {}, has_tools=has_tools)
