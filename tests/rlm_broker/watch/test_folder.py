import os
from pathlib import Path

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.watch import folder
from tests.support.forked_child import in_child
from tests.support.skips import NEEDS_ROOT


def test_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    with folder.opened() as place:
        assert place is None
    with folder.opened(makes=True) as place:
        assert place is not None
    assert (tmp_path / "rlm-broker").stat().st_mode & 0o777 == 0o700


def test_folder_that_another_user_could_use_is_refused(tmp_path: Path) -> None:
    """A link could lead to a folder in which another user waits for connections."""
    place = tmp_path / "rlm-broker"
    (tmp_path / "other").mkdir(0o700)
    place.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="cannot be trusted"), folder.opened(makes=True):
        pass
    place.unlink()
    place.mkdir()
    place.chmod(0o755)
    with pytest.raises(ConfigurationError, match="its mode is 755 and not 700"), folder.opened():
        pass
    if os.geteuid() == 0:
        os.chown(place, 65534, 65534)
        with pytest.raises(ConfigurationError, match="it belongs to the user 65534"), folder.opened():
            pass


@pytest.mark.skipif(os.geteuid() != 0, reason=NEEDS_ROOT)
def test_runtime_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    """`su` without `-` keeps the variable of the user before."""

    def place() -> str:
        os.setresuid(65534, 65534, 65534)
        return str(folder.place())

    assert folder.place() == tmp_path / "rlm-broker"
    assert in_child(place) == "/tmp/rlm-broker-65534"


@pytest.mark.parametrize("given", ["", "relative", "/nonexistent", "/proc/1/\0"[:7]])
def test_unusable_runtime_folder_gives_way(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", given)
    assert folder.place() in (Path(f"/tmp/rlm-broker-{os.geteuid()}"), Path("/proc/1/rlm-broker"))


def test_socket_name_tells_a_process_from_a_later_one() -> None:
    own = folder.SocketName.own("ask")
    assert own.pid == os.getpid()
    assert folder.SocketName.parsed(str(own)) == own
    child = folder.SocketName(*in_child(lambda: list(folder.SocketName.own("ask"))))
    assert child.started >= own.started
    assert child.pid != own.pid
    others = ("", ".ask-1-2.sock", "ask-1-2", "ask-0-2.sock", "ASK-1-2.sock", "a-1-2.sock\n", "ask-1.sock")
    assert {folder.SocketName.parsed(name) for name in others} == {None}
