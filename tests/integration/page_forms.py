"""The page's routes as a program uses them, and keys for each role."""

from __future__ import annotations

from typing import Any

import httpx

from tests.integration.harness import Proxy

PAGE = "/compaction"
ADMIN, VIEWER, ANNA, ARNO, BERT = (f"sk-page-{name}" for name in ("admin", "viewer", "anna", "arno", "bert"))


def look(running: Proxy, route: str = "settings", key: str | None = ADMIN, **params: str) -> httpx.Response:
    """What a key sees at one of the page's routes."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return running.client.get(f"{PAGE}/{route}", params=params, headers=headers)


def save(running: Proxy, values: dict[str, Any], key: str = ADMIN) -> httpx.Response:
    """Changes settings; None gives config.yaml's value back."""
    return running.by(key).post({"values": values}, f"{PAGE}/settings")


def reset(running: Proxy) -> None:
    changed = [row["key"] for row in look(running).json()["settings"] if row["is_changed"]]
    save(running, dict.fromkeys(changed)).raise_for_status()


def chosen(running: Proxy, key: str = ADMIN) -> dict[str, Any]:
    """The values in force, by setting."""
    return {row["key"]: row["value"] for row in look(running, key=key).json()["settings"]}
