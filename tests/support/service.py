"""The server on loopback, as uvicorn serves it: real HTTP for real clients."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rlm_broker.rlm import RLM
from rlm_broker.serve.app import Service
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.settings import KeySettings, ServeSettings
from tests.support.asgi_server import http_server

T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """A server that runs, on a loop in a thread of its own; `keys` has texts by name, "default" the one it has made."""

    url: str
    key: str
    keys: Mapping[str, str]
    port: int
    service: Service
    loop: asyncio.AbstractEventLoop

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        """Headers that authenticate a request with the first key."""
        return self.headers_of(next(iter(self.keys)))

    @property
    def parts(self) -> Parts:
        parts = self.service._parts
        assert parts is not None
        return parts

    def headers_of(self, name: str) -> dict[str, str]:
        """Headers that authenticate a request with the key of that name."""
        return {"authorization": f"Bearer {self.keys[name]}"}

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the server's loop, and return what it does."""

        async def called() -> T:
            return function()

        return self.run(called())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


@contextlib.contextmanager
def serving(
    rlm: RLM | None = None,
    settings: ServeSettings | None = None,
    *,
    keys: Mapping[str, Mapping[str, Any]] | None = None,
    of: Callable[[RLM, ServeSettings], Service] = Service,
) -> Iterator[Served]:
    """Serve on a free port of loopback, in a thread, until the block is left. Async tests and fixtures use it as well.

    Args:
        rlm: Not opened yet; None takes the model "offline".
        settings: None takes the defaults.
        keys: Name → fields of `KeySettings` but `key`, such as `{"alice": {"rights": ("run",)}, "bob": {}}`.
        of: Makes the application.
    """
    texts, made = {}, {}
    with contextlib.ExitStack() as variables:
        for name, fields in (keys or {}).items():
            variable, texts[name] = f"RLM_BROKER_TEST_{name.upper()}", f"test-{secrets.token_hex(12)}"
            os.environ[variable] = texts[name]
            variables.callback(os.environ.pop, variable, None)
            made[name] = KeySettings(key=f"env:{variable}", **fields)
        settings = settings or ServeSettings()
        settings = settings.model_copy(update={"keys": made}) if made else settings
        service = of(rlm or RLM("offline"), settings)
    if service.made_key is not None:
        texts["default"] = service.made_key
    with http_server(service) as server:
        port = int(server.url.rpartition(":")[2])
        yield Served(server.url, next(iter(texts.values()), ""), texts, port, service, server.loop)
