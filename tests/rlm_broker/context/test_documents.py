"""PDF and office files as text, read by a process that has bounds. Without the libraries an error says so."""

import importlib.util
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.context import archives, document_text, file_content
from rlm_broker.context.store import Encoded, store
from tests.support.contexts import found_in, refused, value_of, written


def pdf(*pages: str) -> bytes:
    """Return a PDF that has a line on each page."""
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(len(pages)))
    objects = ["<</Type/Catalog/Pages 2 0 R>>", f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>"]
    for number, text in enumerate(pages):
        font = "<</Font<</F<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>"
        stream = f"BT /F 12 Tf 72 700 Td ({text}) Tj ET"
        objects.append(
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Resources{font}/Contents {4 + 2 * number} 0 R>>"
        )
        objects.append(f"<</Length {len(stream)}>>stream\n{stream}\nendstream")
    data, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj{each}endobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    start = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    return data + f"{start}trailer<</Size {len(objects) + 1}/Root 1 0 R>>\nstartxref\n{len(data)}\n%%EOF".encode()


def saved(document: Any) -> bytes:
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def docx() -> bytes:
    document = pytest.importorskip("docx").Document()
    document.add_paragraph("before \u017c")
    table = document.add_table(1, 2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "left", "right\ttab"
    document.add_paragraph("after")
    return saved(document)


def xlsx() -> bytes:
    book = pytest.importorskip("openpyxl").Workbook()
    book.active.title = "Prices"
    book.active.append(["lens", 40, None, 1.5])
    book.create_sheet("Empty")
    return saved(book)


def pptx() -> bytes:
    presentation = pytest.importorskip("pptx").Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text = "Title"
    slide.placeholders[1].text = "Body"
    slide.notes_slide.notes_text_frame.text = "Notes"
    return saved(presentation)


pytestmark = pytest.mark.skipif(importlib.util.find_spec("pypdf") is None, reason="of the extra documents")


def test_pdf_is_the_text_of_its_pages(tmp_path: Path) -> None:
    data = pdf("first page", "second page")
    path = written(tmp_path / "a.pdf", data)
    for value in (path, written(tmp_path / "no_ending", data), io.BytesIO(data), Encoded(path, "cp1251", "strict")):
        assert value_of(value) == "first page\n\fsecond page\n"


def test_office_file_is_its_text(tmp_path: Path) -> None:
    expected = {"a.zip/plain.pdf": "in a zip\n"}
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("plain.pdf", pdf("in a zip"))
        for name, make, text in (
            ("a.docx", docx, "before \u017c\nleft\tright tab\nafter\n"),
            ("a.XLSX", xlsx, "# Prices\nlens\t40\t\t1.5\n# Empty\n"),
            ("a.pptx", pptx, "# Slide 1\nTitle\nBody\nNotes\n"),
        ):
            data = make()
            assert value_of(written(tmp_path / "in" / name, data)) == text
            archive.writestr(f"deep/{name}", data)
            expected |= {f"a.zip/deep/{name}": text, f"in/{name}": text}
    assert value_of(tmp_path) == expected


def test_document_that_cannot_be_read_is_refused_and_counted(tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    writer, encrypted = pypdf.PdfWriter(io.BytesIO(pdf("secret"))), io.BytesIO()
    writer.encrypt("password", algorithm="RC4-128")
    writer.write(encrypted)
    for name, data, why in (
        ("cut.pdf", b"%PDF-1.4\n1 0 obj<</Type", "it is damaged, or takes more than 2,147,483,648 bytes of memory"),
        ("scan.pdf", pdf(""), r"there is no text in it \(pictures of text are not read\)"),
        ("other.docx", xlsx(), "it is damaged"),
        ("closed.pdf", encrypted.getvalue(), "it opens with a password"),
    ):
        refused(written(tmp_path / name, data), f"{name} cannot be read as {name[-4:].strip('.')}: {why}")
    written(tmp_path / "good", "text")
    assert found_in(tmp_path) == ({"good": "text"}, {"a document that cannot be read": 4})


def test_missing_library_is_named_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.pdf", pdf("text"))
    written(tmp_path / "good", "text")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    refused(path, r"a.pdf is a pdf document: pip install 'rlm-broker\[documents\]'")
    with store(tmp_path) as stored:
        assert stored.info.skipped == {"PDF or office file, which needs rlm-broker[documents]": 1}


def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Path:
    """Have documents be read by other code, which begins as ours does."""
    program = written(tmp_path / "program.py", f"import os, sys, time\n{code}")
    monkeypatch.setattr(document_text, "__file__", str(program))
    return written(tmp_path / "a.pdf", pdf("text"))


def test_reader_without_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = running(
        tmp_path, monkeypatch, "os.write(1, b'begin'); os.write(1, str(os.getpid()).encode()); time.sleep(9e9)"
    )
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def recorded(*given: Any, **named: Any) -> Any:
        started.append(popen(*given, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    monkeypatch.setattr(file_content, "TIMEOUT_S", 0.5)
    refused(path, r"a\.pdf cannot be read: it took more than")
    assert started[0].returncode == -9


def test_reader_that_is_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader ends if its text is unwanted."""
    refused(running(tmp_path, monkeypatch, "os.kill(os.getpid(), 11)"), "or crashed the process that reads it")
    path = running(tmp_path, monkeypatch, "os.write(1, b'\\0')\nwhile True: os.write(1, b'x' * 65536)")
    refused(path, r"a\.pdf is binary")
    monkeypatch.setattr(sys, "executable", os.devnull)
    refused(path, r"a\.pdf cannot be read: its process did not start")


def test_reader_has_bounds_and_nothing_of_ours(tmp_path: Path) -> None:
    """Runs the program itself with a document that looks around: code in a document is not run, so a library does."""
    library = written(
        tmp_path / "pypdf.py",
        """
import os, resource, sys
class PdfReader:
    is_encrypted = False
    def __init__(self, file):
        limits = [resource.getrlimit(each)[1] for each in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)]
        print("noise", file=sys.stderr)
        self.pages = [type("Page", (), {"extract_text": lambda self: f"{limits} {sorted(os.environ)}"})()]
""",
    )
    program = (
        f"import sys; sys.path.insert(0, {str(library.parent)!r}); sys.argv = ['', 'pdf']; import runpy; "
        f"runpy.run_path({document_text.__file__!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], input=b"%PDF", env={"LANG": "C.UTF-8"}, capture_output=True, check=True
    )
    said = f"[{document_text.MEMORY_BYTES}, {document_text.CPU_S}, 0] ['LANG']\n"
    assert (done.stdout.decode().replace(", 'LC_CTYPE'", ""), done.stderr) == (said, b"")


def test_document_that_takes_too_much_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = Path(document_text.__file__).read_text().replace("1 << 31", "1 << 25")
    program = written(tmp_path / "program.py", code)
    monkeypatch.setattr(document_text, "__file__", str(program))
    refused(written(tmp_path / "a.pdf", pdf("text")), "cannot be read as pdf")


def test_document_and_its_text_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = pytest.importorskip("openpyxl").Workbook()
    for _ in range(200):
        book.active.append(["y" * 30_000])  # kept once in the file
    path = written(tmp_path / "a.xlsx", saved(book))
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(file_content, "MAX_TEXT_BYTES", 1_000_000)
    refused(path, r"a\.xlsx has more than 1,000,000 bytes of text: hand in what")
    written(tmp_path / "good", "text")
    assert found_in(tmp_path) == ({"good": "text"}, {"a document that is too large": 1})
    monkeypatch.setattr(file_content, "MAX_DOCUMENT_BYTES", 100)
    refused(written(tmp_path / "a.pdf", pdf("text")), r"a\.pdf is a document of more than 100 bytes: hand in its text")


def test_document_texts_count_as_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        written(tmp_path / f"{number}.pdf", pdf("x" * 400))
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 1_000)
    refused(tmp_path, r"2\.pdf: the compressed files and documents of a context may be 1,000")
