"""The page around its parts: data in, HTML out."""

from __future__ import annotations

from litellm_compaction.proxy.pages.content import Content, Notice
from litellm_compaction.proxy.pages.form import settings_section, sign_out_form
from litellm_compaction.proxy.pages.markup import Child, Html, joined, raw, tag
from litellm_compaction.proxy.pages.plot import LEGEND, plot
from litellm_compaction.proxy.pages.style import STYLE
from litellm_compaction.proxy.pages.tables import deployments_table, events_table

_TITLE = "Context compaction"


def page(content: Content) -> str:
    """The settings and history page."""
    who = tag("span", f"Signed in as {content.role or 'a key without a role'}", class_="quiet")
    return _document(
        tag("header", tag("h1", _TITLE), tag("div", who, sign_out_form(content), class_="who")),
        tag(
            "main",
            [_notice(notice) for notice in content.notices],
            settings_section(content),
            _section("deployments", "Guarded deployments", deployments_table(content.rows)),
            _section("conversations", "Conversations", _plots(content)),
            _section("events", "Compactions and refusals", events_table(content.events, sees_all=content.sees_all)),
        ),
        tag(
            "footer",
            tag("p", "Times are UTC. Sizes are tokens. No text of a conversation is kept here.", class_="quiet"),
        ),
    )


def sign_in_page(problem: str = "") -> str:
    """The form for a key, for browsers that have none yet."""
    form = tag(
        "form",
        tag("input", type="hidden", name="do", value="sign_in"),
        tag("label", "Key of this LiteLLM proxy", for_="key"),
        tag(
            "input",
            id="key",
            name="key",
            type="password",
            autocomplete="off",
            required=True,
            autofocus=True,
            aria_describedby="about",
        ),
        tag(
            "p",
            "The master key and keys of proxy administrators may change settings; every other key shows what its own "
            "team, user or key has done.",
            id="about",
            class_="quiet",
        ),
        tag("div", tag("button", "Sign in", class_="main"), class_="actions"),
        method="post",
    )
    notice = _notice(Notice(kind="problem", text=problem)) if problem else None
    return _document(tag("main", tag("h1", _TITLE), notice, form, class_="narrow"))


def plain_page(text: str) -> str:
    """One sentence, and the way back."""
    notice = _notice(Notice(kind="problem", text=text))
    back = tag("p", tag("a", "Back to the page", href="?"))
    return _document(tag("main", tag("h1", _TITLE), notice, back, class_="narrow"))


def _document(*body: Child) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", _TITLE),
        tag("style", raw(STYLE)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def _section(name: str, title: str, *children: Child) -> Html:
    return tag("section", tag("h2", title, id=name), *children, aria_labelledby=name)


def _notice(notice: Notice) -> Html:
    return tag("p", notice.text, class_=f"notice {notice.kind}", role="alert" if notice.kind == "problem" else "status")


def _plots(content: Content) -> Html:
    if not content.talks:
        text = "None yet. Each conversation is drawn from its first request on, for 30 days."
        return tag("p", text, class_="quiet")
    text = (
        "How full the window was with each turn of the last conversations: prompt and answer. "
        "Dashed lines: where a prompt is compacted, where a running answer is carried over."
    )
    more = (
        tag("p", f"{content.more_talks} more are not drawn: older ones, or of one turn.", class_="quiet")
        if content.more_talks
        else None
    )
    return joined(
        [
            tag("p", text, class_="quiet"),
            tag("div", [plot(talk) for talk in content.talks], class_="plots"),
            LEGEND,
            more,
        ]
    )
