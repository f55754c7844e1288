"""The lines of each client as docs/clients.md must show them: `python -m tests.clients_table` prints them."""

from __future__ import annotations

from collections.abc import Iterator

from litellm_compaction.cli.connect import CLIENTS, Place, filled, sections

_PLACE = Place("lm_studio/qwen/qwen3-8b", 65_536, "http://127.0.0.1:4000")


def table() -> str:
    """A Markdown table of the prompts and windows, and each client's lines below it."""
    return "\n".join([*_windows(), *(line for name in CLIENTS for line in _lines(name))])


def _windows() -> Iterator[str]:
    yield "| client | `connect` | its own prompt, tokens | least window | good window |"
    yield "|---|---|---|---|---|"
    for name, client in CLIENTS.items():
        numbers = (client.get(key, 0) for key in ("prompt_tokens", "least_tokens", "good_tokens"))
        yield (
            " | ".join((f"| {client['title']}", f"`{name}`", *(f"{number:,}" if number else "–" for number in numbers)))
            + " |"
        )


def _lines(name: str) -> Iterator[str]:
    client = filled(name, _PLACE)
    yield f"\n### {client['title']}"
    for heading, language, text in sections(client):
        yield f"\n{f'`{heading}`:' if language and heading else heading}" if heading else ""
        if text:
            yield f"{'' if not heading else chr(10)}```{language}\n{text}\n```"


if __name__ == "__main__":
    print(table())
