"""One server for all tests of sandboxes, and its clients."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from rlm_broker import RLM, Limits, ServeSettings
from tests.support.service import Served, serving
from tests.support.waiting import WAIT_S

KEYS: dict[str, dict[str, Any]] = {"alice": {}, "bob": {}, "runner": {"rights": ("run",)}}
LIMITS = Limits(block_timeout_s=30, memory_bytes=1 << 30)
SETTINGS = ServeSettings(
    max_containers_per_key=3,
    container_idle_s=600,
    file_bytes=1 << 20,
    max_executions=2,
    max_queue=0,
    heartbeat_s=0.2,
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(RLM("offline", limits=LIMITS), SETTINGS, keys=KEYS) as served:
        yield served


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client of alice; its addresses begin behind /v1."""
    async with httpx.AsyncClient(base_url=served.base_url, headers=served.headers, timeout=WAIT_S) as http:
        yield http


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's client of alice, who has no container and no file afterwards."""
    with openai.OpenAI(base_url=served.base_url, api_key=served.key, max_retries=0) as client:
        yield client
        for container in client.containers.list():
            client.containers.delete(container.id)
        for file in client.files.list():
            client.files.delete(file.id)
    assert len(served.parts.repls) == 0


@pytest.fixture
def container(client: openai.OpenAI) -> str:
    """The id of a new container."""
    return client.containers.create(name="").id
