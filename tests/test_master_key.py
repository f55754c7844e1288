"""The master key: the environment's, else one that is made once, readable only by its owner."""

from __future__ import annotations

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from litellm_compaction.errors import ConfigError
from litellm_compaction.master_key import Box, ensure_master_key, known_master_key


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"LITELLM_COMPACTION_HOME": str(tmp_path / "my" / "own")}


def test_a_look_makes_no_key(home: dict[str, str], tmp_path: Path) -> None:
    """A key that the operator set is taken as it is; else the file's, else none."""
    found = ensure_master_key({**home, "LITELLM_MASTER_KEY": " sk-mine "})
    assert (found.key, found.path, found.created) == ("sk-mine", None, False)
    assert known_master_key(home) is None
    assert not list(tmp_path.iterdir())
    made = ensure_master_key({**home})
    assert known_master_key(home) == made.key
    assert known_master_key({**home, "LITELLM_MASTER_KEY": "sk-mine"}) == "sk-mine"
    assert "LITELLM_MASTER_KEY" not in home


def test_a_missing_key_is_made_once_and_reused(home: dict[str, str]) -> None:
    """Of many calls in the same instant one creates it, later ones read the same."""
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: ensure_master_key({**home}), range(64)))
    assert sum(each.created for each in found) == 1
    again = ensure_master_key(home)
    assert {(each.key, each.path) for each in found} == {(again.key, again.path)}
    # LiteLLM reads the variable; a log of the value does not show it.
    assert again.key == home["LITELLM_MASTER_KEY"]
    assert again.key not in repr(again)
    assert re.fullmatch(r"sk-[\w-]{43}", again.key)
    assert again.path is not None


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_file_and_folder_belong_to_the_user_alone(home: dict[str, str]) -> None:
    """Mode 0600 for the file, also after it was loosened, 0700 for the folder, and no draft is left."""
    for _ in range(2):
        path = ensure_master_key({**home}).path
        assert path is not None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["master_key"]


@pytest.mark.parametrize("content", ["", "no-key\n", "sk-sixteen-letters-", "sk-two lines of text here\nand more"])
def test_a_file_without_a_key_is_refused(home: dict[str, str], content: str) -> None:
    """Something else in the file is never used as a key, and never replaced silently."""
    path = ensure_master_key({**home}).path
    assert path is not None
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="does not hold a master key"):
        ensure_master_key({**home})
    path.write_text("sk-seventeen-letters", encoding="utf-8")
    assert ensure_master_key({**home}).key == "sk-seventeen-letters"


def test_a_key_is_made_where_files_have_no_second_name(home: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a stick with FAT."""
    monkeypatch.setattr(os, "link", lambda *_: Path("/none").stat())
    made = ensure_master_key({**home})
    assert made.created
    assert known_master_key(home) == made.key


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    """The error names both ways out."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"LITELLM_MASTER_KEY.*LITELLM_COMPACTION_HOME"):
        ensure_master_key({"LITELLM_COMPACTION_HOME": str(tmp_path / "file" / "below")})


# As an earlier version wrote b"body" under "scope" and "key", for "sk-master".
LOCKED = bytes.fromhex("017b986522fc96e193acea20a95ea5c7c5553f65c3d0626b314ac2d388751df6ad")


@pytest.mark.parametrize(
    ("secret", "purpose", "body", "opened"),
    [
        ("sk-master", b"records", LOCKED, b"body"),
        ("sk-other", b"records", LOCKED, None),
        (None, b"records", LOCKED, None),
        ("sk-master", b"originals", LOCKED, None),
        ("sk-master", b"records", b"\x02" + LOCKED[1:], None),
        ("sk-master", b"records", LOCKED[:9], None),
    ],
)
def test_a_box_opens_what_was_locked_for_it(
    secret: str | None, purpose: bytes, body: bytes, opened: bytes | None
) -> None:
    """In every later version, too; nothing else, and nothing that was changed."""
    assert Box(lambda: secret, purpose).opened(body, "scope", "key") == opened
