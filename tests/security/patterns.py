"""Every regular expression of the package, hostile text made of its own parts, and what searching that costs.

`test_resources.py` finds them, where LiteLLM and the whole package are loaded anyhow, and measures them in a child
process, which loads neither; `measure` gives processor seconds.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import regex
from pydantic import BaseModel

if sys.version_info >= (3, 11):
    import re._constants as sre_constants
    import re._parser as sre_parse
else:
    import sre_constants
    import sre_parse

# Of `re` and `regex`.
_COMMON_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.ASCII
_METHODS = frozenset({"search", "match", "fullmatch", "finditer", "findall", "sub", "split"})
_CHARS = (" ", "\n", "\t", "a", "A", "0", "_", "/", ".", "-", "`", "é", "中", "\\", '"', "=", ":", "<", ">")
_MAX_SAMPLES = 24
# Patterns that only ever see short texts, with the longest of them; the source says where it is cut.
SEEN_CHARS = {
    # What a piece of a message holds (core.ledger._LINE_CHARS).
    **{f"core.ledger._{name}": 160 for name in ("WORD", "IDENTIFIER", "SPAN", "UNSPACED", "IN_UNSPACED")},
    **{f"core.judging._{name}": 600 for name in ("RULE", "RULE_WORDS", "NEGATION")},  # _SENTENCE_CHARS
    # Of the first line of a continuation (_LINE_CHARS).
    **{f"core.joiner._{name}": 160 for name in ("ANNOUNCEMENT", "SAYS_NO_MORE")},
    **{f"core.cuts._{name}": 192 for name in ("CHARACTER", "WORDS")},  # the end of a text (_CONTEXT_CHARS)
    "core.cuts._NO_SPACE": 1,
    **{f"core.secrets._{name}": 32_768 for name in ("SEARCHES", "BROKEN", "HIDDEN")},  # _SLICE_CHARS
    "tokenizers.families._NAMES": 256,  # a model's name (_MAX_NAME_CHARS)
    **{f"core.identity._{name}": 480 for name in ("NOTE", "WORD", "AMOUNT", "DIGIT", "MARK")},
    "core.identity._ENDING": 300,  # the end of a text (_MOST_ENDING_CHARS)
}
# Those of them that see one such text a request or a continuation, not a long one in pieces.
SEEN_ONCE = {"tokenizers.families._NAMES", "core.joiner._ANNOUNCEMENT", "core.joiner._SAYS_NO_MORE"}


class Found(NamedTuple):
    """A pattern, where it stands, and how it is used there."""

    name: str
    pattern: re.Pattern[str]
    methods: frozenset[str]


def patterns(package: ModuleType) -> list[Found]:
    """Those in the variables of all modules, and those that are written where they are used."""
    found: dict[str, Found] = {}
    for module_name in sorted(_modules(package)):
        module = importlib.import_module(module_name)
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        tree = ast.parse(source)
        used = _methods(tree)
        short = module_name.removeprefix(f"{package.__name__}.")
        for variable, value in vars(module).items():
            for number, pattern in enumerate(_inside(value)):
                if f"{variable} " in source or f"{variable}:" in source:
                    name = f"{short}.{variable}" + (f"[{number}]" if pattern is not value else "")
                    found.setdefault(pattern.pattern, Found(name, pattern, used.get(variable, frozenset({"search"}))))
        for line, method, text in _written(tree):
            pattern = re.compile(text)
            found.setdefault(text, Found(f"{short}:{line}", pattern, frozenset({method})))
    return [each for each in found.values() if isinstance(each.pattern.pattern, str)]


def _modules(package: ModuleType) -> Iterator[str]:
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if ".simulator" not in each.name and not each.name.endswith("__main__"):
            yield each.name


def _inside(value: Any) -> Iterator[re.Pattern[str]]:
    if isinstance(value, (re.Pattern, regex.Pattern)):
        yield value
    elif isinstance(value, (tuple, list)) and not hasattr(value, "__dict__"):
        for each in value:
            yield from _inside(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _inside(each)
    elif isinstance(value, BaseModel):
        yield from _inside(vars(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _inside(getattr(value, field.name))


def _methods(tree: ast.AST) -> dict[str, frozenset[str]]:
    used: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in _METHODS:
            used.setdefault(node.value.id, set()).add(node.attr)
    return {name: frozenset(methods) for name, methods in used.items()}


def _written(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
            and node.func.attr in _METHODS
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, node.func.attr, str(node.args[0].value)


def hostile(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(head, unit) of texts that are a head and then a unit again and again."""
    samples = list(dict.fromkeys(_samples(pattern)))[:_MAX_SAMPLES]
    units = list(dict.fromkeys([*_CHARS, *(char for sample in samples for char in sample)]))[:60]
    found = [("", char) for char in units]
    for sample in samples:
        for end in sorted({1, 2, 3, len(sample) // 2, len(sample) - 1, len(sample)}):
            if 0 < end <= len(sample):
                found.append(("", sample[:end]))
                found += [(sample[:end], char) for char in (" ", "\n", "a", "0", sample[end - 1])]
        found += [("", sample[:-1] + char) for char in (" ", "\n", "x")]
    return list(dict.fromkeys(found))


def _samples(pattern: re.Pattern[str]) -> Iterator[str]:
    try:
        tree = sre_parse.parse(pattern.pattern, pattern.flags & _COMMON_FLAGS)
    except re.error:
        return  # what only `regex` knows (\\X, properties) is tried with plain characters
    for choice in range(_MAX_SAMPLES):
        for times in (0, 1, 3):
            yield _sample(tree, choice, times)


def _sample(tree: Any, choice: int, times: int) -> str:
    """A text that the pattern likes: of alternatives the one with this number, of repetitions so many."""
    text = ""
    for kind, value in tree:
        if kind is sre_constants.LITERAL:
            text += chr(value)
        elif kind is sre_constants.NOT_LITERAL:
            text += "x" if value != ord("x") else "y"
        elif kind is sre_constants.ANY:
            text += "."
        elif kind is sre_constants.IN:
            text += _char(value)
        elif kind is sre_constants.BRANCH:
            branches = value[1]
            text += _sample(branches[choice % len(branches)], choice // len(branches) or choice, times)
        elif kind is sre_constants.SUBPATTERN:
            text += _sample(value[-1], choice, times)
        elif kind in (sre_constants.MAX_REPEAT, sre_constants.MIN_REPEAT):
            least, most, inner = value
            text += "".join(_sample(inner, choice + each, times) for each in range(min(max(least, times), int(most))))
    return text


def _char(values: Sequence[Any]) -> str:
    if values[0][0] is sre_constants.NEGATE:
        taken = {value for kind, value in values if kind is sre_constants.LITERAL}
        return next(char for char in "x y/" if ord(char) not in taken)
    kind, value = values[-1]
    if kind is sre_constants.LITERAL:
        return chr(value)
    if kind is sre_constants.RANGE:
        return chr(value[0])
    digits = value == sre_constants.CATEGORY_DIGIT
    space = value == sre_constants.CATEGORY_SPACE
    return "1" if digits else " " if space else "a"


def as_json(found: Found) -> list[Any]:
    """What `report` takes, in another process."""
    engine = "re" if isinstance(found.pattern, re.Pattern) else "regex"
    return [found.name, found.pattern.pattern, found.pattern.flags & _COMMON_FLAGS, sorted(found.methods), engine]


def report(given: Sequence[Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """For each pattern its slowest text: processor seconds for 32,000, 128,000 and 1 MB.

    `whole` and `look` are 1 MB and one look at it in terms of what a plain search of 1 MB takes on this machine now.
    """
    plain = Found("plain", re.compile("[a-z]+!"), frozenset({"search"}))
    found: dict[str, dict[str, Any]] = {}
    for name, text, flags, methods, engine in given:
        compiled = re.compile(text, flags) if engine == "re" else regex.compile(text, flags)
        each = Found(name, compiled, frozenset(methods))
        seen = _seen_chars(each, 1_000_000)
        once = each.name.partition("[")[0] in SEEN_ONCE
        tried = seen if once else 2_000
        slowest_s, head, unit = max(
            (measure(each, head, unit, tried), head, unit) for head, unit in hostile(each.pattern)
        )
        row: dict[str, Any] = {"text": [head[:40], unit[:40]]}
        if once:
            # The longest text that there is says it all.
            row |= dict.fromkeys(("short_s", "long_s", "whole_s"), slowest_s)
        else:
            row |= {"short_s": measure(each, head, unit, 32_000), "long_s": measure(each, head, unit, 128_000)}
            # What is only seen in pieces costs as much for each of them.
            share = 10 if seen < 1_000_000 else 1
            row["whole_s"] = share * measure(each, head, unit, 1_000_000 // share)
        row["whole"] = row["whole_s"] / measure(plain, "", "some words ", 1_000_000)
        row["look"] = row["whole"] * (1 if once else seen / 1_000_000)
        if each.name not in found or row["whole_s"] > found[each.name]["whole_s"]:
            found[each.name] = row
    return found


def _seen_chars(found: Found, chars: int) -> int:
    """How long a text the pattern, one of its variable's, ever sees of so many characters."""
    return SEEN_CHARS.get(found.name.partition("[")[0], chars)


def measure(found: Found, head: str, unit: str, chars: int) -> float:
    """Processor seconds that a text of so many characters takes, in the pieces in which the pattern sees it."""
    text = (head + unit * (chars // len(unit)))[:chars]
    seen = _seen_chars(found, chars)
    pieces = [text[start : start + seen] for start in range(0, chars, seen)]
    begun_s = time.process_time()
    for method in found.methods:
        run = _run(found.pattern, method)
        for piece in pieces:
            run(piece)
    return time.process_time() - begun_s


def _run(pattern: re.Pattern[str], method: str) -> Callable[[str], object]:
    if method == "sub":
        return lambda text: pattern.sub("", text)
    if method == "finditer":
        return lambda text: sum(1 for _ in pattern.finditer(text))
    return getattr(pattern, method)  # type: ignore[no-any-return]
