"""The page as one file: a template, a style and a script, with a policy that lets it load and run nothing else."""

import base64
import hashlib
import os
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import IO

import msgspec

from rlm_broker.errors import ConfigurationError
from rlm_broker.events.trace import lines
from rlm_broker.values.host_files import refusal_told, replacement
from rlm_broker.values.text import encodable
from rlm_broker.watch.viewer.rows import Row, Rows, encoded
from sandbox_worker import RELEASE

SCRIPTS = (
    *("dom", "format", "store", "model", "find"),
    *("tree", "scroller", "texts", "transcript", "items", "flame", "timeline", "totals"),
    *("runs", "keys", "main"),
)
"""Parts of the script, in the order in which they are joined."""
MARK = b"<!doctype html><!-- rlm-broker viewer -->"
"""Beginning of each page: a file with it may be replaced."""
ROWS_IN_PIECE = 2_000
MOST_ROWS = 2_000_000
MOST_TEXT_BYTES = 1 << 30
"""Bounds of a page. What a trace has beyond them is left out, and the page says so."""
PIECE_BYTES = 1 << 19
"""Bytes of a piece before compression. The page unpacks a piece in some milliseconds, within a frame."""
LEVEL = 1
"""Level of zlib: higher ones take several times as long, and save a tenth."""
MOST_WAITING = 8
"""Pieces in the queue for a thread; beyond it, adding one waits."""
IN_MEMORY_BYTES = 1 << 28
"""Bytes of finished pieces in memory; more go to a temporary file."""


