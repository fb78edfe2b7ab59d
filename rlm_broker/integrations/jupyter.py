"""A kernel for Jupyter: cells run in a sandboxed REPL. `rlm-broker kernel install` makes it known to front ends.

The kernel is a process of the user's that speaks Jupyter's protocol by `ipykernel.kernelbase`, and runs no code of
cells. A person works on cells for hours, so the limits of time are a day each, unless others are given.

What a cell shows comes from untrusted code, and the page of a front end may do what its user may. So text and pictures
pass as they are, and HTML and SVG go where they can run nothing (`shown_forms`).
"""

import asyncio
import base64
import codeop
import contextlib
import fnmatch
import html
import io
import re
import signal
import sys
import tokenize
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from rlm_broker.errors import RlmBrokerError
from rlm_broker.integrations.jupyter_repl import KernelRepl
from rlm_broker.integrations.peers import require
from rlm_broker.integrations.repl_base import text_of
from rlm_broker.results import Block
from rlm_broker.version import __version__

require("ipykernel", "jupyter", tested=("6.29", "8"))

from ipykernel import kernel_protocol_version
from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

MOST_SHOWN_CHARS: Final = 64 << 20
"""Characters that one cell may show by `display`, all forms together. Beyond them `display` raises."""
ASKED_EVERY_S: Final = 0.05
"""Seconds between two looks for the line that a person types."""
TEXT: Final = "text/plain"
PASSED: Final = (TEXT, "image/png", "image/jpeg")
"""Forms in which a front end looks for no code."""
POLICY: Final = "default-src 'none'; img-src data:; font-src data:; style-src 'unsafe-inline'"
"""Content security policy of a frame: nothing is loaded, so nothing leaves by an address either."""
STYLE: Final = (
    "body{margin:0;background:#fff;font:13px sans-serif}table{border-collapse:collapse}td,th{padding:3px 8px}"
)
LONGEST_EM: Final = 30
"""Height of a frame at most; it scrolls, and a person can draw it larger."""
_ACTING_LATEX: Final = re.compile(r"<|\\(href|url|require|class|cssId|style|data|html\w*|include\w*|csname|\w*tip)\b")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/=\n]*")
_BACKEND: Final = re.compile(r"^%matplotlib\b.*$", re.MULTILINE)
_HELP: Final = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\?\??\s*")


def shown_forms(forms: Mapping[str, str]) -> dict[str, str]:
    """Return forms of untrusted code as a front end may have them.

    HTML goes into a frame without scripts, addresses and rights. SVG becomes a picture, in which scripts do not run.
    Markdown and LaTeX that could hold such things become text.

    Args:
        forms: MIME type → the form; pictures as base64.
    """
    shown = {kind: forms[kind] for kind in PASSED if kind in forms and (kind == TEXT or _BASE64.fullmatch(forms[kind]))}
    if latex := forms.get("text/latex"):
        shown[TEXT if _ACTING_LATEX.search(latex) else "text/latex"] = latex
    if markdown := forms.get("text/markdown"):
        shown[TEXT] = markdown
    if svg := forms.get("image/svg+xml"):
        data = base64.b64encode(svg.encode("utf-8", "replace")).decode()
        shown["text/html"] = f'<img src="data:image/svg+xml;base64,{data}">'
    if page := forms.get("text/html"):
        shown["text/html"] = _framed(page)
    return shown


def _framed(page: str) -> str:
    lines = 3 + 2 * len(re.findall(r"<(?:tr|p|li|br|h\d|div)\b", page, re.IGNORECASE))
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style>'
    box = f"width:100%;height:{min(lines, LONGEST_EM)}em;border:0;resize:vertical"
    return f'<iframe sandbox srcdoc="{html.escape(head + page)}" style="{box}"></iframe>'


