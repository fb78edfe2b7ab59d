"""Memfds as the host writes them, made by hand."""

import fcntl
import os
import subprocess
import sys

import msgspec

from sandbox_worker.loading.form import SEALS, ContextForm, Kind
from tests.support.places import PROJECT

ALONE = """
import fcntl, gc, json, os, resource, sys
from sandbox_worker.loading.context import ContextBroken, load
from sandbox_worker.loading.form import SEALS, ContextForm, span_bytes
from sandbox_worker.loading.self_test import mapping_works

def anonymous_kb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

assert mapping_works()
"""
CODECS: dict[Kind, str] = {0: "ascii", 1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}


def memfd(data: bytes, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    assert os.write(fd, data) == len(data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def kind_of(text: str) -> Kind:
    widest = max(map(ord, text), default=0)
    return 0 if widest < 0x80 else 1 if widest < 0x100 else 2 if widest < 0x10000 else 4


def characters_of(texts: list[str]) -> bytes:
    """One after the other, each with a zero, and up to eight bytes."""
    data = b""
    for text in texts:
        width = kind_of(text) or 1
        data += b"".join(ord(character).to_bytes(width, "little") for character in text) + bytes(width)
        data += bytes(-len(data) % 8)
    return data


def texts_with(names: bytes, texts: list[str], lengths: list[int], kinds: list[int]) -> tuple[int, ContextForm]:
    """Texts with whatever is said of them."""
    data = characters_of(texts)
    columns = b"".join(length.to_bytes(8, "little") for length in lengths) + bytes(kinds)
    form = ContextForm("texts", len(data), texts=len(lengths), names_bytes=len(names))
    return memfd(data + columns + names), form


def texts_in_memfd(names: list[str] | None, texts: list[str]) -> tuple[int, ContextForm]:
    return texts_with(msgspec.json.encode(names), texts, [*map(len, texts)], [*map(kind_of, texts)])


def said_alone(code: str, *arguments: str) -> str:
    """Run code that loads contexts in a process of its own, with what `ALONE` imports. Return what it prints."""
    command = [sys.executable, "-c", ALONE + code, *arguments]
    run = subprocess.run(command, env={"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout
