"""HTML from values: everything that goes in is escaped, unless it is HTML that was made here."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import TypeAlias

# Not allowed in HTML at all (WHATWG HTML, 13.2.3.5 "control-character-in-input-stream"); lone surrogates have no bytes.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"br", "col", "hr", "input", "link", "meta"})


class Html(str):
    """Text that is HTML already. Made by `tag` and `raw` only."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"
Attribute: TypeAlias = "str | int | float | bool | None"


def escaped(text: str) -> Html:
    """`text` as it can stand in an element or a quoted attribute."""
    return Html(html.escape(_UNPRINTABLE.sub("\ufffd", text), quote=True))


def raw(text: str) -> Html:
    """Text that is written in this package, not by anybody else: style sheets, entities."""
    return Html(text)


def joined(children: Child) -> Html:
    """Children side by side; None is nothing."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, str | int):
        return escaped(str(children))
    return Html("".join(joined(child) for child in children))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """An element.

    Args:
        name: of the element.
        children: text is escaped.
        attributes: a trailing `_` is dropped and the others become `-`; True has no value, False and None leave it out.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        own_name = key.rstrip("_").replace("_", "-")
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        parts.append(own_name if value is True else f'{own_name}="{escaped(shown)}"')
    opening = f"<{' '.join(parts)}>"
    return Html(opening if name in _VOID else f"{opening}{joined(children)}</{name}>")


def name_of(text: str) -> Html:
    """A name that a client may have chosen, kept from turning the text around it."""
    return tag("bdi", text)