def _ends_in_semicolon(code: str) -> bool:
    """Return whether a cell hides its value, by a semicolon after which there is a comment at most."""
    if ";" not in code:
        return False
    last = ""
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type != tokenize.COMMENT and token.string.strip():
                last = token.string
    return last == ";"


class _Cell:
    """One cell that runs: its messages to the front end, each under the request that it answers."""

    def __init__(self, kernel: "SandboxKernel", silent: bool, allow_stdin: bool) -> None:
        self._kernel = kernel
        self._parent = kernel.get_parent("shell")
        self._ident = kernel._parent_ident["shell"]
        self._silent = silent
        self._allow_stdin = allow_stdin
        self._chars_left = MOST_SHOWN_CHARS

    def send(self, kind: str, **content: Any) -> None:
        """Send one message to all front ends. May be called on any thread."""
        session, socket = self._kernel.session, self._kernel.iopub_socket
        session.send(socket, kind, content, parent=self._parent, ident=self._kernel._topic(kind))

    def printed(self, stream: str, text: str) -> None:
        """Send a piece of output."""
        self.send("stream", name=stream, text=text)

    def show(self, forms: Mapping[str, str], display_id: object = None, replaces: bool = False) -> None:
        """Send an object that code shows."""
        transient = {"display_id": display_id} if isinstance(display_id, str) else {}
        kind = "update_display_data" if replaces and transient else "display_data"
        self.send(kind, data=shown_forms(forms), metadata={}, transient=transient)

    async def answer(self, what: object, *given: Any) -> Any:
        """Answer a call of the kernel's function. Code may call it with anything."""
        match what, given:
            case "display", (dict() as forms, display_id, replaces):
                texts = {kind: form for kind, form in forms.items() if isinstance(kind, str) and isinstance(form, str)}
                self._chars_left -= sum(map(len, texts.values()))
                if self._chars_left < 0:
                    raise ValueError(f"one cell may show {MOST_SHOWN_CHARS:,} characters, pictures as base64 included")
                self.show(texts, display_id, bool(replaces))
            case "clear", (bool() as wait,):
                self.send("clear_output", wait=wait)
            case "input", (str() as prompt, bool() as is_hidden):
                return await self._typed(prompt, is_hidden) if self._allow_stdin else None
            case "found", (*found,):
                self._kernel.found = found
            case _:
                raise ValueError("this is the kernel's own function")
        return None

    async def _typed(self, prompt: str, is_hidden: bool) -> str:
        """Ask the front end of the cell for a line, and wait for it as long as the cell runs."""
        session, socket = self._kernel.session, self._kernel.stdin_socket
        while socket.poll(0):  # a line for a cell that was interrupted
            socket.recv_multipart()
        content = {"prompt": prompt, "password": is_hidden}
        session.send(socket, "input_request", content, parent=self._parent, ident=self._ident)
        while not socket.poll(0):
            await asyncio.sleep(ASKED_EVERY_S)
        _, reply = session.recv(socket)
        return str(reply["content"]["value"])

    def end(self, block: Block, number: int) -> dict[str, Any]:
        """Send what a block has left, and return the reply to the request."""
        if block.displays_omitted:
            self.printed("stderr", f"{block.displays_omitted} further pictures or tables were dropped: too many\n")
        if block.status == "ok":
            if block.result is not None and not self._silent and not _ends_in_semicolon(block.code):
                forms = shown_forms(block.result.to_dict())
                self.send("execute_result", data=forms, metadata={}, execution_count=number)
            return {"status": "ok", "execution_count": number, "payload": [], "user_expressions": {}}
        if block.status == "killed":
            back_to = self._kernel.repl.back_to
            lost = "its variables are gone" if back_to is None else f"variables are as they were before cell {back_to}"
            return self.fail("ReplKilled", f"{block.error}; {lost}", "", number)
        name = block.error_type or {"interrupted": "KeyboardInterrupt"}.get(block.status, "Error")
        if block.limit:
            why = f"{block.error} (limit {block.limit})"
            return self.fail(name, why, f"{block.traceback or ''}\n{name}: {why}", number)
        return self.fail(name, block.error_text, block.traceback, number)

    def fail(self, name: str, why: str | None, traceback: str | None, number: int) -> dict[str, Any]:
        """Send an error, and return the reply to the request."""
        lines = self._kernel.repl.named(traceback or f"{name}: {why}").splitlines()
        error = {"ename": name, "evalue": why or "", "traceback": lines}
        self.send("error", **error)
        return {"status": "error", "execution_count": number, **error}


