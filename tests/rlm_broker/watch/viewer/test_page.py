"""The page as a file: what is in it, what may run in it, and what it says of traces that are not whole."""

import base64
import json
import re
import stat
import zlib
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.watch.viewer import page as page_module
from rlm_broker.watch.viewer.page import MARK, SCRIPTS, Pieces, policy, pool, script, style, write_page
from tests.support.traces import Written, small

HOSTILE = "</script><script>document.title='taken'</script><!-- <script> \u2028\u2029 \x1b[2J \ud800 <img src=x onerror=alert(1)>"


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_page_runs_one_script_and_loads_nothing(tmp_path: Path) -> None:
    """A page has one script that runs, one style, both named by its policy, and no attribute that loads or runs anything."""
    write_page(small(HOSTILE, [HOSTILE] * 4).to(tmp_path / "run.jsonl"), tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    parser = _Elements()
    parser.feed(text)
    running = [names for tag, names in parser.found if tag == "script" and names.get("type") != "text/plain"]
    assert running == [{}]
    assert sum(tag == "style" for tag, _ in parser.found) == 1
    assert not {"link", "img", "iframe", "object", "embed", "base", "a", "form"} & {tag for tag, _ in parser.found}
    names = {name for _, attributes in parser.found for name in attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"src", "href", "style", "action"}
    for part in (f'content="{policy()}"', f"<script>{script()}</script>", f"<style>{style()}</style>"):
        assert part in text
    assert policy().startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in policy()
    assert policy("'self'").count("connect-src 'self'") == 1


def test_resources_take_no_markup() -> None:
    """No part of the script makes elements of text, evaluates text, or could end its own element."""
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\b|new Function|DOMParser|srcdoc|<!--|</script"
    folder = files("rlm_broker.watch.viewer") / "page"
    names = sorted(each.name.removesuffix(".js") for each in folder.iterdir() if each.name.endswith(".js"))
    assert names == sorted(SCRIPTS)
    for name in names:
        assert re.findall(forbidden, (folder / f"{name}.js").read_text(), re.IGNORECASE) == [], name
    assert "url(" not in style()
    assert "@import" not in style()


def test_trace_that_is_not_whole_is_shown_with_a_note(tmp_path: Path) -> None:
    """A page shows as much as can be read: of a cut trace, of one with another line in it, and of one of a later release."""
    trace = small().to(tmp_path / "run.jsonl")
    trace.write_bytes(trace.read_bytes()[:-40])
    assert write_page(trace, tmp_path / "run.html").rows == len(small().lines) - 1
    lines = {
        "no json\n": "The rest of the trace cannot be read after 2 events: ",
        '{"event": "replied"}\n': "line 3 is not an event of a run",
        '{"event": "replied", "run": "../x", "depth": 0}\n': "the event replied is of no run",
        "[" * 100_000 + "\n": "The rest of the trace cannot be read after 2 events: ",
    }
    for line, said in lines.items():
        Written()("run_started", question="?", model="m")("iteration_started", number=1).to(trace)
        with trace.open("a") as file:
            file.write(line)
        told = write_page(trace, tmp_path / "run.html")
        assert told.rows == 2
        assert said in told.notes[0]
    small()("run_dreamed", about="sheep")("run_dreamed", about="<b>").to(trace)
    assert "does not know are left out: 2 run_dreamed." in write_page(trace, tmp_path / "run.html").notes[0]


def test_page_says_what_it_has_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, out = small().to(tmp_path / "run.jsonl"), tmp_path / "run.html"
    told = write_page(trace, out)
    about = re.search(r'id="about">([^<]*)<', out.read_text())
    assert about
    assert json.loads(base64.b64decode(about[1])) == {**msgspec.to_builtins(told), "notes": []}
    assert (told.name, told.form, told.rows) == ("run.jsonl", "file", len(small().lines))
    monkeypatch.setattr(page_module, "MOST_ROWS", 5)
    told = write_page(trace, out)
    assert (told.rows, told.notes) == (5, ("The trace is larger than a page can show: it is cut after 5 events.",))


def test_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"no trace\n", b"\xff\xfe\x00", b"[1]\n", b'{"event":"x","run":"1","depth":0}\n'):
        (tmp_path / "run.jsonl").write_bytes(content)
        with pytest.raises(ConfigurationError, match="is not a trace"):
            write_page(tmp_path / "run.jsonl", tmp_path / "run.html")
        assert [each.name for each in tmp_path.iterdir()] == ["run.jsonl"]


def test_page_replaces_pages_alone(tmp_path: Path) -> None:
    """An earlier page is replaced; another file, a folder or a place that is not there is a sentence."""
    trace, out = small().to(tmp_path / "run.jsonl"), tmp_path / "run.html"
    write_page(trace, out)
    write_page(trace, out)
    assert out.read_bytes().startswith(MARK)
    out.write_text("mine")
    with pytest.raises(ConfigurationError, match="is no page of rlm-broker's"):
        write_page(trace, out)
    assert out.read_text() == "mine"
    with pytest.raises(ConfigurationError, match="it is a folder"):
        write_page(trace, tmp_path)
    with pytest.raises(ConfigurationError, match="cannot write the page"):
        write_page(trace, tmp_path / "none" / "run.html")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.html", "run.jsonl"]
    trace.chmod(0o600)  # a page is as private as its trace
    out.unlink()
    write_page(trace, out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def _unpacked(elements: bytes) -> list[bytes]:
    found = re.findall(rb'<script type="text/plain" class="texts-piece">([A-Za-z0-9+/=]*)</script>\n', elements)
    assert b"".join(b'<script type="text/plain" class="texts-piece">%s</script>\n' % each for each in found) == elements
    return [zlib.decompress(base64.b64decode(each), -zlib.MAX_WBITS) for each in found]


@pytest.mark.parametrize("in_memory", [1 << 20, 1])
def test_pieces_come_back_in_order(monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    """Pieces are what was added, in this order, in memory and beyond it in a file."""
    monkeypatch.setattr(page_module, "IN_MEMORY_BYTES", in_memory)
    wanted = [b"</script>%d" % number * number for number in range(40)]
    with pool() as threads:
        packed = Pieces("texts-piece", threads)
        for each in wanted:
            packed.add(each)
        assert _unpacked(b"".join(packed.elements())) == wanted
        assert packed.count == 40
        packed.close()
