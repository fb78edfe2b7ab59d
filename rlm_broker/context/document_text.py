"""Program that reads the text of a document: the document from stdin, the text to stdout.

`file_content` starts it as a process of its own. It imports no module of ours. Its exit code is 0, or one of
`ENCRYPTED`, `UNREADABLE` and `WITHOUT_TEXT`. Notebooks and databases need no extra that a server could leave out. So
their readers can open no file and reach no address by then.
"""

import io
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

ENCRYPTED: Final = 3
"""Exit code for a document with a password."""
UNREADABLE: Final = 4
"""Exit code for a document that the library cannot read within the bounds."""
WITHOUT_TEXT: Final = 5
"""Exit code for a document without text."""
MEMORY_BYTES: Final = 1 << 31
"""Address space of the process, in bytes; an allocation beyond it fails."""
CPU_S: Final = 60
"""CPU time of the process, in seconds; beyond it the kernel kills it."""
_BLOB_BYTES: Final = 64
"""Longest bytes in a cell that are shown; of longer ones the length is."""
_BATCH_ROWS: Final = 10_000
"""Rows of a table that are decoded at a time."""
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_RESTRICT_SELF: Final = 446
"""Numbers of system calls, which are the same on each architecture."""
_PR_SET_NO_NEW_PRIVS: Final = 38
_IN_WAL_MODE: Final = b"\2\2"
"""Versions in the header of a database that is written by a log."""


class Encrypted(Exception):
    """The document opens with a password."""


def _pdf(file: io.BytesIO) -> Iterator[str]:
    """Yield the text of each page, with a form feed between two pages."""
    from pypdf import PdfReader

    reader = PdfReader(file)
    if reader.is_encrypted and not reader.decrypt(""):
        raise Encrypted
    for number, page in enumerate(reader.pages):
        yield ("\f" if number else "") + page.extract_text() + "\n"


def _docx(file: io.BytesIO) -> Iterator[str]:
    """Yield paragraphs and tables in their order."""
    import docx

    for item in docx.Document(file).iter_inner_content():
        if hasattr(item, "rows"):
            yield from (_row(cell.text for cell in row.cells) for row in item.rows)
        else:
            yield f"{item.text}\n"


def _xlsx(file: io.BytesIO) -> Iterator[str]:
    """Yield a line for each row of each sheet, its values separated by tabs."""
    import openpyxl

    for sheet in openpyxl.load_workbook(file, read_only=True, data_only=True).worksheets:
        yield f"# {sheet.title}\n"
        for row in sheet.iter_rows(values_only=True):
            yield _row("" if value is None else str(value) for value in row)


def _pptx(file: io.BytesIO) -> Iterator[str]:
    """Yield the texts, tables and notes of each slide."""
    import pptx

    for number, slide in enumerate(pptx.Presentation(file).slides, 1):
        yield f"# Slide {number}\n"
        yield from _shapes(slide.shapes)
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            yield f"{slide.notes_slide.notes_text_frame.text}\n"


def _shapes(shapes: Iterable[Any]) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _shapes(shape.shapes)
        elif shape.has_text_frame:
            yield f"{shape.text_frame.text}\n"
        elif getattr(shape, "has_table", False):
            yield from (_row(cell.text for cell in row.cells) for row in shape.table.rows)


def _notebook(file: io.BytesIO) -> Iterator[str]:
    """Yield the cells of a notebook, with the texts of their outputs. Outputs of other kinds are named."""
    notebook = json.load(file)
    sheets = notebook.get("worksheets", [notebook])  # before version 4
    for number, cell in enumerate((cell for sheet in sheets for cell in sheet["cells"]), 1):
        yield f"# Cell {number} ({cell['cell_type']})\n"
        yield _joined(cell.get("source", cell.get("input", "")))
        for output in cell.get("outputs", ()):
            yield "# Output\n"
            yield _COLOURS.sub("", _output(output))


def _output(output: dict[str, Any]) -> str:
    if "traceback" in output:
        return _joined("\n".join(output["traceback"]))
    data = output.get("data", {})
    text = _joined(output.get("text", data.get("text/plain", "")))
    return text + "".join(f"[{kind}]\n" for kind in data if kind.partition("/")[0] in ("image", "audio", "video"))


def _joined(lines: str | list[str]) -> str:
    text = lines if isinstance(lines, str) else "".join(lines)
    return text if text.endswith("\n") or not text else f"{text}\n"


