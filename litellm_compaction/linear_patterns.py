"""Whether an operator's regular expression takes linear time on any text. Asked by the settings, at start.

Decided by its form, since no trial finds the text on which a pattern explodes: what may be repeated without an end, or
very often inside something that is repeated, is refused, with what to write instead.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

with warnings.catch_warnings():
    # Python 3.11 and later call it `re._parser`, and warn of the old name.
    warnings.simplefilter("ignore", DeprecationWarning)
    import sre_constants as kinds
    import sre_parse as parser

_MAX_CHARS = 2000
# Ways to go on from one character of a text, at most: 10 s for 1 MB.
_MAX_STEPS = 2_000


def must_be_linear(pattern: str) -> None:
    """Returns if `pattern` is linear.

    Raises:
        ValueError: it is not, or it is none; says what to change.
    """
    if len(pattern) > _MAX_CHARS:
        raise ValueError(f"a pattern is too long: {len(pattern)} characters, at most {_MAX_CHARS}")
    try:
        compiled = re.compile(pattern)
        tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} cannot be read: {error}") from None
    steps = _steps(tree, pattern)
    if compiled.match("") is not None or tree.getwidth()[0] == 0:
        raise ValueError(f"the pattern {pattern!r} matches the empty text")
    if steps > _MAX_STEPS:
        raise ValueError(f"the pattern {pattern!r} may try {steps} steps at each character; at most {_MAX_STEPS}")


def _steps(tree: Any, pattern: str) -> int:
    """How often a search may go on from one place: repetitions in a row multiply, as do those inside each other."""
    steps = 1
    for kind, value in tree:
        if kind in (kinds.GROUPREF, kinds.GROUPREF_EXISTS):
            raise ValueError(f"the pattern {pattern!r} has a reference to a group, which can take exponential time")
        if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT) or str(kind) == "POSSESSIVE_REPEAT":
            least, most, inner = value
            if most == kinds.MAXREPEAT:
                raise ValueError(
                    f"the pattern {pattern!r} has a repetition without an end: write {{1,200}} for +, {{0,200}} for *"
                )
            inside = _steps(inner, pattern)
            # Of a repetition of one thing only the length varies.
            steps *= inside**most if inside > 1 and most <= 16 else _STEPS_TOO_MANY if inside > 1 else most - least + 1
        elif kind is kinds.BRANCH:
            steps *= sum(_steps(branch, pattern) for branch in value[1])
        elif kind is kinds.SUBPATTERN:
            steps *= _steps(value[-1], pattern)
        elif kind in (kinds.ASSERT, kinds.ASSERT_NOT):
            steps *= _steps(value[1], pattern)
        steps = min(steps, _STEPS_TOO_MANY)
    return steps


_STEPS_TOO_MANY = 10**12
