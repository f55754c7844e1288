"""A wrong setting stops `litellm --config` at once, with a message that names key, value and range."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import lm_studio, proxy, write_config

pytestmark = pytest.mark.proxy

_NOWHERE = "http://127.0.0.1:9"
_WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "global": ({"pre_request_ration": 0.8, "pre_request_ratio": 1.5, "notices": "loud"}, {}),
    "deployment": ({}, {"compaction": {"target_ratio": 7, "windw": 1}}),
    "together": ({"target_ratio": 0.5}, {"compaction": {"pre_request_ratio": 0.45}}),
    "tokenizer": ({"tokenizer": "/nonexistent/model.gguf"}, {}),
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[str]]]:
    """What each wrong configuration makes the proxy say before it ends; two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(_ending, tmp_path_factory.mktemp(name), settings, info)
            for name, (settings, info) in _WRONG.items()
        }


def _ending(folder: Path, settings: dict[str, Any], info: dict[str, Any]) -> str:
    config = write_config(folder, [lm_studio("local", "model", _NOWHERE, **info)], settings)
    try:
        with proxy(config):
            return "it started"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "global",
            [
                r"callback_settings\.litellm_compaction: unknown key 'pre_request_ration'; known keys: .*notices",
                r"pre_request_ratio = 1\.5: .*less than 1",
                r"notices = 'loud': .*'content', 'reasoning' or 'off'",
            ],
        ),
        (
            "deployment",
            [r"model_info\.compaction of 'local'\.?.*target_ratio = 7: .*less than 1", "unknown key 'windw'"],
        ),
        (
            "tokenizer",
            [r"callback_settings\.litellm_compaction\.tokenizer = '/nonexistent/model\.gguf': it cannot be read"],
        ),
        ("together", [r"model_info\.compaction of 'local'", r"now 0\.5, 0\.45, 0\.9"]),
    ],
)
def test_wrong_settings_stop_the_start(endings: Mapping[str, Future[str]], name: str, said: list[str]) -> None:
    """The proxy does not start, and says which key has which wrong value and what is allowed."""
    output = endings[name].result(timeout=120)
    for pattern in said:
        assert re.search(pattern, output), output
