"""What the page shows, as data: gathered by `data.py`, drawn by `view.py` and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from litellm_compaction.events import Kept
from litellm_compaction.proxy.page.turns import Accuracy, Talk


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the proxy that can write summaries: its `model_name`, and what stands behind it."""

    name: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One guarded deployment, or one loaded model behind a wildcard.

    Attributes:
        group: its `model_name`.
        model: as its server is asked for it.
        state: what is known of its window in words, where there is no number: "not loaded", why nobody knows it.
        window_tokens: None where it is not known.
        source: who said the number.
        parallel: requests that share the window; None where nobody said.
        tokenizer: the vocabulary that counts, or the name of the file that it is from.
        owns_vocabulary: whether that is the model's own.
        goes_on: how its server is made to go on with an answer at the limit, in words; "" where nobody knows.
        accuracy: of the last answer; None before the first.
        own: settings of its own, which the page does not change, as `key: value`.
        conflict: why changes made here do not reach it; "" where they do.
    """

    group: str
    model: str
    mode: str
    state: str = ""
    window_tokens: int | None = None
    source: str = ""
    parallel: int | None = None
    family: str = ""
    tokenizer: str = ""
    owns_vocabulary: bool = False
    carrier: str = ""
    goes_on: str = ""
    accuracy: Accuracy | None = None
    own: tuple[str, ...] = ()
    conflict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One setting that can be changed.

    Attributes:
        value: in the form: what is in force, or what somebody entered and was refused.
        configured: what config.yaml says.
        changed: "2026-11-22 02:10 UTC by proxy_admin" where it was changed here, else "".
        options: value and label of a drop-down; empty for a number.
        problem: why the value was refused.
    """

    key: str
    label: str
    description: str
    value: str
    configured: str
    changed: str = ""
    options: Sequence[tuple[str, str]] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A message at the top of the page."""

    kind: Literal["done", "problem", "note"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The whole page.

    Attributes:
        role: of the visitor.
        may_write, sees_all: what the visitor may.
        revision: of the overlay that the form shows.
        talks: the most recent first, as many as are drawn.
        more_talks: how many are not.
        events: the newest first, with numbers.
    """

    role: str
    may_write: bool
    sees_all: bool
    revision: str
    fields: Sequence[Field]
    notices: Sequence[Notice] = ()
    rows: Sequence[Row] = ()
    talks: Sequence[Talk] = ()
    more_talks: int = 0
    events: Sequence[Kept] = ()
