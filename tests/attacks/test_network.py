"""Attempts to reach another peer than the handler: with new sockets, and with the one that is there."""

from tests.attacks.arena import Arena, Attack, check, reached_a_listener, said_it_got_through

CONNECTION = "import os, socket, struct\nconnection = socket.socket(fileno=os.dup(4))\n"
DISCONNECTION = CONNECTION + (
    "import ctypes; c = ctypes.CDLL(None)\nresult = c.connect(connection.fileno(), struct.pack('=H14x', 0), 16)"
)

REACHES = {
    "connects": "import socket; socket.create_connection(('127.0.0.1', <TCP>), timeout=2)",
    "connects_by_name": "import socket; socket.create_connection(('localhost', <TCP>), timeout=2)",
    "connects_mapped": "import socket; s = socket.socket(socket.AF_INET6); s.connect(('::ffff:127.0.0.1', <TCP>))",
    "connects_without_waiting": (
        "import select, socket; s = socket.socket(); s.setblocking(False); s.connect_ex(('127.0.0.1', <TCP>)); select.select([], [s], [])\n"
        "assert s.getpeername()"
    ),
    "connects_with_asyncio": "import asyncio; await asyncio.open_connection('127.0.0.1', <TCP>)",
    "connects_with_urllib": (
        "import urllib.request\ntry: urllib.request.urlopen('http://127.0.0.1:<TCP>', timeout=0.3)\nexcept TimeoutError: pass"
    ),
    "sends_a_datagram": "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', <UDP>))",
    "connects_to_a_path": "import socket; socket.socket(socket.AF_UNIX).connect('<FOLDER>/socket')",
    "connects_to_an_abstract_name": "import socket; socket.socket(socket.AF_UNIX).connect('\\0<ABSTRACT>')",
    "connects_in_c": (
        "import ctypes, socket, struct; c = ctypes.CDLL(None); f = c.socket(2, 1, 0)\n"
        "c.connect(f, struct.pack('=HHI8x', 2, socket.htons(<TCP>), 0x0100007F), 16)"
    ),
    "connects_from_a_thread": (
        "import socket, threading; t = threading.Thread(target=lambda: socket.create_connection(('127.0.0.1', <TCP>), 2))\n"
        "t.start(); t.join()"
    ),
}
BY_PROGRAMS = {
    "starts_bash": "import subprocess; subprocess.run(['bash', '-c', 'echo > /dev/tcp/127.0.0.1/<TCP>'])",
    "starts_python": (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', "
        "\"import socket; socket.create_connection(('127.0.0.1', <TCP>), 2)\"])"
    ),
}
BY_THE_CONNECTION = {
    "aims_it_elsewhere": DISCONNECTION
    + "\nc.connect(connection.fileno(), struct.pack('=HHI8x', 2, socket.htons(<TCP>), 0x0100007F), 16)",
    "sends_with_an_address_and_opens_fast": DISCONNECTION
    + "\nconnection.sendto(b'x', 0x20000000, ('127.0.0.1', <TCP>))",
}
WANTS = {
    "listens_on_the_connection": CONNECTION + "connection.listen(); print('<GOT>')",
    "disconnects_the_connection": DISCONNECTION + "; assert result == 0; print('<GOT>')",
    "shuts_the_connection_down": CONNECTION + "connection.shutdown(socket.SHUT_RD); print('<GOT>')",
    "sets_an_option_of_the_connection": CONNECTION
    + "connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16); print('<GOT>')",
    "passes_a_descriptor": (
        "import array, os, socket; a, b = socket.socketpair()\n"
        "a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))]); print('<GOT>')"
    ),
    "listens": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print('<GOT>')",
    "makes_a_raw_socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('<GOT>')",
    "makes_a_packet_socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('<GOT>')",
    "asks_netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); print('<GOT>')",
    "makes_a_vsock": "import socket; socket.socket(socket.AF_VSOCK); print('<GOT>')",
    "makes_a_crypto_socket": "import socket; socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); print('<GOT>')",
    "makes_a_bluetooth_socket": "import socket; socket.socket(31, socket.SOCK_RAW, 1); print('<GOT>')",
}
NEEDS_LUCK = {
    "makes_a_raw_socket", "makes_a_packet_socket", "makes_a_vsock", "makes_a_crypto_socket", "makes_a_bluetooth_socket",
    "listens_on_the_connection", "disconnects_the_connection", "shuts_the_connection_down",
}  # fmt: skip
"""Without protection these need a right or a module of the kernel, or end the victim's own connection."""

ATTACKS = [
    *(Attack(name, code, reached_a_listener) for name, code in {**REACHES, **BY_PROGRAMS}.items()),
    *(Attack(name, code, reached_a_listener, shown=False) for name, code in BY_THE_CONNECTION.items()),
    *(Attack(name, code, said_it_got_through, shown=name not in NEEDS_LUCK) for name, code in WANTS.items()),
]


def test_network_reaches_only_the_handler(arena: Arena) -> None:
    check(arena, ATTACKS)
