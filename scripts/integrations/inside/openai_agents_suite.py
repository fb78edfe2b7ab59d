"""The base operations of a sandbox session, as the guide of the OpenAI Agents SDK has providers give them.

The SDK has no suite for providers. Each test is one operation of `BaseSandboxSession` or `BaseSandboxClient`.
"""

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agents.sandbox import Manifest
from agents.sandbox.apply_patch import WorkspaceEditor
from agents.sandbox.entries import Dir, File, GitRepo
from agents.sandbox.errors import (
    ConfigurationError,
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    InvalidManifestPathError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.session import SandboxSession
from agents.sandbox.snapshot import LocalSnapshotSpec
from agents.sandbox.types import User

from rlm_broker.integrations.openai_agents import Client
from scripts.integrations.peer import RECORDER

FILES = Manifest(
    entries={"a.txt": File(content=b"hello"), "sub": Dir(children={"b.txt": File(content=b"b")})},
    environment={"value": {"NAME": "lens"}},
)


@pytest.fixture
async def session() -> AsyncIterator[SandboxSession]:
    """A started session with two files."""
    client = Client()
    async with await client.create(manifest=FILES) as started:
        yield started
    await client.delete(started)


async def _text(session: SandboxSession, path: str) -> Any:
    return (await session.read(Path(path))).read()


async def test_start_applies_the_manifest(session: SandboxSession) -> None:
    assert [await _text(session, "a.txt"), await _text(session, "/w/workspace/sub/b.txt")] == [b"hello", b"b"]
    assert (await session.exec("echo $NAME")).stdout == b"lens\n"


async def test_exec(session: SandboxSession) -> None:
    done = await session.exec("pwd; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code) == (b"/w/workspace\n", b"err\n", 3)
    assert (await session.exec("printf", "%s", "$NAME", shell=False)).stdout == b"$NAME"


async def test_exec_timeout(session: SandboxSession) -> None:
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 1000", timeout=0.1)
    with pytest.raises(ExecTransportError):
        await session.exec("none", shell=False)


async def test_read(session: SandboxSession) -> None:
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("none"))
    with pytest.raises(InvalidManifestPathError):
        await session.read(Path("../etc/fonts/fonts.conf"))
    assert await session.read_bounded(Path("a.txt"), max_bytes=2) == b"he"


async def test_write(session: SandboxSession) -> None:
    await session.write(Path("x/y"), io.BytesIO(bytes(range(256))))
    assert await _text(session, "x/y") == bytes(range(256))


async def test_ls(session: SandboxSession) -> None:
    assert [entry.path for entry in await session.ls(".")] == ["/w/workspace/a.txt", "/w/workspace/sub"]


async def test_mkdir_and_rm(session: SandboxSession) -> None:
    await session.mkdir("m/n", parents=True)
    await session.rm("m", recursive=True)
    assert (await session.exec("ls")).stdout == b"a.txt\nsub\n"


async def test_mv_and_same_file(session: SandboxSession) -> None:
    await session.mv("a.txt", "sub/a.txt")
    assert await session.same_file("sub/a.txt", "sub/../sub/a.txt")
    assert not await session.same_file("sub/a.txt", "sub/b.txt")


async def test_apply_patch(session: SandboxSession) -> None:
    editor = WorkspaceEditor(session)
    from agents.editor import ApplyPatchOperation

    await editor.apply_patch(ApplyPatchOperation(type="update_file", path="a.txt", diff="@@\n-hello\n+changed\n"))
    assert (await _text(session, "a.txt")).strip() == b"changed"


async def test_persist_and_hydrate(session: SandboxSession) -> None:
    await session.exec("chmod +x a.txt; ln -s a.txt link; mkdir empty")
    archive = await session.persist_workspace()
    await session.exec("rm -r *")
    await session.hydrate_workspace(archive)
    assert (await session.exec("ls -F")).stdout == b"a.txt*\nempty/\nlink@\nsub/\n"


async def test_resume_in_the_same_process() -> None:
    client = Client()
    async with await client.create(manifest=FILES) as session:
        await session.exec("echo made > made")
    state = client.deserialize_session_state(client.serialize_session_state(session.state))
    async with await client.resume(state) as resumed:
        assert await _text(resumed, "made") == b"made\n"
    await client.delete(resumed)
    assert not await resumed.running()


async def test_resume_from_a_snapshot(tmp_path: Path) -> None:
    client, other = Client(), Client()
    async with await client.create(manifest=FILES, snapshot=LocalSnapshotSpec(base_path=tmp_path)) as session:
        await session.exec("echo made > made; rm a.txt")
    payload = client.serialize_session_state(session.state)
    await client.delete(session)
    async with await other.resume(other.deserialize_session_state(payload)) as resumed:
        listed = await resumed.exec("ls")
        assert listed.stdout == b"made\nsub\n", (listed.stdout, listed.stderr)
    await other.delete(resumed)


async def test_running_and_delete() -> None:
    client = Client()
    session = await client.create()
    assert not await session.running()
    async with session:
        assert await session.running()
    await client.delete(session)
    assert not await session.running()


async def test_terminals_ports_and_users_are_refused(session: SandboxSession) -> None:
    assert not session.supports_pty()
    with pytest.raises(NotImplementedError, match="PTY"):
        await session.pty_exec_start("sh", tty=True)
    with pytest.raises(ExposedPortUnavailableError):
        await session.resolve_exposed_port(80)
    with pytest.raises(ConfigurationError, match="user is refused by rlm-broker"):
        await session.exec("true", user="root")


async def test_manifest_beyond_the_walls_is_refused() -> None:
    for manifest, option in (
        (Manifest(root="/srv"), "manifest.root"),
        (Manifest(users=[User(name="x")]), "manifest.users"),
        (Manifest(entries={"r": GitRepo(repo="a/b", ref="main")}), "GitRepo"),
    ):
        with pytest.raises(ConfigurationError, match=f"{option} is refused by rlm-broker"):
            await Client().create(manifest=manifest)


if __name__ == "__main__":
    here = Path(__file__)
    options = ["-q", "-p", RECORDER, "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    raise SystemExit(pytest.main([*options, f"--rootdir={here.parent}", str(here)]))
