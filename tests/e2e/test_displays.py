"""Objects that code shows beside its text arrive as displays of its block: from matplotlib, PIL, pandas and own objects."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_broker import Block, BlockEnded, Display, Event, Limits, Sandbox, ScriptedClient, TraceWriter
from rlm_broker.sandbox.repl import SandboxedRepl
from sandbox_worker.wire.messages import MAX_DISPLAY_BYTES, MAX_DISPLAYS, MAX_DISPLAYS_BYTES
from tests.e2e.conftest import MakeRLM
from tests.support.tables import table
from tests.support.waiting import WAIT_S, within_longer

MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
RICH = "class Rich:\n    def __repr__(self): return 'Rich()'\n    "
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(interrupt_grace_s=WAIT_S), warm=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def drawing(sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    """A REPL that has drawn before: the first time takes a second."""
    if not all(map(importlib.util.find_spec, ("matplotlib", "PIL"))):
        pytest.skip("needs matplotlib and pillow")
    with sandbox.repl() as repl:
        block = repl.execute("import io\nimport matplotlib\nimport matplotlib.pyplot as plt\nfrom PIL import Image")
        assert (block.status, block.stdout, block.stderr, block.displays) == ("ok", "", "", ())
        yield repl


@pytest.fixture
def repl(sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with sandbox.repl() as opened:
        yield opened


def types(block: Block) -> list[list[str]]:
    assert (block.status, block.error, block.stderr) == ("ok", None, "")
    return [sorted(display.data) for display in block.displays]


def png(display: Display) -> bytes:
    data = display.data["image/png"]
    assert isinstance(data, bytes)
    assert data.startswith(PNG)
    return data


# -- matplotlib ----------------------------------------------------------------------------------------------------


@MATPLOTLIB
def test_first_figure_is_shown_without_text() -> None:
    code = (
        "import matplotlib.pyplot as plt\nimport sys\nplt.plot([1, 2])\nplt.show()\nassert 'tkinter' not in sys.modules"
    )
    with Sandbox(isolation="standard", warm=0) as opened, opened.repl() as repl:
        block = repl.execute(code)
    assert types(block) == [["image/png"]]
    assert block.stdout == ""
    png(block.displays[0])


ONCE = {
    "show": "plt.plot([1]); plt.show()",
    "left open": "plt.plot([1]); None",
    "show of the figure": "fig, ax = plt.subplots(); fig.show()",
    "shown in three ways": "fig, ax = plt.subplots(); fig.show(); plt.savefig('x.png'); plt.show(); fig.savefig('y.png')",
    "saved and shown": "plt.plot([1]); plt.savefig('x.png'); plt.show()",
    "saved and closed": "fig = plt.figure(); fig.savefig('x.png'); plt.close(fig)",
    "saved under a name without an ending": "fig = plt.figure(); fig.savefig('name'); plt.close(fig)",
    "saved by a path": "from pathlib import Path; fig = plt.figure(); fig.savefig(Path('p.png')); plt.close()",
    "saved into memory": "plt.figure(); plt.savefig(o := io.BytesIO()); plt.close(); assert o.tell() == len(o.getvalue())",
    "saved as PDF and left open": "plt.figure(); plt.savefig('x.pdf')",
    "with a backend of one's own": "matplotlib.use('svg'); plt.plot([1]); plt.show(); matplotlib.use('agg')",
    "its own value": "fig = plt.figure(); fig.show(); plt.close(); _ = fig\nNone",
}


@table("way", ONCE)
def test_figure_is_shown_once(drawing: SandboxedRepl, way: str) -> None:
    assert types(drawing.execute(ONCE[way])) == [["image/png"]]
    assert drawing.execute("plt.get_fignums()").stdout == "[]\n"


def test_figure_is_shown_again_when_changed(drawing: SandboxedRepl) -> None:
    block = drawing.execute("fig, ax = plt.subplots(); fig.show(); ax.set_title('x'); plt.show()")
    assert types(block) == [["image/png"]] * 2
    assert png(block.displays[0]) != png(block.displays[1])
    again = drawing.execute("fig")
    assert types(again) == [["image/png", "text/plain"]]
    assert again.stdout == "<Figure size 640x480 with 1 Axes>\n"
    assert again.displays[0].data["text/plain"] == again.stdout.strip()
    assert png(again.displays[0]) == png(block.displays[1])


def test_figures_come_in_order(drawing: SandboxedRepl) -> None:
    block = drawing.execute("for n in (1, 2, 3): plt.figure(figsize=(n, n))\nplt.show()")
    sizes = [int.from_bytes(png(each)[16:20]) for each in block.displays]
    assert len(sizes) == 3
    assert sizes == sorted(set(sizes))


def test_saved_figure_is_the_one_shown(drawing: SandboxedRepl) -> None:
    block = drawing.execute("plt.plot([1]); plt.savefig('saved.png', dpi=30); plt.close()")
    assert png(block.displays[0]) == drawing.files.read("saved.png")
    assert types(drawing.execute("plt.figure(); plt.savefig('saved.svg'); plt.close()")) == [["image/svg+xml"]]
    assert types(drawing.execute("plt.figure(); plt.savefig('saved.jpg'); plt.close()")) == [["image/jpeg"]]


def test_figure_that_fails_is_an_error(drawing: SandboxedRepl) -> None:
    """A figure that cannot be drawn is an error of `show`, and a note if it was left open."""
    shown = drawing.execute(r"plt.title('$\\frac{$'); plt.show()")
    assert (shown.status, shown.displays) == ("error", ())
    drawing.execute("plt.close('all')")
    left = drawing.execute(r"plt.title('$\\frac{$'); None")
    assert (left.status, left.displays) == ("ok", ())
    assert left.stderr.startswith("a figure that was left open cannot be drawn: ValueError")
    assert drawing.execute("plt.get_fignums()").stdout == "[]\n"


def test_figures_of_a_block_that_raises_are_shown(drawing: SandboxedRepl) -> None:
    block = drawing.execute("plt.plot([1]); 1 / 0")
    assert block.error == "ZeroDivisionError: division by zero"
    assert len(block.displays) == 1


def test_font_list_note_is_left_out(drawing: SandboxedRepl) -> None:
    note = "Matplotlib is building the font cache; this may take a moment."
    block = drawing.execute(
        f"import logging\nfor said in ({note!r}, 'other'): matplotlib.font_manager._log.warning(said)"
    )
    assert block.stderr == "other\n"


@MATPLOTLIB
def test_matplotlib_backend_is_chosen_by_variable(sandbox: Sandbox) -> None:
    with sandbox.repl(env={"MPLBACKEND": "pdf"}) as repl:
        block = repl.execute("import matplotlib.pyplot as plt; plt.plot([1]); plt.show(); plt.get_backend()")
    assert (types(block), block.stdout) == ([["image/png"]], "'pdf'\n")


@MATPLOTLIB
def test_template_with_matplotlib_shows_figures(sandbox: Sandbox) -> None:
    with sandbox.template(imports=["matplotlib.pyplot"]) as template, template.repl() as repl:
        code = "import matplotlib.pyplot as plt; plt.plot([1]); plt.show()"
        assert types(repl.execute(code)) == [["image/png"]]


def test_figures_past_the_bound_are_counted(drawing: SandboxedRepl) -> None:
    more = "Image.new('L', (9, 9)).show(); figs = [plt.figure() for _ in range(3)]; display(figs[0]); figs[1].show()"
    block = drawing.execute(f"for _ in range({MAX_DISPLAYS}): Image.new('L', (9, 9)).show()\n{more}\nNone")
    assert (len(block.displays), block.displays_omitted) == (MAX_DISPLAYS, 4)


# -- PIL, pandas, own objects --------------------------------------------------------------------------------------


@table("mode", ["RGB", "RGBA", "L", "1", "P", "F", "CMYK", "HSV"])
def test_pil_image_is_shown_in_each_mode(drawing: SandboxedRepl, mode: str) -> None:
    block = drawing.execute(f"Image.new({mode!r}, (30, 20)).show('title')")
    assert types(block) == [["image/png"]]
    assert repr(block.displays[0]).startswith("Display(image/png, 30 x 20, ")
    assert block.stdout == ""


def test_large_pil_image_is_sent_as_jpeg(drawing: SandboxedRepl) -> None:
    block = drawing.execute("import os; Image.frombytes('RGB', (1300, 1000), os.urandom(3_900_000))")
    assert types(block) == [["image/jpeg", "text/plain"]]


def test_pandas_table_has_html_and_text(repl: SandboxedRepl) -> None:
    block = repl.execute("import pandas\ntable = pandas.DataFrame({'a': [1, 2]})\ntable")
    assert types(block) == [["text/html", "text/plain"]]
    assert block.stdout == "   a\n0  1\n1  2\n"
    assert "<table" in str(block.displays[0].data["text/html"])


async def test_displays_are_told_as_they_come(repl: SandboxedRepl) -> None:
    """The block goes on once its first display has been told."""
    told: list[Display] = []
    came = asyncio.Event()
    loop = asyncio.get_running_loop()

    def shown(display: Display) -> None:
        told.append(display)
        loop.call_soon_threadsafe(came.set)

    code = "import os, time\ndisplay(Rich())\nwhile not os.path.exists('seen'): time.sleep(0.01)\ndisplay(Rich())"
    await repl.aexecute(f"{RICH}def _repr_html_(self): return '<b>'")
    task = asyncio.create_task(repl.aexecute(code, timeout_s=WAIT_S, on_display=shown))
    await asyncio.wait_for(came.wait(), WAIT_S)
    await repl.files.awrite("seen", b"")
    block = await task
    assert block.status == "ok"
    assert [display.data["text/html"] for display in told] == ["<b>", "<b>"]
    assert tuple(told) == block.displays


def test_display_prints_like_the_last_expression(repl: SandboxedRepl) -> None:
    repl.execute(f"{RICH}def _repr_html_(self): return '<b>'")
    last = repl.execute("Rich()")
    block = repl.execute("display(Rich(), 'text', 5)")
    assert types(block) == types(last) == [["text/html", "text/plain"]]
    assert (last.stdout, block.stdout) == ("Rich()\n", "Rich()\n'text'\n5\n")
    assert repl.execute("display = 5\ndisplay").stdout == "5\n"  # a builtin, which code may hide


def test_tool_may_be_named_display(rlm: MakeRLM) -> None:
    script = ScriptedClient(["```repl\nFINAL(display('x'))\n```"])
    completion = rlm(script, tools={"display": lambda text: f"tool {text}"}).completion("c", "q")
    assert completion.response == "tool x"


def test_block_that_shows_nothing_has_no_displays(repl: SandboxedRepl) -> None:
    for code in ("1", "'text'", "{'a': [1]}", "print", "object", "type('X', (), {})()"):
        block = repl.execute(code)
        assert (block.status, block.displays, block.displays_omitted) == ("ok", (), 0)


METHODS = {
    "def _repr_svg_(self): return '<svg/>'": ["image/svg+xml"],
    "def _repr_markdown_(self): return '*x*'": ["text/markdown"],
    "def _repr_latex_(self): return '$x$', {'meta': 1}": ["text/latex"],
    "def _repr_png_(self): return b'png'": ["image/png"],
    "def _repr_png_(self): return 'cG5n'": ["image/png"],
    "_repr_jpeg_ = lambda self: b'jpeg'": ["image/jpeg"],
    "def _repr_mimebundle_(self, include, exclude): return {'text/html': 'x', 'text/x-own': 'y', 5: 6}": ["text/html"],
    "def _repr_mimebundle_(self, **options): return {'image/png': 'cG5n', 'text/html': 'x'}, {}": [
        "image/png",
        "text/html",
    ],
    "def _repr_mimebundle_(self, **options): 1 / 0\n    def _repr_html_(self): return 'x'": ["text/html"],
    "def _repr_html_(self): return '\\ud800'": ["text/html"],
}
IGNORED = [
    "def _repr_html_(self): 1 / 0",
    "def _repr_html_(self): raise SystemExit(3)",
    "def _repr_html_(self): raise MemoryError",
    "def _repr_html_(self): return None",
    "def _repr_html_(self): return 5",
    "def _repr_html_(self): return b'bytes'",
    "def _repr_png_(self): return 'no base64: \\x00é'",
    "def _repr_png_(self, wanted): return b'png'",
    "_repr_html_ = property(lambda self: 1 / 0)",
    "_repr_mimebundle_ = 5",
    "def _repr_mimebundle_(self, **options): return [('text/html', 'x')]",
    "def __getattr__(self, name): return lambda *args: 'x'",
]


@table("method", METHODS)
def test_object_is_shown_by_its_methods(repl: SandboxedRepl, method: str) -> None:
    block = repl.execute(f"{RICH}{method}\nRich()")
    assert types(block) == [sorted([*METHODS[method], "text/plain"])]
    assert block.stdout == "Rich()\n"


@table("method", IGNORED)
def test_display_method_that_fails_is_left_out(repl: SandboxedRepl, method: str) -> None:
    """A method that fails or returns a value of another type is left out."""
    block = repl.execute(f"{RICH}{method}\nRich()")
    assert (types(block), block.displays_omitted) == ([], 0)
    assert block.stdout == "Rich()\n"


def test_display_method_ends_at_the_block_timeout(repl: SandboxedRepl) -> None:
    """A method that never returns is ended by the clock of its block."""
    code = f"kept = 5\n{RICH}def _repr_html_(self):\n        while True: pass\nRich()"
    block = within_longer(lambda limit_s: repl.execute(code, timeout_s=limit_s), lambda block: block.stdout)
    assert (block.status, block.limit, block.stdout) == ("interrupted", "block_timeout_s", "Rich()\n")
    assert repl.execute("kept").stdout == "5\n"


# -- bounds --------------------------------------------------------------------------------------------------------


@table("size", ["1 << 30", f"{MAX_DISPLAY_BYTES}"])
def test_display_too_large_is_counted(repl: SandboxedRepl, size: str) -> None:
    block = repl.execute(f"{RICH}def _repr_png_(self): return bytes({size})\nRich()")
    assert (types(block), block.displays_omitted, block.stdout) == ([], 1, "Rich()\n")
    block = repl.execute(
        f"{RICH}def _repr_png_(self): return bytes({size})\n    def _repr_html_(self): return 'x'\nRich()"
    )
    assert (types(block), block.displays_omitted) == ([["text/html", "text/plain"]], 0)


def test_displays_past_the_bound_are_counted(repl: SandboxedRepl) -> None:
    repl.execute(f"{RICH}def _repr_html_(self): return self.html")
    block = repl.execute("one = Rich(); one.html = 'x'\nfor n in range(10_000): display(one)")
    assert (len(block.displays), block.displays_omitted) == (MAX_DISPLAYS, 10_000 - MAX_DISPLAYS)
    block = repl.execute("one.html = 'x' * 4_000_000\nfor n in range(10): display(one)")
    assert 0 < len(block.displays) == 10 - block.displays_omitted
    assert sum(len(each.data["text/html"]) for each in block.displays) <= MAX_DISPLAYS_BYTES
    assert types(repl.execute("one.html = 'x'; one")) == [["text/html", "text/plain"]]  # the next block has all of it


def test_display_must_fit_into_a_frame(sandbox: Sandbox) -> None:
    with sandbox.repl(limits=Limits(max_frame_bytes=1 << 16)) as repl:
        block = repl.execute(f"{RICH}def _repr_html_(self): return 'x' * 100_000\nRich()")
    assert (types(block), block.displays_omitted) == ([], 1)


# -- threads, forks, ends ------------------------------------------------------------------------------------------


def test_display_in_thread_goes_to_running_block(repl: SandboxedRepl) -> None:
    block = repl.execute(
        f"{RICH}def _repr_html_(self): return 'x'\nimport threading\n"
        "threads = [threading.Thread(target=display, args=[Rich()] * 3) for _ in range(30)]\n"
        "for each in threads: each.start()\nfor each in threads: each.join()"
    )
    assert (len(block.displays), block.displays_omitted) == (MAX_DISPLAYS, 90 - MAX_DISPLAYS)
    repl.execute(
        "def show_always():\n    while not done.is_set(): display(Rich())\n"
        "done = threading.Event(); thread = threading.Thread(target=show_always); thread.start()"
    )
    for _ in range(50):  # it shows between blocks, too: that is lost, and the REPL lives
        assert repl.execute("1").status == "ok"
    assert repl.execute("done.set(); thread.join()").status == "ok"
    assert repl.execute("1").displays == ()


def test_display_in_forked_process_is_dropped(repl: SandboxedRepl) -> None:
    code = f"{RICH}def _repr_html_(self): return 'x'\nimport os\nif not (child := os.fork()):\n    display(Rich())\n    os._exit(0)"
    block = repl.execute(f"{code}\nassert os.waitpid(child, 0)[1] == 0")
    assert (types(block), block.stdout) == ([], "Rich()\n")


@table("end", ["1 / 0", "raise SystemExit", "os.kill(os.getpid(), 9)", "while True: pass"])
def test_displays_stay_however_the_block_ends(repl: SandboxedRepl, end: str) -> None:
    code = f"{RICH}def _repr_html_(self): return 'x'\nimport os\ndisplay(Rich())\n{end}"
    block = within_longer(lambda limit_s: repl.execute(code, timeout_s=limit_s), lambda block: block.displays)
    assert block.status in ("error", "exited", "killed", "interrupted")
    assert [sorted(each.data) for each in block.displays] == [["text/html", "text/plain"]]
    assert repl.execute("1").displays == ()


# -- a run ---------------------------------------------------------------------------------------------------------


@MATPLOTLIB
def test_displays_reach_the_model_and_trace(tmp_path: Path, rlm: MakeRLM) -> None:
    """The model is told of pictures, and the trace has their sizes."""
    seen: list[str] = []
    code = "import matplotlib.pyplot as plt; plt.figure(figsize=(2, 1)); plt.savefig('x.png', dpi=50); plt.close()"

    def reply(messages: list[dict[str, str]]) -> str:
        seen.append(messages[-1]["content"])
        return f"```repl\n{code}\n```" if len(seen) == 1 else "FINAL(done)"

    events: list[Event] = []
    with TraceWriter(tmp_path / "trace") as trace:

        def on_event(event: Event) -> None:
            events.append(event)
            trace(event)

        completion = rlm(reply, on_event=on_event).completion("c", "q")
    (block,) = completion.trajectory[0].blocks
    size = len(png(block.displays[0]))
    assert "Block 1: ran\n[picture: image/png, 100 x 50]" in seen[1]
    (ended,) = [event for event in events if isinstance(event, BlockEnded)]
    assert (ended.outcome.displays, ended.displays) == ((), ({"image/png": size},))
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    (written,) = [line for line in lines if line["event"] == "block_ended"]
    assert written["displays"] == [{"image/png": size}]
    told = completion.to_dict()["trajectory"][0]["blocks"][0]["displays"]
    assert told == [block.displays[0].to_dict()]
