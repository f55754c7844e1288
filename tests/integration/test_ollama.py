"""An opted-in Ollama by its own API: it is asked to refuse what it would cut, and others are asked as ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from litellm_compaction.proxy.routing import refuses_by
from tests.builders import talk
from tests.integration.bench import Bench, open_bench
from tests.integration.ollama_server import MODEL, Ollama, serve_ollama

_REFUSES = {"truncate": False, "shift": False}


@pytest.fixture(scope="module")
def ollama() -> Iterator[Ollama]:
    """Ollama's double."""
    with serve_ollama() as served:
        yield served


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory, ollama: Ollama) -> Iterator[Bench]:
    """A proxy that trusts a window for an hour, before two opted-in deployments of it and one that is left alone."""

    def entry(group: str, model: str, **info: Any) -> dict[str, Any]:
        params = {"model": f"{model}/{MODEL}", "api_base": ollama.base_url}
        return {"model_name": group, "litellm_params": params, **({"model_info": info} if info else {})}

    on = {"enabled": True}
    with open_bench(
        tmp_path_factory.mktemp("ollama"),
        [],
        {"window_cache_s": 3600, "background": "off"},
        entries=[
            entry("chat", "ollama_chat", compaction=on),
            entry("generate", "ollama", compaction=on),
            entry("shrunk-whole", "ollama_chat", compaction=on),
            entry("shrunk-stream", "ollama_chat", compaction=on),
            entry("alone", "ollama_chat"),
        ],
        router_settings={"num_retries": 0, "disable_cooldowns": True},
    ) as bench:
        yield bench


@pytest.fixture(autouse=True)
def _as_it_says(ollama: Ollama) -> Iterator[None]:
    yield
    ollama.window = ollama.says


@pytest.mark.parametrize(("group", "stream"), [("chat", True), ("generate", False)])
def test_it_is_asked_to_refuse_and_not_to_cut(proxied: Bench, ollama: Ollama, group: str, stream: bool) -> None:
    """Both fields stand in the body itself, beside the bound on the answer among its options."""
    body = {"model": group, "messages": talk(f"{group} {stream}", 500), "stream": stream}
    answer = proxied.proxy.stream_body(body).raw.decode() if stream else proxied.proxy.post(body).text
    assert "Fine." in answer
    sent = ollama.chats[-1]
    assert {key: sent.get(key) for key in _REFUSES} == _REFUSES
    assert 0 < sent["options"]["num_predict"] < 8192
    assert "extra_body" not in sent["options"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_window_that_has_shrunk_is_an_error_and_no_invented_answer(
    proxied: Bench, ollama: Ollama, stream: bool
) -> None:
    """Loaded anew with less than it said: the client reads a 400 with its code, and nothing was cut."""
    group = f"shrunk-{'stream' if stream else 'whole'}"
    assert proxied.proxy.chat(group, [{"role": "user", "content": "Hi."}]).status_code == 200
    ollama.window, since = 2048, len(ollama.chats)
    body = {"model": group, "messages": talk(f"shrunk {stream}", 5000), "stream": stream}
    answer = proxied.proxy.post(body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "exceeds the available context size (2048 tokens)" in answer.json()["error"]["message"]
    assert _cut(ollama, since) == []
    # From then on the window is known, and the conversation is compacted into it.
    again = proxied.proxy.post(body)
    assert again.status_code == 200, again.text
    assert again.headers["x-litellm-compaction-window"] == "2048"
    assert _cut(ollama, since) == []


def _cut(ollama: Ollama, since: int) -> list[dict[str, Any]]:
    """The requests of which the server saw a part only; summaries and questions of the proxy's own among them."""
    return [body for body, was_cut in zip(ollama.chats[since:], ollama.cuts[since:], strict=True) if was_cut]


def test_one_that_nobody_opted_in_is_asked_as_ever(proxied: Bench, ollama: Ollama) -> None:
    """P7: neither field is ours to add, and it cuts what it always cut."""
    ollama.window = 1024
    messages = talk("alone", 3000)
    assert proxied.proxy.chat("alone", messages).status_code == 200
    assert _REFUSES.keys().isdisjoint(ollama.chats[-1])
    assert len(ollama.seen[-1]) < len(messages)


@pytest.mark.parametrize(("provider", "fields"), [("ollama", _REFUSES), ("openai", {}), ("hosted_vllm", {})])
def test_only_its_own_routes_know_the_fields(provider: str, fields: dict[str, Any]) -> None:
    """Ollama's `/v1` leaves them unread, other servers may refuse them."""
    assert refuses_by(provider) == fields