class ViewerPage(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the trace of a page.

    Attributes:
        name: Name of the trace file.
        notes: Sentences about what is not shown, and why.
        release: Release that wrote the page.
        rows: Number of events.
        bytes: Bytes of all texts.
        piece_bytes: Bytes of each piece of texts, but for the last.
        form: "file", or "live" for the runs of its server.
    """

    name: str = ""
    notes: tuple[str, ...] = ()
    release: str = RELEASE
    rows: int = 0
    bytes: int = 0
    piece_bytes: int = PIECE_BYTES
    form: str = "file"


class Pieces:
    """Compresses pieces on threads, keeps them in order, and gives them back as text of base64 without markup.

    Args:
        name: Class of the elements: `rows-piece` or `texts-piece`.
    """

    def __init__(self, name: str, threads: ThreadPoolExecutor) -> None:
        self.count = 0
        self._name = name
        self._threads = threads
        self._waiting: deque[Future[bytes]] = deque()
        self._done: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115 - `close` ends it

    def add(self, data: bytes) -> None:
        """Add a piece. Compression goes on beside the caller, but for `MOST_WAITING`."""
        self.count += 1
        self._waiting.append(self._threads.submit(compressed, data))
        while len(self._waiting) > MOST_WAITING:
            self._keep()

    def elements(self) -> Iterator[bytes]:
        """Yield the pieces as elements, in bounded amounts."""
        while self._waiting:
            self._keep()
        self._done.seek(0)
        while part := self._done.read(1 << 20):
            yield part

    def close(self) -> None:
        """Forget all pieces."""
        for each in self._waiting:
            each.cancel()
        self._done.close()

    def _keep(self) -> None:
        packed = base64.b64encode(self._waiting.popleft().result())
        self._done.write(b'<script type="text/plain" class="%s">%s</script>\n' % (self._name.encode(), packed))


def compressed(data: bytes) -> bytes:
    """Return data as a raw deflate stream."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def pool() -> ThreadPoolExecutor:
    """Return threads for compression. zlib gives up the interpreter's lock, so they use other cores."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="rlm-broker-pieces")


def write_page(trace: Path, out: Path) -> ViewerPage:
    """Write a trace as a page of one file that needs no network, and return facts about the trace.

    Args:
        trace: Trace file. It may be cut off, of a later release or hostile; then it is shown as far as it goes.
        out: Path of the page. An earlier page of rlm-broker's there is replaced.

    Raises:
        ConfigurationError: The trace cannot be read or has no event, the page cannot be written, or `out` is another
            file.
    """
    rows = Rows()
    notes: list[str] = []
    with pool() as threads:
        of_rows, of_texts = Pieces("rows-piece", threads), Pieces("texts-piece", threads)
        try:
            count = _pack(trace, rows, of_rows, of_texts, notes)
            page = ViewerPage(name=encodable(trace.name), notes=tuple(notes), rows=count, bytes=rows.end)
            parts = [document_head(page), *of_rows.elements(), document_script()]
            _replace(out, trace, (part for whole in (parts, of_texts.elements(), [b"</html>\n"]) for part in whole))
        finally:
            of_rows.close()
            of_texts.close()
    return page


def _pack(trace: Path, rows: Rows, of_rows: Pieces, of_texts: Pieces, notes: list[str]) -> int:
    """Read all events into pieces, and return their number. `notes` gets what could not be read."""
    waiting: list[Row] = []
    texts = bytearray()
    count = 0
    try:
        for event in lines(trace):
            if count >= MOST_ROWS or rows.end >= MOST_TEXT_BYTES:
                notes.append(f"The trace is larger than a page can show: it is cut after {count:,} events.")
                break
            if (row := rows.take(event)) is None:
                continue
            count += 1
            waiting.append(row)
            texts += rows.fresh()
            while len(texts) >= PIECE_BYTES:
                of_texts.add(bytes(texts[:PIECE_BYTES]))
                del texts[:PIECE_BYTES]
            if len(waiting) == ROWS_IN_PIECE:
                of_rows.add(encoded(waiting))
                waiting = []
    except (ConfigurationError, ValueError, RecursionError) as error:
        if not count:
            reason = str(error) if isinstance(error, ConfigurationError) else f"{trace} is not a trace: {error}"
            raise ConfigurationError(reason) from None
        notes.append(f"The rest of the trace cannot be read after {count:,} events: {encodable(str(error))}.")
    if not count:
        raise ConfigurationError(f"{trace} is not a trace: it has no event that this release knows")
    if rows.unknown:
        kinds = ", ".join(f"{number} {encodable(kind)}" for kind, number in rows.unknown.items())
        notes.append(f"Events of kinds that release {RELEASE} does not know are left out: {kinds}.")
    of_rows.add(encoded(waiting))
    of_texts.add(bytes(texts))
    return count


def document_head(page: ViewerPage, connect: str = "") -> bytes:
    """Return the page up to its pieces.

    Args:
        connect: Source of the page's data: `'self'` for live runs, none for a file.
    """
    template = _resource("page.html")
    about = base64.b64encode(msgspec.json.encode(page)).decode()
    filled = template.replace("{policy}", policy(connect)).replace("{style}", style()).replace("{about}", about)
    return MARK + b"\n" + filled.encode()


def document_script() -> bytes:
    """Return the script element. It stands before the pieces of texts, so that the page works while they load."""
    return f"<script>{script()}</script>\n".encode()


def policy(connect: str = "") -> str:
    """Return the content security policy: nothing but the one style and the one script, known by their hashes."""
    connected = f"; connect-src {connect}" if connect else ""
    return (
        f"default-src 'none'; script-src {_hash(script())}; style-src {_hash(style())}{connected}"
        "; base-uri 'none'; form-action 'none'"
    )


@cache
def script() -> str:
    """Return the script: all parts in one function of their own, in strict mode."""
    parts = "\n".join(_resource(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


@cache
def style() -> str:
    """Return the style sheet."""
    return _resource("page.css")


def _resource(name: str) -> str:
    return (files("rlm_broker.watch.viewer") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _replace(out: Path, trace: Path, parts: Iterator[bytes]) -> None:
    """Write the page beside `out`, then move it there: a page is whole or absent. It has the mode of the trace."""
    with refusal_told(f"cannot write the page {out}", ": give another file"):
        _refuse_other_file(out)
        with replacement(out, trace.stat().st_mode & 0o666) as file:
            file.writelines(parts)


def _refuse_other_file(out: Path) -> None:
    if out.is_dir():
        raise ConfigurationError(f"cannot write the page {out}: it is a folder: give a file")
    if out.exists() and (not out.is_file() or _beginning(out) != MARK):
        raise ConfigurationError(f"{out} exists and is no page of rlm-broker's: remove it, or give another file")


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(MARK))
