"""The cache of replies on disk."""

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.broker.cache import Cache
from rlm_broker.broker.client_queue import Serving
from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError
from rlm_broker.results import ChatMessage
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.usage import Usage
from tests.support.fake_openai import FakeOpenAI, completion
from tests.support.forked_python import Python


def request(text: str, max_completion_tokens: int | None = None, sample: int = 0, **more: Any) -> LMRequest:
    messages = (ChatMessage("user", text),)
    return LMRequest(messages, max_completion_tokens=max_completion_tokens, sample=sample, **more)


async def test_cached_request_is_not_sent_or_paid_again(tmp_path: Path) -> None:
    with FakeOpenAI(lambda body: completion(body["messages"][0]["content"].upper())) as server:
        for _ in range(2):  # the second with a new handler, client and connection, as a second run has
            client = OpenAICompatibleClient(server.base_url, "m", usd_per_million_tokens=(1, 1))
            cache = Cache(tmp_path / "cache")
            handler = LMHandler(client, cache=cache)
            calls = [await handler.complete(client, request(text)) for text in "ab"]
            await client.aclose()
            cache.close()
    assert [call.response for call in calls] == ["A", "B"]
    assert [call.usage for call in calls] == [Usage(1, 0, 0, 0.0, stored_calls=1)] * 2
    assert len(server.requests) == 2
    assert handler.get_usage_summary().total.stored_calls == 2


async def test_cache_key_holds_all_that_shapes_a_reply(tmp_path: Path) -> None:
    with FakeOpenAI(completion("x")) as server:
        base = OpenAICompatibleClient(server.base_url, "m")
        others = [
            OpenAICompatibleClient(server.base_url, "other"),
            OpenAICompatibleClient(server.base_url, "m", options={"temperature": 1}),
        ]
        cache = Cache(tmp_path / "cache")
        keys = [cache.key(client, request("a")) for client in (base, *others)]
        keys += [cache.key(base, each) for each in (request("b"), request("a", 5), request("a", sample=1))]
        keys += [cache.key(base, request("a", temperature=each)) for each in (0, 0.5)]
    assert len(set(keys)) == 8
    assert cache.key(OpenAICompatibleClient(server.base_url, "m", api_key="sk"), request("a")) == keys[0]
    assert cache.key(ScriptedClient(["x"]), request("a")) is None


async def test_only_what_that_very_model_said_is_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    for reply in (
        LMReply("", Usage(1)),
        LMReply("", Usage(1), problem="no text"),
        LMReply("text", Usage(1), model="a fallback"),
        LMReply("a lone surrogate \ud800", Usage(1)),  # sqlite could not store it as it is
    ):
        await cache.put(b"key", reply)
        assert await cache.get(b"key") is None


async def test_least_recently_used_replies_are_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlm_broker.broker.cache.USED_AGAIN_S", 0)
    cache = Cache(tmp_path / "cache", max_bytes=300_000)
    for number in range(100):
        await cache.put(b"%d" % number, LMReply(str(number) * 5_000, Usage(1)))
        assert await cache.get(b"0") is not None, number
    cache.close()
    kept = sqlite3.connect(tmp_path / "cache").execute("SELECT key FROM replies").fetchall()
    assert (b"0",) in kept
    assert (b"99",) in kept
    assert (b"1",) not in kept
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000_000


async def test_full_cache_loses_a_tenth_of_its_replies_at_once(tmp_path: Path) -> None:
    """The next writes then find room, and need not remove."""
    cache = Cache(tmp_path / "cache")
    for number in range(100):
        await cache.put(b"%d" % number, LMReply("x" * 5_000, Usage(1)))
    cache._max_bytes = cache._bytes()
    await cache.put(b"one more", LMReply("x" * 5_000, Usage(1)))
    assert cache._count() == 101 - 10


FILLS = """
import asyncio, sys
from rlm_broker.broker.clients.base import LMReply
from rlm_broker.broker.cache import Cache
from rlm_broker.usage import Usage

async def fill(path, start):
    cache = Cache(path)
    for number in range(start, start + 100):
        await cache.put(b"%d" % number, LMReply(f"text {number}", Usage(1)))
    cache.close()

asyncio.run(fill(sys.argv[1], int(sys.argv[2])))
"""


