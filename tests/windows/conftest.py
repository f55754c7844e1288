"""Fixtures: a fake LM Studio, a client for it, a clock, and windows that are read there."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from litellm_compaction.windows.windows import Windows
from tests.virtual_time import Clock
from tests.windows.fake_lmstudio import FakeLMStudio

CACHE_S = 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server() -> FakeLMStudio:
    return FakeLMStudio()


@pytest.fixture
async def http(server: FakeLMStudio) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as client:
        yield client


@pytest.fixture
async def windows(http: httpx.AsyncClient, clock: Clock) -> AsyncIterator[Windows]:
    made = Windows(cache_s=CACHE_S, http=http, clock=clock)
    yield made
    await made.aclose()
