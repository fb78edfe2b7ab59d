"""`bind` on a machine that refuses families of addresses, as a system call filter does here."""

import asyncio
import socket
import threading

import pytest

from rlm_broker.broker.transport.acceptor import bind
from rlm_broker.errors import ConfigurationError, SandboxFailed
from scripts.hosts.surroundings import AF_INET, AF_INET6, EAFNOSUPPORT, filter_calls
from tests.support.forked_child import in_child


def bound_without(host: str, *families: int) -> list[int] | str:
    """Return the families of the sockets that `host` gets while `families` are refused, or the refusal."""

    async def tried() -> list[int] | str:
        try:
            sockets = await bind(host, 0)
        except (ConfigurationError, SandboxFailed) as error:
            return str(error)
        found = [int(each.family) for each in sockets]
        for each in sockets:
            each.close()
        return found

    def in_filter() -> list[int] | str:
        filter_calls({}, families=dict.fromkeys(families, EAFNOSUPPORT))
        return asyncio.run(tried())

    result = in_child(in_filter)
    assert isinstance(result, list | str)
    return result


def test_refused_family_is_omitted_if_another_exists() -> None:
    if not socket.has_ipv6 or bound_without("::1", AF_INET) != [AF_INET6]:
        pytest.skip("needs IPv6")
    assert bound_without("", AF_INET) == [AF_INET6]


def test_refusal_of_all_families_names_the_setting() -> None:
    assert "RestrictAddressFamilies=" in bound_without("127.0.0.1", AF_INET)


async def test_numeric_host_is_bound_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:  # undone before the loop ends: the loop then starts a thread
        patch.setattr(threading.Thread, "start", refused)
        (bound,) = await bind("127.0.0.1", 0)
        bound.close()
        with pytest.raises(SandboxFailed, match="can't start new thread: raise the limit of processes"):
            await bind("localhost", 0)
