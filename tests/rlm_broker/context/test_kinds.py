"""Notebooks, databases, Parquet files, pages of HTML and pictures as parts of a context."""

import gzip
import importlib.util
import io
import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import pytest

from rlm_broker.context import document_text, file_content
from rlm_broker.context.html_text import PageText, is_page
from rlm_broker.context.store import Encoded, store
from rlm_broker.context.text import TextDecoding
from tests.support.contexts import found_in, refused, value_of, written
from tests.support.tables import table

PAGE = b"""\xef\xbb\xbf<!-- saved --><!DOCTYPE html>
<html><head><title>Terms &amp; prices</title><style>a{b:c}</style><script>if (a<b) x("</p><b>no</b>")</script></head>
<body><!-- no <b>comment</b> --><h2>Head</h2><p>One <b>two</b>,
<a href="https://x.org/?a=1&amp;b=2">a link</a> and 3 < 4 &lt; 5</p><ul><li>first<li><a href='#x'>second</a></ul>
<table><tr><th>a<th>b</tr><tr><td>1<td>2</tr></table><pre>
  keep   this
</pre><img alt="a cat" src="data:image/png;base64,AA=="><p title="x > y">end<br/>of it</body></html>"""
TEXT = """Terms & prices
## Head
One two, a link <https://x.org/?a=1&b=2> and 3 < 4 < 5
- first
- second
a\tb
1\t2

  keep   this
a cat
end
of it
"""
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def page_text(page: bytes, piece_bytes: int = 1 << 14) -> str:
    pieces = [page[start : start + piece_bytes] for start in range(0, len(page), piece_bytes)]
    return "".join(str(piece) for piece in PageText(pieces, "a page", TextDecoding()))


@table("piece_bytes", [1, 7, 1 << 14])
def test_page_is_what_its_reader_sees(piece_bytes: int) -> None:
    assert page_text(PAGE, piece_bytes) == TEXT


def test_page_is_read_by_its_own_encoding_and_other_markup_stays(tmp_path: Path) -> None:
    stated = "<html><meta charset='windows-1251'><p>\u043f\u0440\u0438\u0432\u0435\u0442".encode("cp1251")
    written(tmp_path / "a.HTM", stated)
    written(tmp_path / "part.html", "<p>{{ a }}</p>")
    written(tmp_path / "page.txt", "<html><p>a")
    value, skipped = found_in(tmp_path)
    assert value == {
        "a.HTM": "\u043f\u0440\u0438\u0432\u0435\u0442\n",
        "part.html": "<p>{{ a }}</p>",
        "page.txt": "<html><p>a",
    }
    assert not skipped
    assert "\ufffd" not in value_of(Encoded(tmp_path / "a.HTM", "latin-1"))
    assert not is_page(b"<htmlx>", "a.html")