def _sqlite(file: io.BytesIO) -> Iterator[bytes]:
    """Yield a tar of the schema and of each table as CSV.

    The database is in memory, as SQLite can open no other file from there. Views are not read, and nothing in the
    schema may call functions with effects.
    """
    import sqlite3
    from contextlib import closing

    data = bytearray(file.getbuffer())
    note = ""
    if data[18:20] == _IN_WAL_MODE:  # a database in memory has no log
        data[18:20] = b"\1\1"
        note = "-- The database has a log (-wal): what stands in the log alone is not here.\n"
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(bytes(data))
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        for setting in ("trusted_schema = off", "cell_size_check = on", "query_only = on"):
            database.execute(f"PRAGMA {setting}")
        entries = database.execute("SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
        if entries:
            yield _member("schema.sql", note + "".join(f"{sql};\n" for _, _, sql in entries))
        for kind, name, sql in entries:
            if kind == "table" and not name.startswith("sqlite_") and "virtual" not in sql[:30].lower():
                quoted = name.replace('"', '""')
                rows = database.execute(f'SELECT * FROM "{quoted}"')
                columns = [column[0] for column in rows.description]
                yield _member(f"{name}.csv", "".join(_csv([columns, *rows])))


def _member(name: str, text: str) -> bytes:
    """Return a member of a tar, with its header."""
    import tarfile

    data, member = text.encode("utf-8", "replace"), tarfile.TarInfo(name)
    member.size = len(data)
    return member.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def _parquet(file: io.BytesIO) -> Iterator[str]:
    """Yield the rows as CSV, below the names of the columns."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file)
    yield from _csv([table.schema_arrow.names])
    for batch in table.iter_batches(_BATCH_ROWS):
        yield from _csv(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def _csv(rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    import csv

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_cell, row) for row in rows)
    yield text.getvalue()


def _cell(value: Any) -> Any:
    """Return a value as CSV has it: lists and dicts as JSON, short bytes in hexadecimal digits as SQL has them."""
    match value:
        case bytes():
            return f"X'{value.hex()}'" if len(value) <= _BLOB_BYTES else f"<{len(value):,} bytes>"
        case list() | dict():
            return json.dumps(value, ensure_ascii=False, default=str)
    return value


def _row(cells: Iterable[str]) -> str:
    return "\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in cells).rstrip("\t") + "\n"


_READ: Final[dict[str, Callable[[io.BytesIO], Iterator[str | bytes]]]] = {
    "pdf": _pdf,
    "docx": _docx,
    "xlsx": _xlsx,
    "pptx": _pptx,
    "ipynb": _notebook,
    "sqlite": _sqlite,
    "parquet": _parquet,
}


_BY_STANDARD_LIBRARY: Final = frozenset({"ipynb", "sqlite"})


def _confine() -> None:
    """Import what is left to import, and deny all files by Landlock. A kernel without it denies nothing."""
    import csv  # noqa: F401
    import ctypes
    import sqlite3  # noqa: F401
    import struct
    import tarfile  # noqa: F401

    libc, long = ctypes.CDLL(None, use_errno=True), ctypes.c_long
    version = libc.syscall(long(_LANDLOCK_CREATE_RULESET), None, long(0), long(1))
    if version < 1:
        return
    denied = struct.pack("=QQ", (1 << 13) - 1, 0b11)[: 16 if version >= 4 else 8]  # all about files; TCP from 4 on
    ruleset = libc.syscall(long(_LANDLOCK_CREATE_RULESET), denied, long(len(denied)), long(0))
    libc.prctl(long(_PR_SET_NO_NEW_PRIVS), long(1), long(0), long(0), long(0))
    if libc.syscall(long(_LANDLOCK_RESTRICT_SELF), long(ruleset), long(0)):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")


def main(kind: str) -> int:
    """Bound memory, CPU time and written files, write the text of the document on stdin, and return the exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # bounds files and no pipes: the text goes to a pipe
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the libraries write any number of warnings
    document = io.BytesIO(sys.stdin.buffer.read())
    output, has_text = sys.stdout.buffer, False
    try:
        if kind in _BY_STANDARD_LIBRARY:
            _confine()
        for text in _READ[kind](document):
            if isinstance(text, bytes):
                has_text = True
                output.write(text)
                continue
            has_text = has_text or (bool(text) and not text.isspace() and not text.startswith("# "))
            output.write(text.replace("\0", "").encode("utf-8", "replace"))
        output.flush()
    except Encrypted:
        return ENCRYPTED
    except BrokenPipeError:  # the orchestrator has closed its end, since the text is too long
        os._exit(UNREADABLE)
    except Exception:  # noqa: BLE001 - the libraries raise anything for a broken document
        return UNREADABLE
    return 0 if has_text else WITHOUT_TEXT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
