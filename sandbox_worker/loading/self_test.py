"""Self-test of mapped strings: makes some in a child process, and uses them in every way that CPython distinguishes.

`strings` depends on the layout of `str`, which CPython does not document. If the layout differs, the test fails or the
child crashes, and contexts are copied instead.
"""

import fcntl
import io
import json
import os
import re
import sys
from array import array
from collections.abc import Iterator

import msgspec

from sandbox_worker.loading.context import load
from sandbox_worker.loading.form import SEALS, ContextForm, span_bytes
from sandbox_worker.loading.strings import CODECS, SAMPLES, models_are_known

_LENGTHS = (0, 1, 7, 8, 100, 5000)


def mapping_works() -> bool:
    """Whether this interpreter works with mapped texts.

    A forked child runs the test: its crash would do no harm, and its mappings, which are never unmapped, end with it.
    Call this in a process with one thread, before isolation. It needs `memfd_create`, and a SIGCHLD that is not
    ignored, since an ignored one would take the child's status away from `waitpid`.
    """
    child = os.fork()
    if not child:
        works = False
        try:
            works = models_are_known() and _survive_mapping(dict(_known_texts()))
        finally:
            os._exit(0 if works else 1)  # no `finally` or `atexit` of the parent may run a second time
    # Read the models here as well. They are cached, so that workers inherit them and need not read them again.
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and models_are_known()


def _known_texts() -> Iterator[tuple[str, str]]:
    """Yield names and texts of every kind and of lengths around the sizes of words and pages."""
    for length in _LENGTHS:
        for sample in SAMPLES.values():
            text = (sample + " needle,\n" * (length // 9 + 1))[:length]
            yield f"{length} times {sample}", text


def _survive_mapping(texts: dict[str, str]) -> bool:
    same = load(*_stored(texts), mapping_works=True)
    return (
        same == texts
        and list(same) == list(texts)
        and all(_is_like(same[name], text) for name, text in texts.items())
        and "".join(same.values()) == "".join(texts.values())
        and msgspec.json.encode(same) == msgspec.json.encode(texts)
        and json.dumps(same) == json.dumps(texts)
    )


def _stored(texts: dict[str, str]) -> tuple[int, ContextForm]:
    fd = os.memfd_create("self-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    data = b""
    kinds = [_kind_of(text) for text in texts.values()]
    for text, kind in zip(texts.values(), kinds, strict=True):
        data += text.encode(CODECS[kind]).ljust(span_bytes(len(text), kind), b"\0")
    names = msgspec.json.encode(list(texts))
    with open(fd, "wb", closefd=False) as file:
        file.write(data + array("Q", map(len, texts.values())).tobytes() + bytes(kinds) + names)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd, ContextForm("texts", len(data), texts=len(texts), names_bytes=len(names))


def _kind_of(text: str) -> int:
    widest = max(text, default="")
    return 0 if text.isascii() else 1 if widest <= "\xff" else 2 if widest <= "\uffff" else 4


def _is_like(same: str, text: str) -> bool:
    file = io.StringIO()
    file.write(same)
    return (
        type(same) is str
        and same == text
        and not same < text
        and hash(same) == hash(text)
        and {text: 1}[same] == 1
        and {same: 1}[text] == 1
        and len(same) == len(text)
        and (same or "empty") == (text or "empty")
        and str(same) is same
        and same.isascii() == text.isascii()
        and same.encode() == text.encode()
        and same.encode() == text.encode()  # again: CPython may have cached the UTF-8 form in the header
        and same[1:] == text[1:]
        and same[-3:] == text[-3:]
        and same + "x" == text + "x"
        and ("needle" in same) == ("needle" in text)
        and [found.span() for found in re.finditer("needle|$", same)]
        == [found.span() for found in re.finditer("needle|$", text)]
        and same.split() == text.split()
        and same.upper() == text.upper()
        and same.replace("n", "m") == text.replace("n", "m")
        and f"{same}!" == f"{text}!"
        and f"{same:>9}" == f"{text:>9}"
        and list(same[:40]) == list(text[:40])
        and file.getvalue() == text
        and sys.getsizeof(same) >= len(text)
        and sys.intern(same) == text
    )