@table(
    "unit",
    [
        b"<a ",
        b"<!--",
        b"<script></script",
        b'<a href="',
        b"<a href='",
        b"&",
        b"<",
        b"</",
        b"<a =",
        b"<pre>",
        b"<p x=\"'",
    ],
)
def test_hostile_page_takes_time_by_its_length(unit: bytes) -> None:
    """Takes minutes, and so its timeout, if the time grows with the square of the length."""
    for before in (b"", b"<script>", b"<a "):
        assert len(page_text(before + unit * (200_000 // len(unit)))) <= 200_010


def test_notebook_is_its_cells_and_the_text_of_their_outputs(tmp_path: Path) -> None:
    outputs = [
        {"output_type": "stream", "text": ["hi\n", "there"]},
        {"output_type": "display_data", "data": {"text/plain": "<Figure>", "image/png": "iVBO", "text/html": "<b>"}},
        {"output_type": "error", "traceback": ["\x1b[31mZeroDivisionError\x1b[0m", "line 1"]},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {"cell_type": "code", "source": "1 / 0", "outputs": outputs},
    ]
    text = (
        "# Cell 1 (markdown)\n# Title\nwords\n# Cell 2 (code)\n1 / 0\n# Output\nhi\nthere\n# Output\n<Figure>\n"
        "[image/png]\n# Output\nZeroDivisionError\nline 1\n"
    )
    path = written(tmp_path / "a.ipynb", json.dumps({"cells": cells, "nbformat": 4}))
    assert value_of(path) == text
    older = {"worksheets": [{"cells": [{"cell_type": "code", "input": "2", "outputs": []}]}], "nbformat": 3}
    written(tmp_path / "old.ipynb", json.dumps(older))
    written(tmp_path / "broken.ipynb", '{"cells": [')
    written(tmp_path / "deep.ipynb", '{"cells": ' + "[" * 100_000)
    written(tmp_path / "empty.ipynb", '{"cells": []}')
    with store(tmp_path) as stored:
        assert stored.value() == {"a.ipynb": text, "old.ipynb": "# Cell 1 (code)\n2\n"}
        assert stored.info.kinds == {"ipynb": 2}
        assert stored.info.skipped == {"a document that cannot be read": 3}


def database(path: Path, script: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
        connection.commit()
    return path


def test_database_is_its_schema_and_its_tables(tmp_path: Path) -> None:
    path = database(
        tmp_path / "shop.db",
        """PRAGMA journal_mode = wal;
        CREATE TABLE prices(name TEXT, price REAL, picture BLOB);
        INSERT INTO prices VALUES('a "lens",', 1.5, x'0102'), (NULL, 2, zeroblob(100));
        CREATE TABLE "odd""name"(k PRIMARY KEY) WITHOUT ROWID;
        CREATE VIEW expensive AS SELECT * FROM prices WHERE price > 1;""",
    )
    value = value_of(path)
    assert value["prices.csv"] == 'name,price,picture\n"a ""lens"",",1.5,X\'0102\'\n,2.0,<100 bytes>\n'
    assert value['odd"name.csv'] == "k\n"
    assert list(value) == ["schema.sql", "prices.csv", 'odd"name.csv']
    assert "CREATE VIEW expensive" in value["schema.sql"]
    assert value["schema.sql"].startswith("-- The database has a log")
    written(tmp_path / "shop.db.gz", gzip.compress(path.read_bytes()))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(path, "in.db")
        archive.writestr("a.txt", "text")
    found, skipped = found_in(tmp_path)
    assert found["shop.db/prices.csv"] == found["shop.db.gz/prices.csv"] == value["prices.csv"]
    assert skipped == {"a database inside something else": 1}
    refused(io.BytesIO(path.read_bytes()), "is a database, which can be read only from a file of its own")


def test_hostile_database_reads_no_file_and_ends(tmp_path: Path) -> None:
    secret = written(tmp_path / "secret.csv", "a secret")
    path = database(
        tmp_path / "a.db",
        f"""CREATE TABLE good(a);
        CREATE TABLE made(a, b GENERATED ALWAYS AS (a || 'x'));
        INSERT INTO made(a) VALUES('m');
        CREATE VIEW endless AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT * FROM n;
        CREATE VIEW file AS SELECT readfile('{secret}');
        PRAGMA writable_schema = on;
        INSERT INTO sqlite_schema VALUES('table', 'evil', 'evil', 0, 'CREATE VIRTUAL TABLE evil USING csv("{secret}")');
        """,
    )
    value = value_of(path)
    assert value["made.csv"] == "a,b\nm,mx\n"
    assert "a secret" not in str(value)
    for damaged in (path.read_bytes()[:5_000], path.read_bytes()[:100] + os.urandom(20_000)):
        refused(written(tmp_path / "damaged.db", damaged), "cannot be read as sqlite")
    refused(database(tmp_path / "empty.db", "PRAGMA user_version = 1"), "there is no text in it")


def test_parquet_file_without_its_library_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.parquet", b"PAR1....PAR1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    refused(path, r"pip install 'rlm-broker\[parquet\]', or give it as a table, pandas.read_parquet\(...\)")
    written(tmp_path / "good", "text")
    assert found_in(tmp_path)[1] == {"Parquet file, which needs rlm-broker[parquet]": 1}


def test_parquet_file_is_its_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "a": [1, None],
        "b": ['"x",', "\n"],
        "c": [[1, 2], None],
        "d": [{"k": "\u017c"}, None],
        "e": [b"\1", None],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", compression="zstd")
    expected = 'a,b,c,d,e\n1,"""x"",","[1, 2]","{""k"": ""\u017c""}",X\'01\'\n,"\n",,,\n'
    assert value_of(tmp_path / "a.parquet") == expected
    refused(written(tmp_path / "b.parquet", b"PAR1" + bytes(100) + b"PAR1"), "cannot be read as parquet")


def test_reader_of_databases_and_notebooks_can_open_no_file(tmp_path: Path) -> None:
    """Runs the program with a parser that looks around, as one would that a document has taken over."""
    secret = written(tmp_path / "secret", "a secret")
    looks = (
        "import socket\n"
        "def tried(call, *given):\n"
        "    try: return str(call(*given).read())\n"
        "    except OSError as error: return type(error).__name__\n"
        f"program['_READ'][kind] = lambda file: iter([tried(open, {str(secret)!r}), tried(open, '/etc/passwd'),"
        " tried(socket.create_connection, ('127.0.0.1', 9))])\n"
    )
    for kind in ("sqlite", "ipynb"):
        code = f"import runpy, sys\nprogram = runpy.run_path({document_text.__file__!r})\nkind = {kind!r}\n{looks}"
        done = subprocess.run(
            [sys.executable, "-I", "-c", f"{code}sys.exit(program['main'](kind))"],
            input=b"",
            capture_output=True,
            check=True,
        )
        assert done.stdout.decode().replace("ConnectionRefusedError", "PermissionError") == "PermissionError" * 3


def test_picture_is_an_address_for_a_model_that_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.bin", PNG)
    assert value_of(path) == value_of(io.BytesIO(PNG)) == "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg=="
    written(tmp_path / "b", b"\xff\xd8\xff\xe0" + bytes(1_000_000))
    written(tmp_path / "c.txt", "text")
    monkeypatch.setattr(file_content, "MAX_PICTURE_BYTES", 100)
    with store(tmp_path) as stored:
        assert sorted(stored.value()) == ["a.bin", "c.txt"]
        assert stored.info.kinds == {"picture": 1}
        assert stored.info.skipped_names == {"a picture, beyond the bytes for pictures": ("b",)}
    refused(tmp_path / "b", "b is beyond the 100 bytes that all pictures of a context may have")
