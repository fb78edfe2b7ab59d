"""Program that reads the text of a document: the document from stdin, the text to stdout.

`documents` starts it as a process of its own. It imports no module of ours. Its exit code is 0, or one of `ENCRYPTED`,
`UNREADABLE` and `WITHOUT_TEXT`.
"""

import io
import os
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


def _row(cells: Iterable[str]) -> str:
    return "\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in cells).rstrip("\t") + "\n"


_READ: Final[dict[str, Callable[[io.BytesIO], Iterator[str]]]] = {
    "pdf": _pdf,
    "docx": _docx,
    "xlsx": _xlsx,
    "pptx": _pptx,
}


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
        for text in _READ[kind](document):
            has_text = has_text or (not text.isspace() and not text.startswith("# "))
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
