"""Which models the simulator lists, loads, and addresses."""

from __future__ import annotations

from tests.lmstudio_double import Model
from tests.simulator.bench import KEY, BenchFactory, user

OTHER = Model("google/gemma-4-12b", publisher="google", architecture="gemma4", type="vlm")


def test_v1_list_tells_the_loaded_window(bench: BenchFactory) -> None:
    """The native list carries the loaded window per instance and the architectural maximum apart from it."""
    first, second = bench(6000, models=[Model(KEY), OTHER]).get("/api/v1/models")["models"]
    assert first["loaded_instances"][0]["id"] == KEY
    assert first["loaded_instances"][0]["config"]["context_length"] == 6000
    assert first["max_context_length"] == 131_072
    assert (first["type"], second["type"]) == ("llm", "llm")
    assert second["loaded_instances"] == []
    assert second["capabilities"]["vision"] is True


def test_v0_list_has_a_loaded_window_only_when_loaded(bench: BenchFactory) -> None:
    """REST v0 shows `loaded_context_length` for loaded models and leaves it out for others."""
    first, second = bench(6000, models=[Model(KEY), OTHER]).get("/api/v0/models")["data"]
    assert (first["state"], first["loaded_context_length"]) == ("loaded", 6000)
    assert (second["state"], second["type"], second["arch"]) == ("not-loaded", "vlm", "gemma4")
    assert "loaded_context_length" not in second


def test_a_key_means_its_first_instance(bench: BenchFactory) -> None:
    """A key goes to the canonical instance although a larger one exists; an instance id goes to its own."""
    served = bench(4096)
    served.simulator.load(KEY, 16384, instance_id="big")
    served.chat(user("hi"))
    assert served.last.context_length == 4096
    served.chat(user("hi"), model="big")
    assert (served.last.instance_id, served.last.context_length) == ("big", 16384)
