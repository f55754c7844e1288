"""Made-up conversations of five kinds, by chance and the same in each run, and lines that are recorded about them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.builders import JsonDict, assistant, calls, image, result, system, user

_SYLLABLES = ("ka", "ro", "mi", "ten", "sol", "dur", "ve", "lin", "ga", "po")
_THINGS = ("invoice", "parser", "cache", "ticket", "schema", "Rechnung", "отчёт", "会議", "ログ", "données")
_RULES = (
    "Never touch the folder legacy/.",
    "Always answer in one sentence, please.",
    "Bitte niemals auf prod schreiben.",
    "不要修改配置文件。",
    "From now on the limit is 250 EUR, not 200.",
)


class Teller:
    """Says things by chance, the same in each run."""

    def __init__(self, seed: str) -> None:
        self.luck = random.Random(seed)

    def word(self) -> str:
        return "".join(self.luck.choices(_SYLLABLES, k=self.luck.randint(1, 4)))

    def sentence(self) -> str:
        value = self.luck.choice([str(self.luck.randint(10, 9999)), f"src/{self.word()}/{self.word()}.py", self.word()])
        words = " ".join(self.word() for _ in range(self.luck.randint(4, 14)))
        return f"{self.luck.choice(_THINGS)} {value} {words}{self.luck.choice('..?!')}"

    def prose(self, sentences: int) -> str:
        return " ".join(self.sentence() for _ in range(sentences))

    def log(self, lines: int) -> str:
        numbered = (f"{at:04d} ERROR {self.word()}={self.luck.randint(0, 10**6)}" for at in range(lines))
        return "\n".join(numbered)

    def data(self, lines: int) -> str:
        return "".join(self.luck.choices("ABCDEFghijkl0123456789+/", k=60 * lines))

    def rows(self, count: int) -> str:
        return json.dumps([{"id": self.luck.randint(1, 999), self.word(): self.sentence()} for _ in range(count)])

    def code(self, lines: int) -> str:
        body = (f"def {self.word()}(): return {self.luck.random():.3f}" for _ in range(lines))
        return "\n".join(["```python", *body, "```"])

    def anything(self, size: int) -> str:
        return self.luck.choice([self.prose, self.log, self.data, self.rows, self.code])(size)


def _chat(teller: Teller) -> Iterator[JsonDict]:
    """Rules and questions of a person, some about what was said long before."""
    answers = [teller.prose(2)]
    yield system(f"You help with billing. {_RULES[0]}")
    for turn in range(1_000):
        question = f"What was that about {answers[len(answers) // 3][:60]}?" if turn % 5 == 4 else teller.prose(3)
        answers.append(teller.prose(teller.luck.randint(2, 9)))
        yield user(f"{question} {teller.luck.choice(_RULES)}" if turn % 4 == 1 else question)
        yield assistant(answers[-1])


def _agent(teller: Teller) -> Iterator[JsonDict]:
    """Tasks and many rounds of tools, some in parallel; results of every kind."""
    yield system(teller.prose(6))
    yield user(f"{teller.prose(4)} {_RULES[2]} {_RULES[3]}")
    for turn in range(1_000):
        ids = [f"call_{turn}_{at}" for at in range(teller.luck.randint(1, 3))]
        functions = [
            {"name": f"tool_{at % 2}", "arguments": json.dumps({"path": teller.word()})} for at in range(len(ids))
        ]
        calls = [{"id": id_, "type": "function", "function": each} for id_, each in zip(ids, functions, strict=True)]
        yield {"role": "assistant", "content": teller.sentence() if turn % 2 else None, "tool_calls": calls}
        yield from (result(id_, teller.anything(teller.luck.randint(1, 16))) for id_ in ids)
        if turn % 6 == 5:
            yield assistant(teller.prose(2))
            yield user(teller.prose(1))


def _pasted(teller: Teller) -> Iterator[JsonDict]:
    """A person who pastes, and a client that says the same behind every message."""
    reminder = f"<system-reminder>{teller.prose(2)}</system-reminder>"
    for turn in range(1_000):
        rule = _RULES[turn % 5] if turn % 3 == 0 else ""
        yield user(f"{teller.sentence()}\n\n{teller.anything(12)}\n\n{rule}{reminder}")
        yield assistant(f"{teller.prose(2)}\n{teller.code(3)}")


def _pictures(teller: Teller) -> Iterator[JsonDict]:
    yield system(teller.prose(1))
    for turn in range(1_000):
        shown = [image()] if turn % 3 == 0 else []
        yield {"role": "user", "content": [{"type": "text", "text": teller.prose(2)}, *shown]}
        yield assistant(teller.prose(4))


def _values(teller: Teller) -> Iterator[JsonDict]:
    """Values that change, said by a person and by one tool, and questions about them."""
    for turn in range(1_000):
        thing, place = teller.luck.choice(_THINGS[:3]), teller.luck.choice(("Rome", "Oslo", "Bern"))
        number = teller.luck.randint(1_000, 9_999)
        forms = (
            f"The {thing} of {place} is listed as {number}.",
            f"Now, the {thing} of {place} is {number}, not {number - 7}.",
            f"{teller.prose(1)}\nSet {thing}_{place} = {number}; the rest of {place} stays.",
            f"Is the {thing} of {place} {number}?",
            f"{place}: " + ", ".join(f"{thing} {number + at}" for at in range(5)) + ".",
        )
        yield user(f"{teller.prose(turn % 3)} {teller.luck.choice(forms)}")
        if turn % 3:
            yield assistant(teller.prose(3))
            continue
        yield calls(f"call_{turn}", name="read", arguments=json.dumps({"path": f"{place}.txt"}))
        yield result(f"call_{turn}", f"{teller.luck.choice(forms)}\n{teller.log(turn % 5)}")
        yield assistant(teller.luck.choice(forms))


TELLS: Mapping[str, Callable[[Teller], Iterator[JsonDict]]] = {
    "chat": _chat,
    "agent": _agent,
    "pasted": _pasted,
    "pictures": _pictures,
    "values": _values,
}


def read(file: Path) -> dict[str, list[str]]:
    """The recorded lines, by the name of their case."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return {name: lines for name, *lines in (part.splitlines() for part in text.split("== ")[1:])}


def recorded(file: Path, name: str, lines: Sequence[str]) -> list[str]:
    """The recorded lines of a case, which are these if `GOLDENS=write`."""
    cases = read(file)
    if os.environ.get("GOLDENS") == "write":
        cases[name] = [*lines]
        text = "\n".join(line for case in sorted(cases) for line in [f"== {case}", *cases[case]])
        file.write_text(f"{text}\n", encoding="utf-8")
    return cases[name]
