"""`up`: which server it takes, and what stops it; tests/processes has a real start."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from litellm_compaction.cli import main
from litellm_compaction.cli import up as up_module
from litellm_compaction.cli.config_file import read_config
from litellm_compaction.cli.proxy_process import Running, noted, running_up
from litellm_compaction.cli.up import SIMULATED_MODEL, _upstream
from litellm_compaction.errors import CompactionError
from tests.cli.conftest import NOWHERE, QWEN, config, deployment
from tests.lmstudio_double import Address


def test_the_up_that_runs_is_known(environ: dict[str, str]) -> None:
    """A note of one that has ended, or that is damaged, is none."""
    running = Running("http://127.0.0.1:1", "config.yaml", None, False)
    newer, older = running._replace(base_url="http://127.0.0.1:2"), ExitStack()
    older.enter_context(noted(running, environ))
    assert running_up(environ) == running
    with noted(newer, environ):
        older.close()
        assert running_up(environ) == newer
    assert running_up(environ) is None
    path = Path(environ["LITELLM_COMPACTION_HOME"]) / "up.json"
    for text in ("", "[]", '{"base_url": 1}', f'[{2**60}, "u", "c", null, false]', '["1", "u", "c", null, false]'):
        path.write_text(text, encoding="utf-8")
        assert running_up(environ) is None, text


_REAL, _ITS_OWN = "lm_studio/qwen/qwen3-8b", f"lm_studio/{SIMULATED_MODEL}"


@pytest.mark.parametrize(
    ("model", "lm_studio", "simulator", "variable", "outcome"),
    [
        ("lm_studio/*", None, False, "", "SIMULATOR"),
        (_ITS_OWN, None, False, "", "SIMULATOR"),
        ("lm_studio/*", None, True, "http://127.0.0.1:9/v1", "SIMULATOR"),
        ("lm_studio/*", None, False, "http://127.0.0.1:9/v1", "LM Studio: http://127.0.0.1:9"),
        (_REAL, None, False, "", "LM Studio: http://127.0.0.1:1234"),
        (_REAL, None, True, "", "has simulated-.* only"),
        ("lm_studio/*", "http://127.0.0.1:9", False, "", "LM Studio: http://127.0.0.1:9"),
        ("lm_studio/*", "http://127.0.0.1:9", True, "", "--lm-studio names a server"),
    ],
)
def test_a_simulator_never_stands_for_a_real_model(
    model: str,
    lm_studio: str | None,
    simulator: bool,
    variable: str,
    outcome: str,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that somebody has named, and one for a model's real name, is used, there or not."""
    monkeypatch.setattr(up_module, "answers", lambda *_: False)
    file = read_config(write(config(deployment(model))))
    said = ""
    try:
        with _upstream(file, simulator, lm_studio, {"LM_STUDIO_API_BASE": variable}) as (api_base, is_simulated):
            assert is_simulated == (outcome == "SIMULATOR")
            if is_simulated:
                with httpx.Client(base_url=str(api_base), trust_env=False) as http:
                    names = {each["id"] for each in http.get("models").json()["data"]}
                    asked = {"model": "qwen/qwen3-8b", "messages": [{"role": "user", "content": "Hello!"}]}
                    assert (names, http.post("chat/completions", json=asked).status_code) == ({SIMULATED_MODEL}, 404)
    except CompactionError as error:
        said = str(error)
    said += capsys.readouterr().out
    assert re.search(outcome, said), said
    assert ("LM Studio: http" in said) == outcome.startswith("LM Studio: ")


class _Started(Exception):
    """In place of a proxy."""


@pytest.mark.parametrize(
    ("model", "api_base", "said"),
    [
        (QWEN, "{}/v1", ""),
        (QWEN, "{}", "requests go below /v1: write {}/v1"),
        ("qwen/qwen-3-8b", "{}/v1", f"LM Studio has {QWEN}"),
        (QWEN, "http://127.0.0.1:9", "requests go below /v1"),
        (QWEN, NOWHERE, "Start its server (lms server start)"),
    ],
)
def test_what_doctor_calls_a_problem_stops_up(
    model: str,
    api_base: str,
    said: str,
    address: Address,
    write: Callable[..., Path],
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless it passes by itself when a server comes, or one is to start all the same."""

    def start(*_: object, **__: object) -> None:
        raise _Started

    monkeypatch.setattr(up_module, "serving", start)
    path = write(config(deployment(f"lm_studio/{model}", params={"api_base": api_base.format(address.base_url)})))

    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def run(*, force: bool) -> int:
        return main(["up", "--port", "0", "--config", str(path), *(["--force"] if force else [])])

    if said and api_base != NOWHERE:
        assert run(force=False) == 1
        assert "Master key" not in capsys.readouterr().out, "shown once"
    else:
        with pytest.raises(_Started):
            run(force=False)
    with pytest.raises(_Started):
        run(force=True)
    assert said.format(address.base_url) in capsys.readouterr().err
