"""Paths of this repository."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
"""The folder of `pyproject.toml`."""
SHORT = Path("/tmp")
"""A folder in which paths of sockets fit into the 107 bytes of an address, however long TMPDIR is."""
