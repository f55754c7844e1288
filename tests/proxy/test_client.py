"""What a client asks of the guard itself, in its metadata or its headers."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.errors import BadWish
from litellm_compaction.proxy.client import NONE, Wish, is_off_for_owner, wish_of


def read(compaction: object = None, **headers: Any) -> Wish:
    """The wish of a chat request; `headers` are what follows the header's name."""
    sent = {f"X-LiteLLM-Compaction{name}": value for name, value in headers.items()}
    metadata = {"user_api_key": "k", "compaction": compaction}
    return wish_of({"metadata": metadata, "proxy_server_request": {"headers": sent}}, metadata)


@pytest.mark.parametrize(
    ("compaction", "headers", "wish"),
    [
        (None, {}, NONE),
        *((word, {}, NONE) for word in ("on", True)),
        ("off", {}, Wish(off=True)),
        (False, {}, Wish(off=True)),
        ({"now": True, "focus": None}, {}, Wish(now=True)),
        ({"now": True, "focus": " the\nschema\x00\u202e of  it "}, {}, Wish(now=True, focus="the schema of it")),
        ('{"now": true, "focus": "ports"}', {}, Wish(now=True, focus="ports")),
        ({"pin": ["Never touch prod.", " 0123456789ab "]}, {}, Wish(pin=["Never touch prod.", "0123456789ab"])),
        ({"pin": []}, {}, Wish(pin=[])),
        ("now", {}, Wish(now=True)),
        (None, {"": "now"}, Wish(now=True)),
        (None, {"": "off"}, Wish(off=True)),
        (None, {"": ""}, NONE),
        ({"now": True, "focus": "ports"}, {"": "off"}, Wish(now=True, focus="ports")),
    ],
)
def test_a_wish_is_read(compaction: object, headers: dict[str, str], wish: Wish) -> None:
    """An object, or the same as a string: OpenAI's own metadata holds nothing else; it goes before the header."""
    assert read(compaction, **headers) == wish


def test_a_key_is_left_alone_by_its_own_or_its_teams_metadata() -> None:
    """The key's word comes first; a request's own metadata is not asked."""
    off, on = {"mode": "off"}, {"mode": "guard"}
    for key, team in ((off, None), (None, {"mode": False}), ("off", on)):
        assert is_off_for_owner(_owned(key, team))
    for key, team in ((None, None), (on, off), ({"notices": "off"}, None), (["off"], None)):
        assert not is_off_for_owner({**_owned(key, team), "compaction": "off"})


def _owned(key: object, team: object) -> dict[str, Any]:
    return {"user_api_key_metadata": {"compaction": key}, "user_api_key_team_metadata": {"compaction": team}}


@pytest.mark.parametrize(
    ("compaction", "says"),
    [
        ("perhaps", "metadata.compaction cannot be read"),
        (["now"], "cannot be read"),
        ("{now: true}", "cannot be read"),
        ({"now": "true"}, "metadata.compaction.'now': Input should be a valid boolean"),
        ({"now": True, "focus": ["a"]}, "metadata.compaction.'focus': Input should be a valid string"),
        ({"now": True, "focus": "x" * 501}, "compaction.'focus': 501 characters; allowed: a topic of at most 500"),
        ({"y" * 41: 1}, f"metadata.compaction.'{'y' * 40}': Extra"),
        ({"now": True, "target\n": 0.2}, "metadata.compaction.'target\\n': Extra inputs are not permitted"),
        ({"focus": "ports"}, "only used where the conversation is compacted now"),
        *(
            ({"pin": pins}, "metadata.compaction.'pin': ")
            for pins in ("xxx", ["xxx", 1], ["xxx" * 400], ["x"] * 33, [" "])
        ),
    ],
)
def test_other_shapes_are_refused(compaction: object, says: str) -> None:
    """With what is allowed, and without the words of the topic."""
    with pytest.raises(BadWish) as refused:
        read(compaction)
    assert says in str(refused.value)
    assert "allowed: " in str(refused.value)
    assert "xxx" not in str(refused.value)


@pytest.mark.parametrize("word", ["now", "focus", "pin"])
def test_a_header_of_before_is_refused_with_the_new_way(word: str) -> None:
    """Its wish would be lost in silence."""
    with pytest.raises(BadWish, match="a wish stands in"):
        read(**{f"-{word}": "xxx"})
