"""Fixtures: a fake LM Studio, a client for it, and a clock."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.windows.fake_lmstudio import Clock, FakeLMStudio


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
