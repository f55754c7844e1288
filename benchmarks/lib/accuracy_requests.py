"""Chat requests by kind, all of our own making, for comparing counts.

Asked by whatever compares our counts with an engine's own. The same requests each time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

JsonObject = Mapping[str, Any]

PROSE = (
    "The ferry was late again, so we walked along the harbor and counted the boats: forty-two, if you don't "
    "insist on kayaks. Nobody had told us that the café closes at 5 p.m. on Sundays; I'd have brought sandwiches.\n"
)
CODE = '''def harbor_fees(boats: list[dict[str, float]], *, rate=0.125) -> float:
    """Sums what all boats owe; the harbor master's own formula."""
\ttotal = 0.0
    for boat in boats:
        if boat["length_m"] >= 12.5 and not boat.get("exempt", False):
            total += boat['length_m'] ** 2 * rate  # squared: long boats block the quay
    return round(total, 2)


'''
LOG = "".join(
    f"2026-11-{day:02d}T0{day % 10}:15:0{day % 7}.{day * 37:03d}Z [worker-{day % 4}] WARN pool={day * 4096} "
    f"id=0x{day * 51966:08x} retry in {day}ms\n"
    for day in range(1, 21)
)
_PORTS = ("Oslo", "Kiel", "Århus", "Łeba")
TABLE = "| port | boats | fee € |\n|------|------:|------:|\n" + "".join(
    f"| {name} | {number} | {number * 12.5:,.2f} |\n" for number, name in enumerate(_PORTS, 7)
)
SCRIPTS = {
    "Chinese": "渡轮又晚点了，所以我们沿着港口散步，数了数船只：四十二艘。咖啡馆星期天下午五点关门！",
    "Japanese": "フェリーがまた遅れたので、港を歩いて船を数えました。カフェは日曜日の午後５時に閉まります。",
    "Korean": "배가 또 늦어서 우리는 항구를 따라 걸으며 배를 세었다. 카페는 일요일 오후 5시에 닫는다.",
    "Russian": "Паром снова опоздал, и мы пошли вдоль гавани считать лодки: сорок две, если не считать байдарки.",
    "Arabic": "تأخرت العبّارة مرة أخرى، فمشينا على طول الميناء وعددنا القوارب: اثنان وأربعون.",
    "Hebrew": "המעבורת שוב איחרה, אז הלכנו לאורך הנמל וספרנו סירות.",
    "Hindi": "नौका फिर से देर से आई, इसलिए हम बंदरगाह के किनारे चले और नावें गिनीं: बयालीस।",
    "Thai": "เรือเฟอร์รี่มาสายอีกแล้ว เราจึงเดินเลียบท่าเรือและนับเรือได้สี่สิบสองลำ",
    "Greek": "Το πλοίο άργησε πάλι κι έτσι περπατήσαμε στο λιμάνι μετρώντας βάρκες.",
    "Vietnamese": "Chuyến phà lại trễ, nên chúng tôi đi dọc bến cảng và đếm được bốn mươi hai chiếc thuyền.",
    "emoji": "Late again 😤⛴️ — 42 boats 🚤🚤🛶, family 👨‍👩‍👧‍👦, flags 🇳🇴🇩🇪, skin 👍🏽, keycap 5️⃣, heart ❤️‍🔥",
    "combining": "e\u0301\u0323 a\u0308\u0304 o\u0302\u0300 n\u0303 "
    "Z\u0351\u036f\u0353\u0333a\u0300\u0301l\u0327g\u0306o\u0328",
    "mathematics": "∀ε>0 ∃δ>0: |x−x₀|<δ ⇒ |f(x)−f(x₀)|<ε; 𝔽ₚ, 𝒪(n²·log n), ⟨ψ|Ĥ|ψ⟩ ≈ −13.6 eV, ½ ⅔ ① ⅷ ²³",
    "boxes": "┌──────┬─────┐\n│ quay │ 42▒ │\n├──────┼─────┤\n│ █▓▒░ │ ◆◇● │\n└──────┴─────┘",
    "full width": "ＡＢＣ　１２３，ｆｅｒｒｙ！～「港」・…—–‐‑―‘’“”",
}
SPACES = {
    "runs": "a b  c   d    e     f      g" + " " * 37 + "h" + " " * 130 + "i\n" + " " * 64,
    "indents": "if x:\n  y\n    z\n\tw\n\t\tv\n  \t u\n        t\n" * 3,
    "line ends": "one\ntwo\r\nthree\n\nfour\r\n\r\nfive\n\n\n\n\nsix\r\rseven\n \n  \n\t\n",
    "around": "   before and after \n\n\t ",
    "only spaces": "     ",
    "only lines": "\n\n\n",
    "other spaces": "a\u00a0b\u2003c\u3000d\u2009e\u200bf\ufeffg\u2028h\u2029i\u0085j\u1680k\u202fl\v\fm",
    "tabs": "\tone\t\ttwo\t\t\tthree \t four\t ",
    "marks": "▁a ▁▁b Ġc ĊĠd <0x0A> <0x20>▁",
}
ODD = {
    "digits": "0 1 12 123 1234 12345 123456 1234567 12345678 3.14159 1,000,000 1e-9 0xDEADBEEF ١٢٣ １２３ 1٢3",
    "quotes": "it's we'll I'd they're you've I'm don't IT'S WE'LL I'D 'quoted' ''x'' \"y\" `z` ’s ’ll",
    "signs": "!!! ??? ... --- === *** ### @@@ $$$ %%% ^^^ &&& ~~~ ;;; ::: <<< >>> "
    "((( ))) [[[ ]]] {{{ }}} \\\\\\ ||| ///",
    "cases": "camelCaseWords HTTPServerURLParser snake_case_words kebab-case "
    "XMLHttpRequest iPhone McDonald's ÄÖÜäöüẞß ǅ İı",
    "controls": "a\x01b\x02c\x07d\x1be\x7ff\x80g\x9fh",
    "names of tokens": "</s> <s> <unk> [INST] [/INST] <|im_end|> <|eot_id|> <|end|> <eos> <|endoftext|> <think> "
    "</think> "
    "<｜User｜> <tool_call> [TOOL_CALLS] <|channel|> <0x41> <|im_ end|> <|",
    "long word": "antidisestablishmentarianism" * 20 + "/" + "0123456789abcdef" * 40,
    "base64": "iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4" * 12 + "==",
    "letters": "".join(map(chr, range(0xC0, 0x250))),
    "replacement": "\ufffd\ufffd \U0010ffff \ue000 \U000e0041",
}
TOOLS: Sequence[JsonObject] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": 'Reads a file; "quotes" & <tags> — and umlauts: äöü.\nSecond line.',
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where it is."},
                    "lines": {"type": "integer", "minimum": 1, "maximum": 2000},
                    "modes": {"type": "array", "items": {"type": "string", "enum": ["fast", "slow"]}},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    },
]
ODD_TOOLS: Sequence[JsonObject] = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "noop", "description": "", "parameters": {}}},
    {
        "type": "function",
        "function": {
            "parameters": {
                "type": "object",
                "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number", "default": 0.5}}}},
                "properties": {
                    "at": {"$ref": "#/$defs/point", "description": "Ort — 场所"},
                    "kind": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}], "default": None},
                    "level": {"type": ["integer", "null"], "minimum": 0, "maximum": 1.0, "multipleOf": 0.25},
                    "deep": {
                        "type": "array",
                        "items": {"type": "object", "properties": {"é": {"type": "boolean", "default": True}}},
                    },
                },
                "required": [],
            },
            "strict": True,
            "name": "mark_place",
            "description": "Marks a place on the map.",
        },
    },
]


def kinds() -> dict[str, list[JsonObject]]:
    """The requests of each kind, as clients send them."""
    return {
        "one message": [_plain(text) for text in ("hi", "What is 2+2?", PROSE, CODE, LOG, TABLE)],
        "system": [_plain(text, system="You are a harbor master.\n\nBe brief.") for text in ("hi", PROSE + TABLE)],
        "turns": list(_turns()),
        "scripts": [_plain(text) for text in SCRIPTS.values()] + [_plain("\n".join(SCRIPTS.values()))],
        "white space": [_plain(text) for text in SPACES.values()] + list(_spaced()),
        "odd text": [_plain(text) for text in ODD.values()] + list(_empties()),
        "random text": list(_random()),
        "long": [_plain((PROSE + CODE + LOG + TABLE + "\n".join(SCRIPTS.values())) * 12), _plain(CODE * 60)],
        "reasoning": list(_reasoning()),
        "parts": list(_parts()),
        "tools": list(_with_tools()),
        "calls": list(_calls()),
        "parallel calls": list(_parallel()),
        "agent": [agent(rounds) for rounds in (1, 3, 8, 20)],
        "prefill": [_plain("Count to three."), *_prefilled()],
    }


def agent(rounds: int) -> JsonObject:
    """An agent's session of so many rounds of tools."""
    messages: list[JsonObject] = [
        _message("system", "You are a careful engineer.\n\nUse the tools. " + PROSE),
        _message("user", "Find out why the harbor fees are wrong, and mend it.\n\n" + TABLE),
    ]
    texts = (
        CODE,
        LOG,
        TABLE,
        PROSE,
        '{"ok": true, "boats": [1, 2.5, null], "note": "Århus — 港"}',
        "\n".join(SCRIPTS.values()),
    )
    for index in range(rounds):
        arguments = (
            {"path": f"src/größe_{index}.py", "lines": 10 + index, "modes": ["fast"]}
            if index % 2
            else {"command": f"grep -rn \"harbor_fees\\|rate\" src/ | head -{index} && echo 'done: ✓'"}
        )
        name = "read_file" if index % 2 else "run"
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [_call(index, name, arguments)]},
            _result(index, texts[index % len(texts)] * (1 + index % 3), name),
        ]
    return {"messages": messages, "tools": TOOLS}


def _plain(text: str, *, system: str = "") -> JsonObject:
    before = [_message("system", system)] if system else []
    return {"messages": [*before, _message("user", text)]}


def _message(role: str, content: Any, **more: Any) -> JsonObject:
    return {"role": role, "content": content, **more}


def _call(index: int, name: str, arguments: Any) -> JsonObject:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call{index:05d}", "type": "function", "function": {"name": name, "arguments": text}}


def _result(index: int, content: str, name: str = "") -> JsonObject:
    more = {"name": name} if name else {}
    return {"role": "tool", "tool_call_id": f"call{index:05d}", **more, "content": content}


def _turns() -> Iterator[JsonObject]:
    for count in (3, 5, 21):
        messages = [
            _message("assistant" if index % 2 else "user", f"{index}. " + (PROSE, CODE, TABLE)[index % 3])
            for index in range(count)
        ]
        yield {"messages": messages}
        yield {"messages": [_message("system", "Be brief."), *messages]}
    yield {"messages": [_message("developer", "Be brief."), _message("user", "hi")]}
    yield {"messages": [_message("user", "one"), _message("assistant", "1"), _message("user", "two", name="ann")]}


def _spaced() -> Iterator[JsonObject]:
    yield {
        "messages": [
            _message("system", "  Be brief.\n"),
            _message("user", "\n\n  one \n"),
            _message("assistant", "  two, with spaces.  \n\n"),
            _message("user", " three\t"),
        ]
    }


def _empties() -> Iterator[JsonObject]:
    yield _plain("")
    yield {"messages": [_message("system", ""), _message("user", "hi")]}
    yield {"messages": [_message("user", "hi"), _message("assistant", ""), _message("user", "there")]}
    yield {"messages": [_message("user", "hi"), _message("assistant", None), _message("user", "there")]}


def _random() -> Iterator[JsonObject]:
    dice = random.Random(20261121)
    everything = "".join((PROSE, CODE, LOG, TABLE, *SCRIPTS.values(), *SPACES.values(), *ODD.values()))
    blocks = (
        (0x20, 0x7F),
        (0x9, 0xE),
        (0xA0, 0x600),
        (0x900, 0xE80),
        (0x2000, 0x2C00),
        (0x3000, 0xA000),
        (0x1F300, 0x1FAFF),
    )
    for _ in range(12):
        texts = []
        for _ in range(60):
            if dice.random() < 0.5:
                start = dice.randrange(len(everything))
                texts.append(everything[start : start + dice.randrange(1, 12)])
            else:
                low, high = dice.choice(blocks)
                texts.append("".join(chr(dice.randrange(low, high)) for _ in range(dice.randrange(1, 4))))
        yield _plain(dice.choice(("", " ", "\n")).join(texts))


def _reasoning() -> Iterator[JsonObject]:
    thought = "The user wants the fees.\n\nLet me look: 12.5 m × 0.125."
    answered = [
        _message("user", "How much?"),
        _message("assistant", "It is 19.53 €.", reasoning_content=thought),
    ]
    yield {"messages": [*answered, _message("user", "Sure?")]}
    yield {
        "messages": [
            _message("system", "Be brief."),
            *answered,
            _message("user", "Sure?"),
            *answered,
            _message("user", "Ok."),
        ]
    }
    yield {
        "messages": [
            _message("user", "How much?"),
            _message("assistant", f"<think>\n{thought}\n</think>\n\n19.53"),
            _message("user", "?"),
        ]
    }
    called = [
        _message("user", "How much?"),
        {
            **_message("assistant", ""),
            "reasoning_content": thought,
            "tool_calls": [_call(1, "run", {"command": "fees"})],
        },
        _result(1, "19.53", "run"),
    ]
    yield {"messages": called, "tools": TOOLS}
    yield {"messages": [*called, *answered[1:], _message("user", "Thanks.")], "tools": TOOLS}


def _parts() -> Iterator[JsonObject]:
    parts = [{"type": "text", "text": "First part."}, {"type": "text", "text": "Second part.\n"}]
    yield {"messages": [_message("user", parts[:1])]}
    yield {"messages": [_message("user", parts)]}
    yield {
        "messages": [
            _message("system", parts),
            _message("user", parts),
            _message("assistant", parts),
            _message("user", "hi"),
        ]
    }


def _with_tools() -> Iterator[JsonObject]:
    for tools in (TOOLS, TOOLS[:1], ODD_TOOLS, [*TOOLS, *ODD_TOOLS]):
        yield {**_plain("List my files."), "tools": tools}
        yield {**_plain(PROSE, system="You help."), "tools": tools}
    yield {**_plain("hi"), "tools": TOOLS, "tool_choice": "none"}
    yield {**_plain("hi"), "tools": []}


def _calls() -> Iterator[JsonObject]:
    user = _message("user", "Read it.")
    odd = {
        "text": 'a "b" \\ c\n\té 港 \u2028 </s>',
        "n": 3,
        "x": 0.5,
        "y": -1.25,
        "big": 12345678901,
        "none": None,
        "yes": True,
    }
    for arguments in ({}, {"path": "a.py"}, odd, {"list": [], "object": {}, "deep": {"a": [1, {"b": [None, False]}]}}):
        call = {"role": "assistant", "content": "", "tool_calls": [_call(1, "read_file", arguments)]}
        yield {"messages": [user, call, _result(1, "text")], "tools": TOOLS}
        yield {
            "messages": [user, call, _result(1, "text", "read_file"), _message("assistant", "Done."), user],
            "tools": TOOLS,
        }
    call = {"role": "assistant", "content": None, "tool_calls": [_call(1, "read_file", {"path": "a"})]}
    for content in (
        "",
        CODE,
        '{"a": 1, "b": [true, null]}',
        "  \n spaced \n",
        SCRIPTS["Chinese"],
        "null",
        "3.0",
        '"text"',
    ):
        yield {
            "messages": [_message("system", "Be brief."), user, call, _result(1, content, "read_file")],
            "tools": TOOLS,
        }
    said = {"role": "assistant", "content": "I'll read it.", "tool_calls": [_call(1, "read_file", {"path": "a"})]}
    yield {"messages": [user, said, _result(1, "text", "read_file")], "tools": TOOLS}
    yield {"messages": [user, said, _result(1, "text", "read_file")]}
    spaced = _call(1, "read_file", '{ "path" :  "a",\n "lines":1.0 }')
    yield {
        "messages": [user, {"role": "assistant", "content": "", "tool_calls": [spaced]}, _result(1, "x")],
        "tools": TOOLS,
    }


def _parallel() -> Iterator[JsonObject]:
    user = _message("user", "Read both.")
    calls = [_call(index, "read_file", {"path": f"{index}.py"}) for index in (1, 2)]
    both = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [_result(1, "one", "read_file"), _result(2, CODE, "read_file")]
    yield {"messages": [user, both, *results], "tools": TOOLS}
    yield {"messages": [user, both, *results, _message("assistant", "Done."), user], "tools": TOOLS}


def _prefilled() -> Iterator[JsonObject]:
    yield {"messages": [_message("user", "Count to three."), _message("assistant", "One, two")]}
    yield {"messages": [_message("system", "Be brief."), _message("user", "hi"), _message("assistant", "Well, ")]}
