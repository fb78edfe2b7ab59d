"""Sandboxes for the OpenAI Agents SDK: commands, files, the workspace as an archive, resumption, refusals."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tables import table


@pytest.fixture
def sdk() -> Any:
    """The adapter and what it imports of the SDK, by name."""
    from rlm_broker.integrations import openai_agents

    return openai_agents


async def test_commands_have_outcomes_and_errors_of_the_sdk(sdk: Any) -> None:
    client = sdk.Client(env={"A": "a", "B": "b"})
    manifest = sdk.Manifest(environment={"value": {"B": "manifest"}})
    async with await client.create(manifest=manifest) as session:
        assert await session.running()
        result = await session.exec("pwd; echo $A $B; echo err >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == (b"/w/workspace\na manifest\n", b"err\n", 3)
        assert (await session.exec("printf", "%s", "$A", shell=False)).stdout == b"$A"
        with pytest.raises(sdk.ExecTimeoutError):
            await session.exec("sleep 1000", timeout=0.1)
        with pytest.raises(sdk.ExecTransportError, match="the program 'none' cannot be started"):
            await session.exec("none", shell=False)
        with pytest.raises(sdk.ConfigurationError, match="user is refused by rlm-broker: a sandbox has one user"):
            await session.exec("true", user="root")
    assert not await session.running()
    await client.delete(session)
    with pytest.raises(sdk.ExecTransportError, match="was closed"):
        await session.exec("true")


async def test_files_are_those_of_the_workspace(sdk: Any) -> None:
    client = sdk.Client()
    async with await client.create(manifest=sdk.Manifest(root="/w/sub", entries={"a.txt": b"hello"})) as session:
        assert (await session.read(Path("a.txt"))).read() == b"hello"
        await session.write(Path("/w/sub/deep/b"), io.BytesIO(b"\xff"))
        assert (await session.read(Path("deep/b"))).read() == b"\xff"
        await session.exec("ln -s a.txt link; ln -s /etc/fonts/fonts.conf out; echo > /w/beside; ln -s ../beside up")
        assert (await session.read(Path("link"))).read() == b"hello"
        for path, error in (
            ("none", sdk.WorkspaceReadNotFoundError),
            ("deep", sdk.WorkspaceArchiveReadError),
            ("out", Exception),
            ("up", Exception),
        ):
            with pytest.raises(error) as refused:
                await session.read(Path(path))
            assert type(refused.value).__module__ == "agents.sandbox.errors", path
        with pytest.raises(sdk.WorkspaceArchiveWriteError, match="deep' is a folder"):
            await session.write(Path("deep"), io.BytesIO(b""))
    await client.delete(session)


async def test_workspace_goes_on_here_and_elsewhere(sdk: Any) -> None:
    client = sdk.Client()
    async with await client.create(options=sdk.ClientOptions(limits={"max_processes": 30})) as session:
        await session.write(Path("made"), io.BytesIO(b"made"))
        await session.exec(
            "chmod +x made; mkdir -p left/out empty; echo > left/out/x; head -c 3000000 /dev/zero > large"
        )
    state = client.serialize_session_state(session.state)
    here = await client.resume(client.deserialize_session_state(dict(state)))
    async with here:
        assert (await here.exec("ls left/out")).stdout == b"x\n"
    await client.delete(here)
    other = sdk.Client()
    there = await other.resume(other.deserialize_session_state(dict(state)))
    async with there:
        shown = await there.exec("[ -x made ] && wc -c < large; ls; ls left; ulimit -u")
        assert shown.stdout.split()[:5] == [b"3000000", b"empty", b"large", b"left", b"made"]
        with pytest.raises(sdk.WorkspaceArchiveWriteError):
            await there.hydrate_workspace(io.BytesIO(b"no archive"))
    await other.delete(there)


@table(
    "asked, option",
    [
        ({"root": "/srv"}, "manifest.root"),
        ({"root": "/w2"}, "manifest.root"),
        ({"users": ["root"]}, "manifest.users"),
        ({"extra_path_grants": (SimpleNamespace(host_path="/home"),)}, "extra_path_grants"),
        ({"mounts": ["s3"]}, "mounts"),
        ({"entries": {"repo": "git"}}, "GitRepo"),
    ],
)
async def test_manifest_beyond_the_walls_is_refused_by_its_option(sdk: Any, asked: dict[str, Any], option: str) -> None:
    if "entries" in asked:
        asked = {"entries": {"repo": sdk.GitRepo("a/b")}}
    with pytest.raises(sdk.ConfigurationError, match=f"{option} is refused by rlm-broker: "):
        await sdk.Client().create(manifest=sdk.Manifest(**asked))
