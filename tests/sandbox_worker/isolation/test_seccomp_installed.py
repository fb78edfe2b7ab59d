"""The filter, tried on a real connection and in real processes."""

import ctypes
import errno
import mmap
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_worker.isolation import seccomp, syscalls
from sandbox_worker.isolation.seccomp import Kind
from sandbox_worker.isolation.syscall_table import MACHINE, NUMBERS
from tests.support.forked_child import in_child

pytestmark = pytest.mark.skipif(MACHINE not in NUMBERS, reason=f"no table of system calls for {MACHINE}")
libc = ctypes.CDLL(None, use_errno=True)


def behind_the_filter(function: Callable[[], object], allow_exec: bool = False, kind: Kind = "repl") -> object:
    """Call `function` in a child under the filter of a REPL."""

    def run() -> object:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(kind, allow_exec)
        return function()

    return in_child(run)


def code_of(function: Callable[[], object]) -> str:
    """Name of the error number that `function` raises, or "done"."""
    try:
        function()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def raw(name: str, *arguments: int | bytes) -> Callable[[], object]:
    return lambda: syscalls.call(name, *arguments)


def test_connected_socket_cannot_be_reconnected() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as host,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(host.getsockname()) as connection,
        host.accept()[0] as peer,
    ):
        fd = connection.fileno()
        address = struct.pack("=H14x", socket.AF_UNSPEC)
        port = other.getsockname()[1]
        target = struct.pack("=H", socket.AF_INET) + struct.pack(">H4s8x", port, socket.inet_aton("127.0.0.1"))
        attacks = {
            "disconnects": raw("connect", fd, address, len(address)),
            "connects_elsewhere": raw("connect", fd, target, len(target)),
            "listens": lambda: connection.listen(),
            "accepts": lambda: connection.accept(),
            "binds": lambda: connection.bind(("127.0.0.1", 0)),
            "sends_to_another": raw("sendto", fd, b"x", 1, 0, target, len(target)),
            "opens_fast": raw("sendto", fd, b"x", 1, 0x20000000, 0, 0),
            "opens_fast_to_another": raw("sendto", fd, b"x", 1, 0x20000000, target, len(target)),
            "sends_a_message": lambda: connection.sendmsg([b"x"]),
            "receives_a_message": lambda: connection.recvmsg(1),
            "sets_an_option": lambda: connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            "shuts_it_down": lambda: connection.shutdown(socket.SHUT_RDWR),
            "makes_another_socket": lambda: socket.socket(),
        }
        refusals = behind_the_filter(lambda: {name: code_of(attack) for name, attack in attacks.items()})
        assert refusals == dict.fromkeys(attacks, "EPERM")

        def talks() -> str:
            connection.sendall(b"hello")
            return connection.recv(5).decode() + os.read(fd, 5).decode()

        peer.sendall(b"welcomehal")
        assert behind_the_filter(talks) == "welcomehal"
        assert peer.recv(5) == b"hello"


def test_kernel_internals_are_refused() -> None:
    attacks = {
        "unshares": raw("unshare", syscalls.CLONE_NEWUSER),
        "enters": raw("setns", -1, 0),
        "traces": raw("ptrace", 16, os.getppid(), 0, 0),
        "mounts": raw("mount", b"x", b"/", b"tmpfs", 0, 0),
        "makes_a_ring": raw("io_uring_setup", 1, bytes(120)),
        "makes_memory_without_a_file": lambda: os.memfd_create("x"),
        "shares_memory_without_a_file": lambda: mmap.mmap(-1, 4096),
        "watches_files": raw("inotify_init1", 0),
        "becomes_another": lambda: os.setuid(1),
        "forgets_its_filter": raw("seccomp", 0, 0, 0),
        "clones_a_sibling": raw("clone", 0x8000 | signal.SIGCHLD, 0, 0, 0, 0),
        "limits_another": raw("prlimit64", 1, 7, 0, 0),
        "starts_a_program": lambda: os.execv("/bin/true", ["true"]),
        "pairs_inet_sockets": lambda: socket.socketpair(socket.AF_INET),
    }
    refusals = behind_the_filter(lambda: {name: code_of(attack) for name, attack in attacks.items()})
    assert refusals == dict.fromkeys(attacks, "EPERM")


def test_clone3_and_unknown_calls_do_not_exist() -> None:
    def results() -> list[str]:
        answers = [code_of(raw("clone3", bytes(88), 88))]
        libc.syscall(10_000)
        return [*answers, errno.errorcode[ctypes.get_errno()]]

    assert behind_the_filter(results) == ["ENOSYS", "ENOSYS"]


def test_threads_forks_pairs_and_events_work() -> None:
    def ordinary() -> list[object]:
        heard: list[object] = []
        thread = threading.Thread(target=lambda: heard.append("thread"))
        thread.start()
        thread.join()
        pid = os.fork()
        if pid == 0:
            os._exit(3)
        heard.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        left, right = socket.socketpair()
        left.setblocking(True)
        left.sendall(b"pair")
        heard.append(right.recv(4).decode())
        heard.append(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda number: number + 1)(41))
        return heard

    assert behind_the_filter(ordinary) == ["thread", 3, "pair", 42]


@pytest.mark.skipif(not Path("/bin/true").exists(), reason="there is no /bin/true to run")
def test_programs_start_where_allowed() -> None:
    assert behind_the_filter(lambda: os.waitstatus_to_exitcode(os.system("/bin/true")), allow_exec=True) == 0


def test_thread_filter_allows_threads_and_no_processes(tmp_path: Path) -> None:
    file = tmp_path / "the user's file"
    file.write_text("text")
    file.chmod(0o640)
    before = file.stat()
    parent = os.getpid()

    def results() -> dict[str, object]:
        heard: list[str] = []
        thread = threading.Thread(target=lambda: heard.append("thread"))
        thread.start()
        thread.join()
        signal.signal(signal.SIGUSR1, lambda *_: heard.append("own signal"))
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        return {
            "heard": heard,
            "forks": code_of(lambda: os.fork()),
            "spawns": code_of(lambda: os.posix_spawn("/bin/true", ["true"], {})),
            "signals its parent": code_of(lambda: os.kill(parent, 0)),
            "signals everybody": code_of(lambda: os.kill(-1, 0)),
            "truncates": code_of(lambda: os.truncate(file, 0)),
            "chmods": code_of(lambda: os.chmod(file, 0)),  # noqa: PTH101 - the system call itself
            "touches": code_of(lambda: os.utime(file, (0, 0))),
        }

    assert behind_the_filter(results, kind="threads") == {
        "heard": ["thread", "own signal", "own signal"],
        **dict.fromkeys(["forks", "spawns", "signals its parent", "signals everybody", "truncates"], "EPERM"),
        **dict.fromkeys(["chmods", "touches"], "done"),
    }
    assert (file.stat().st_mode, file.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
