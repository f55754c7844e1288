"""A fake LM Studio behind httpx's MockTransport, and a target there."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import httpx

from litellm_compaction.windows.windows import Target

BASE = "http://lmstudio.test:1234/v1"


@dataclass
class FakeLMStudio:
    """Answers by path; everything else gets LM Studio's 200 with an error body.

    Attributes:
        answers: by path a body, a response, an error, or what gives a body for that of the request.
        down: raised instead of any answer; with a `gate` answers wait for that.
    """

    answers: dict[str, object] = field(default_factory=dict)
    down: Exception | None = None
    gate: asyncio.Event | None = None
    requests: list[httpx.Request] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [request.url.path for request in self.requests]

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        # The answer is what the server knew when the request arrived.
        answer = self.answers.get(request.url.path, {"error": f"Unexpected endpoint. (GET {request.url.path})"})
        if self.gate is not None:
            await self.gate.wait()
        failure = self.down or answer
        if isinstance(failure, Exception):
            raise failure
        if callable(answer):
            answer = answer(json.loads(request.content))
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    def list_v1(self, *models: dict[str, object]) -> None:
        self.answers["/api/v1/models"] = {"models": list(models)}

    def list_v0(self, *models: dict[str, object]) -> None:
        self.answers["/api/v0/models"] = {"object": "list", "data": list(models)}


def v1_model(key: str = "qwen/qwen3-8b", **instances: int | None) -> dict[str, object]:
    """One model of `/api/v1/models`; `instances` maps ids (`_` stands for the key) to context lengths."""
    return {
        "type": "llm",
        "publisher": key.partition("/")[0],
        "key": key,
        "display_name": key,
        "architecture": "qwen3",
        "quantization": {"name": "Q4_K_M", "bits_per_weight": 4},
        "loaded_instances": [
            {"id": key if name == "_" else name, "config": {"context_length": tokens, "parallel": 4}}
            for name, tokens in instances.items()
        ],
        "max_context_length": 262144,
        "variants": [f"{key}@q4_k_m"],
        "selected_variant": f"{key}@q4_k_m",
    }


def v0_model(name: str, *, tokens: int | None = 8192, state: str = "loaded") -> dict[str, object]:
    """One model of `/api/v0/models`."""
    listed: dict[str, object] = {
        "id": name,
        "object": "model",
        "type": "llm",
        "arch": "qwen3",
        "state": state,
        "max_context_length": 131072,
    }
    return listed if tokens is None else {**listed, "loaded_context_length": tokens}


def target(
    model: str = "qwen/qwen3-8b",
    *,
    context_length: int | None = None,
    is_lmstudio: bool = True,
    api_base: str | None = BASE,
) -> Target:
    return Target(
        key=f"id-{model}",
        model=model,
        api_base=api_base,
        api_key="sk-secret",
        context_length=context_length,
        is_lmstudio=is_lmstudio,
    )