async def test_cache_is_shared_by_several_processes(tmp_path: Path) -> None:
    with contextlib.ExitStack() as started:
        programs = [["-c", FILLS, str(tmp_path / "cache"), str(start)] for start in (0, 50, 100)]
        processes = [started.enter_context(Python(program)) for program in programs]
        assert [process.wait() for process in processes] == [0, 0, 0]
    cache = Cache(tmp_path / "cache")
    for number in range(200):
        kept = await cache.get(b"%d" % number)
        assert kept is not None
        assert kept.text == f"text {number}"


async def test_cache_file_is_private_and_holds_no_prompts(tmp_path: Path) -> None:
    with FakeOpenAI(completion("the reply")) as server:
        client = OpenAICompatibleClient(server.base_url, "m", api_key="sk-of-the-test")
        await LMHandler(client, cache=Cache(tmp_path / "cache")).complete(client, request("a private prompt"))
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"the reply" in content
    assert b"private prompt" not in content
    assert b"sk-of-the-test" not in content
    assert (tmp_path / "cache").stat().st_mode & 0o77 == 0


def test_foreign_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not a database at all, but long enough to be looked at" * 50)
    for path in (tmp_path / "notes", tmp_path / "missing" / "cache", tmp_path):
        with pytest.raises(ConfigurationError, match="as a cache"):
            Cache(path)
    assert (tmp_path / "notes").read_text().startswith("not a database")


async def test_broken_cache_does_not_fail_the_call(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.close()
    assert await cache.get(b"key") is None
    await cache.put(b"key", LMReply("x", Usage(1)))


async def test_reply_of_a_model_with_fallbacks_is_cached(tmp_path: Path) -> None:
    with FakeOpenAI(completion("x")) as server:
        client = OpenAICompatibleClient(server.base_url, "m")
        handler = LMHandler(client, cache=Cache(tmp_path / "cache"))
        handler.serve(client, Serving(fallbacks=(ScriptedClient(["y"]),)))
        for _ in range(3):
            await handler.complete(client, request("a"))
    assert len(server.requests) == 1


def test_cache_others_can_write_to_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "bookmarks") as other:
        other.execute("CREATE TABLE bookmarks (url)")
    (tmp_path / "open").touch(mode=0o666)
    (tmp_path / "open").chmod(0o666)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name, why in (("bookmarks", "another program"), ("open", "other users may write"), ("link", "")):
        with pytest.raises(ConfigurationError, match=f"as a cache: .*{why}"):
            Cache(tmp_path / name)
    assert not (tmp_path / "target").exists()
    assert sqlite3.connect(tmp_path / "bookmarks").execute("SELECT name FROM sqlite_master").fetchall() == [
        ("bookmarks",)
    ]


async def test_locked_cache_costs_only_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")
    tried: list[str] = []
    cache._database.set_trace_callback(tried.append)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    other = sqlite3.connect(tmp_path / "cache", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for number in range(20):
        await cache.put(b"%d" % number, LMReply("x", Usage(1)))
    other.execute("ROLLBACK")
    now += 9.5
    await cache.put(b"sooner", LMReply("x", Usage(1)))
    assert len(tried) == 1
    now += 0.5
    await cache.put(b"later", LMReply("x", Usage(1)))
    assert await cache.get(b"later") is not None
    assert cache._database.execute("PRAGMA busy_timeout").fetchone() == (200,)  # milliseconds


async def test_use_is_written_down_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")
    now = begun = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    used = []
    await cache.put(b"key", LMReply("x", Usage(1)))
    for after_s in (59.5, 60.5, 119, 121):
        now = begun + after_s
        assert await cache.get(b"key") is not None
        (row,) = cache._database.execute("SELECT used FROM replies").fetchall()
        used.append(row[0] - begun)
    assert used == pytest.approx([0, 60.5, 60.5, 121])


def test_path_of_another_type_is_refused() -> None:
    paths: tuple[Any, ...] = (5, None, b"cache")
    for path in paths:
        with pytest.raises(ConfigurationError, match="path"):
            Cache(path)


def test_file_is_refused_if_others_may_write_to_it(tmp_path: Path) -> None:
    for mode, is_taken in ((0o600, True), (0o655, True), (0o620, False), (0o602, False)):
        path = tmp_path / f"{mode:o}"
        path.touch()
        path.chmod(mode)
        with contextlib.nullcontext() if is_taken else pytest.raises(ConfigurationError, match="other users may write"):
            Cache(path).close()
