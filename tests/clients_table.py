"""The table of clients as docs/clients.md must show it: `python -m tests.clients_table` prints it."""

from __future__ import annotations

from litellm_compaction.cli.connect import CLIENTS


def table() -> str:
    """A Markdown table of the clients, their own prompts and the windows that they need."""
    lines = ["| client | `connect` | its own prompt, tokens | least window | good window |", "|---|---|---|---|---|"]
    for name, client in CLIENTS.items():
        numbers = (client.get(key, 0) for key in ("prompt_tokens", "least_tokens", "good_tokens"))
        cells = (client["title"], f"`{name}`", *(f"{number:,}" if number else "–" for number in numbers))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