class SandboxKernel(Kernel):  # type: ignore[misc] # ipykernel may be absent
    """A kernel whose cells run in a REPL of a sandbox. Made by `serve`, once in a process.

    Attributes:
        repl: The REPL of its cells.
        found: What the last block for completion or help has told.
    """

    implementation = "rlm-broker"
    implementation_version = __version__
    banner = "Python in a sandbox of rlm-broker: no network, and none of your files."
    language_info: ClassVar[dict[str, Any]] = {
        "name": "python",
        "version": sys.version.split()[0],
        "mimetype": "text/x-python",
        "codemirror_mode": {"name": "ipython", "version": 3},
        "pygments_lexer": "ipython3",
        "nbconvert_exporter": "python",
        "file_extension": ".py",
    }
    repl: KernelRepl
    found: list[Any]
    _cell: _Cell | None = None
    _history: list[tuple[int, str, str | None]]

    def begin(self, repl: KernelRepl) -> None:
        """Run cells in this REPL."""
        self.repl, repl.answer = repl, self.called
        self.found, self._history = [], []

    @property
    def kernel_info(self) -> dict[str, Any]:
        """Facts about the kernel. The base class would import a debugger for it, which no cell could be given to."""
        named = ("implementation", "implementation_version", "language_info", "banner")
        facts = {name: getattr(self, name) for name in named}
        return {**facts, "protocol_version": kernel_protocol_version, "help_links": [], "supported_features": []}

    def pre_handler_hook(self) -> None:
        """Leave SIGINT to the REPL: a KeyboardInterrupt would end a loop."""

    def post_handler_hook(self) -> None:
        """Leave SIGINT to the REPL."""

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: Mapping[str, str] | None = None,
        allow_stdin: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        """Run a cell, and return the reply to its request."""
        number = self.execution_count
        if asked := _HELP.fullmatch(code):
            page = await self.do_inspect(asked[1], len(asked[1]))
            pager = [{"source": "page", "start": 0, "data": page["data"]}]
            return {"status": "ok", "execution_count": number, "payload": pager, "user_expressions": {}}
        cell = self._cell = _Cell(self, silent, allow_stdin)
        result = None
        try:
            block = await self.repl.execute(
                _BACKEND.sub("", code),
                number,
                on_output=cell.printed,
                on_display=lambda each: cell.show(each.to_dict()),
            )
            result = text_of(block) or None
            reply = cell.end(block, number)
            if block.status == "ok":
                reply["user_expressions"] = {
                    name: await self._expression(each) for name, each in (user_expressions or {}).items()
                }
        except RlmBrokerError as error:
            reply = cell.fail(type(error).__name__, str(error), None, number)
        finally:
            self._cell = None
        if store_history and not silent:
            self._history.append((number, code, result))
        return reply

    async def called(self, what: object, *given: Any) -> Any:
        """Answer a call of the kernel's function."""
        if self._cell is None:
            raise ValueError("no cell runs")
        return await self._cell.answer(what, *given)

    async def _expression(self, code: str) -> dict[str, Any]:
        block = await self.repl.execute(code, None)
        if block.status != "ok":
            return {"status": "error", "ename": block.error_type, "evalue": block.error_text, "traceback": []}
        data = {} if block.result is None else shown_forms(block.result.to_dict())
        return {"status": "ok", "data": data, "metadata": {}}

    async def _looked_up(self, call: str) -> list[Any]:
        """Return what a function of the guest's module has told; an empty list if it could not."""
        self.found = []
        self._cell = _Cell(self, True, False)
        try:
            await self.repl.look_up(call)
        except RlmBrokerError:
            return []
        finally:
            self._cell = None
        return self.found

    async def do_complete(self, code: str, cursor_pos: int) -> dict[str, Any]:
        """Return names that may stand at the cursor."""
        matches: list[str] = []
        length = 0
        match await self._looked_up(f"complete({code[:cursor_pos]!r})"):
            case [list() as found, int() as begun]:
                matches, length = [str(each) for each in found], max(0, min(begun, cursor_pos))
        span = {"cursor_start": cursor_pos - length, "cursor_end": cursor_pos}
        return {"status": "ok", "matches": matches, "metadata": {}, **span}

    async def do_inspect(self, code: str, cursor_pos: int, *_: Any) -> dict[str, Any]:
        """Return the documentation of the object at the cursor."""
        before, behind = code[:cursor_pos].rstrip("("), code[cursor_pos:]
        path = "".join([*re.findall(r"[\w.]+$", before), *re.findall(r"^\w+", behind)])
        match await self._looked_up(f"describe({path!r})"):
            case [str() as text]:
                return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}
        return {"status": "ok", "found": False, "data": {}, "metadata": {}}

    async def do_is_complete(self, code: str) -> dict[str, Any]:
        """Return whether a prompt has all of a statement."""
        last = code.rpartition("\n")[2]
        try:  # an empty line ends what is indented, as at Python's own prompt
            is_whole = codeop.compile_command(code, symbol="exec") is not None and not last[:1].isspace()
        except (SyntaxError, ValueError, OverflowError):
            return {"status": "invalid"}
        if is_whole:
            return {"status": "complete"}
        indent = last[: len(last) - len(last.lstrip())] + " " * 4 * last.rstrip().endswith(":")
        return {"status": "incomplete", "indent": indent}

    async def do_history(self, hist_access_type: str, output: bool, **asked: Any) -> dict[str, Any]:
        """Return cells of this kernel. It keeps none of earlier ones."""
        found = self._history
        if hist_access_type == "range":
            start, stop = asked.get("start") or 0, asked.get("stop") or sys.maxsize
            found = [each for each in found if start <= each[0] < stop]
        else:
            found = [each for each in found if fnmatch.fnmatchcase(each[1], asked.get("pattern") or "*")]
            if asked.get("unique"):
                found = [each for place, each in enumerate(found) if each[1] not in [m[1] for m in found[place + 1 :]]]
            found = found[-(asked.get("n") or 0) :]
        history = [(1, number, (code, result) if output else code) for number, code, result in found]
        return {"status": "ok", "history": history}

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """End the REPL and the sandbox, with all their processes."""
        await self.repl.close()
        return {"status": "ok", "restart": restart}


class KernelApp(IPKernelApp):  # type: ignore[misc]
    """The process of the kernel, without what is for IPython's shell."""

    kernel_class = SandboxKernel

    def init_control(self, context: Any) -> None:
        """Make the control channel, and no thread for further shells: a REPL runs one block at a time."""
        super().init_control(context)
        self.shell_channel_thread = None

    def init_path(self) -> None:
        """Leave `sys.path` as it is: the kernel imports nothing from the folder of a notebook."""

    def init_pdb(self) -> None:
        """Leave `pdb` as it is."""


def serve(connection_file: str, repl: KernelRepl) -> None:
    """Serve front ends until one of them shuts the kernel down.

    Args:
        connection_file: File with the ports and the key, which a front end has made.
        repl: REPL of the cells, which may still be opening.
    """
    app = KernelApp.instance(connection_file=connection_file)
    app.initialize([])
    app.kernel.begin(repl)
    signal.signal(signal.SIGINT, repl.interrupt)
    app.start()
