"""`rlm-broker` as the pages of the documents call it: names of hosts lead to a fake server."""

import os
import socket
from typing import Any

FAKE_PORT = "FAKE_PORT"


def redirect(port: int) -> None:
    """Have every name of a host lead to the fake server, with any port."""
    resolve = socket.getaddrinfo

    def redirected(host: Any, asked_port: Any, *arguments: Any, **keywords: Any) -> Any:
        is_address = host is None or str(host).replace(".", "").isdecimal()
        return (
            resolve(host, asked_port, *arguments, **keywords)
            if is_address
            else resolve("127.0.0.1", port, *arguments, **keywords)
        )

    socket.getaddrinfo = redirected  # type: ignore[assignment] # takes and returns what the original does


if __name__ == "__main__":
    redirect(int(os.environ[FAKE_PORT]))
    from rlm_broker.__main__ import main

    main()
