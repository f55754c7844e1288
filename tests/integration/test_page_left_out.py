"""What there is of the page where an operator leaves it out, and where its store cannot be used."""

from __future__ import annotations

from tests.integration.bench import Bench
from tests.integration.harness import MASTER_KEY
from tests.integration.page_forms import chosen, look, send

_HI = [{"role": "user", "content": "Hi."}]


def _is_guarded(bench: Bench) -> bool:
    answer = bench.proxy.chat("local", _HI)
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-litellm-compaction") == "none"


def test_a_store_that_cannot_be_used(patient: Bench) -> None:
    """LiteLLM's own keys, no store: the proxy serves, the page says what holds, and a save is refused."""
    patient.watch("local")
    assert _is_guarded(patient)
    answer = look(patient.proxy, MASTER_KEY)
    assert answer.status_code == 200
    assert "Signed in as proxy_admin" in answer.text
    assert "The store cannot be read" in answer.text
    assert "config.yaml holds" in answer.text
    assert look(patient.proxy, "sk-wrong").status_code == 401
    assert look(patient.proxy, None).status_code == 401
    refused = send(patient.proxy, {"do": "save", "mode": "off"}, MASTER_KEY)
    assert refused.status_code == 503
    assert chosen(refused.text, "mode") == "off"
    assert _is_guarded(patient)


def test_the_page_can_be_left_out(permissive: Bench) -> None:
    """`page: off`: no route, no read of settings, and requests are guarded as ever."""
    permissive.watch("local")
    assert look(permissive.proxy, MASTER_KEY).status_code == 404
    assert send(permissive.proxy, {"do": "save", "mode": "off"}, MASTER_KEY).status_code == 404
    assert _is_guarded(permissive)
