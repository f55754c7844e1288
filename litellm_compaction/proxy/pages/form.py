"""The form of settings: a control for each, what config.yaml says beside it, and the way back."""

from __future__ import annotations

from litellm_compaction.proxy.pages.content import Content, Field
from litellm_compaction.proxy.pages.markup import Html, joined, tag

ALL = "*"


def settings_section(content: Content) -> Html:
    """The settings that can be changed at run time; without controls for whoever may not write."""
    may_write = content.may_write
    explanation = (
        "A change counts at once, for new requests, in all workers of this proxy, and comes before config.yaml. "
        "A deployment's own settings (model_info.compaction) come before both."
        if may_write
        else "Only proxy administrators may change these."
    )
    fields = [_field(field, may_write=may_write) for field in content.fields]
    any_changed = any(field.changed for field in content.fields)
    parts = [
        tag("h2", "Settings", id="settings"),
        tag("p", explanation, class_="quiet"),
    ]
    if not may_write:
        return tag("section", parts, tag("div", fields, class_="fields"), aria_labelledby="settings")
    actions = tag(
        "div",
        tag("button", "Save", class_="main"),
        tag("button", "Reset all to config.yaml", name="reset", value=ALL, form="reset-form") if any_changed else None,
        class_="actions",
    )
    return tag(
        "section",
        parts,
        # Apart, so that Enter in a field saves and never resets.
        tag("form", _hidden(content, "reset"), id="reset-form", method="post"),
        tag(
            "form",
            _hidden(content, "save"),
            tag("div", fields, class_="fields"),
            actions,
            id="settings-form",
            method="post",
            novalidate=True,
        ),
        aria_labelledby="settings",
    )


def sign_out_form(content: Content) -> Html | None:
    """A button, where there is a session to end."""
    if not content.is_signed_in:
        return None
    return tag("form", _hidden(content, "sign_out"), tag("button", "Sign out", class_="small"), method="post")


def _hidden(content: Content, what: str) -> Html:
    return joined(
        tag("input", type="hidden", name=name, value=value)
        for name, value in (("do", what), ("token", content.token), ("revision", content.revision))
    )


def _field(field: Field, *, may_write: bool) -> Html:
    about = [f"{field.key}-about"]
    notes = [tag("p", field.description, id=about[0])]
    if field.problem:
        about.append(f"{field.key}-problem")
        notes.append(tag("p", field.problem, id=about[-1], class_="bad"))
    if field.changed:
        about.append(f"{field.key}-changed")
        text = f"config.yaml says {field.configured}, changed here to {_shown(field)} at {field.changed}."
        notes.append(tag("p", text, id=about[-1], class_="note"))
    else:
        notes.append(tag("p", f"config.yaml or default: {field.configured}."))
    if not may_write:
        notes.insert(0, tag("p", _shown(field), class_="note"))
        return tag("div", tag("strong", field.label), notes, class_="field changed" if field.changed else "field")
    if field.changed:
        notes.append(
            tag(
                "button",
                "Reset",
                class_="small",
                name="reset",
                value=field.key,
                form="reset-form",
                aria_label=f"Reset {field.label}",
            )
        )
    control = _control(field, " ".join(about))
    heading = tag("label", field.label, for_=field.key)
    return tag("div", heading, control, notes, class_="field changed" if field.changed else "field")


def _control(field: Field, about: str) -> Html:
    invalid = "true" if field.problem else None
    if field.options:
        options = [tag("option", label, value=value, selected=value == field.value) for value, label in field.options]
        return tag("select", options, id=field.key, name=field.key, aria_describedby=about, aria_invalid=invalid)
    return tag(
        "input",
        id=field.key,
        name=field.key,
        value=field.value,
        inputmode="decimal",
        autocomplete="off",
        aria_describedby=about,
        aria_invalid=invalid,
    )


def _shown(field: Field) -> str:
    return next((label for value, label in field.options if value == field.value), field.value)
