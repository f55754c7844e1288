"""The page as a script uses it: looks, forms that are sent, and what stands in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import httpx

from tests.integration.harness import Proxy

# As people open it, and where it asks for a key.
OPENED, PAGE = "/compaction", "/compaction/"
ADMIN, VIEWER, ANNA, ARNO, BERT = (f"sk-page-{name}" for name in ("admin", "viewer", "anna", "arno", "bert"))
# The callback that knows these keys.
KEYS = Path(__file__).parent / "beside_page" / "page_keys.py"


def look(running: Proxy, key: str | None = ADMIN, **headers: str) -> httpx.Response:
    known = {"Authorization": f"Bearer {key}"} if key else {}
    return running.client.get(PAGE, headers={**known, **headers})


def send(running: Proxy, fields: Mapping[str, str], key: str = ADMIN, **headers: str) -> httpx.Response:
    """A form as a script sends it, with the revision that the page shows."""
    shown = {"revision": hidden(look(running, key).text, "revision"), **fields}
    return running.client.post(PAGE, data=shown, headers={"Authorization": f"Bearer {key}", **headers})


def save(running: Proxy, **values: str) -> httpx.Response:
    return send(running, {"do": "save", **values})


def hidden(text: str, name: str) -> str:
    found = re.search(f'name="{name}" value="([^"]*)"', text)
    return found.group(1) if found else ""


def chosen(text: str, key: str) -> str:
    """What a control of the page shows."""
    if found := re.search(f'<input id="{key}" name="{key}" value="([^"]*)"', text):
        return found.group(1)
    control = re.search(f'<select id="{key}".*?</select>', text, re.DOTALL)
    assert control is not None
    selected = re.search(r'<option value="([^"]*)" selected>', control.group())
    assert selected is not None
    return selected.group(1)
