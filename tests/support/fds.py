"""Descriptors that this process holds."""

from pathlib import Path


def memfds(name: str) -> int:
    """Number of memfds whose names begin so."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(fd.readlink()))
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return sum(link.startswith(f"/memfd:{name}") for link in links)
