"""Functions of a front end for code in a kernel of notebooks: `display`, `clear_output`, `input`, and completion.

A kernel runs a block of its own in each fresh REPL, which calls `begin`. For completion and help it runs another one.
Such a block has no value and binds no name, so code's own variables and `_` stay as they are. What it finds out goes
to the kernel by the same function as displays do.
"""

import binascii
import builtins
import contextlib
import inspect
import keyword
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

from sandbox_worker.repl.adaptation import adapt_later
from sandbox_worker.repl.displays import all_forms_of

MOST_MATCHES: Final = 500
"""Completions at most; further ones are left out."""
MOST_CHARS: Final = 1 << 16
"""Characters of help at most; the rest is cut."""
_IMPORTED: Final = re.compile(r"\s*(?:from\s+|import\s+(?:[\w., ]*,\s*)?)([\w.]*)$")
"""The end of a line where the name of a module is expected."""
_tell: Callable[..., Any]
"""Function of the kernel's: it takes a request and its arguments."""


def begin(tell: Callable[..., Any]) -> None:
    """Give code the functions of a front end. IPython, where it is installed, gets them when it is imported."""
    global _tell
    _tell = tell
    vars(builtins).update(display=display, input=_input)
    adapt_later({"IPython.core.display_functions": _adapt_ipython, "getpass": _adapt_getpass})


def _adapt_ipython(module: ModuleType) -> None:
    vars(module).update(display=display, update_display=update_display, clear_output=clear_output)


def _adapt_getpass(module: ModuleType) -> None:
    vars(module)["getpass"] = _getpass


class DisplayHandle:
    """A display that can be replaced, by its id."""

    def __init__(self, display_id: str) -> None:
        self.display_id = display_id

    def display(self, value: object, **_: object) -> None:
        """Show an object once more, under the same id."""
        display(value, display_id=self.display_id)

    def update(self, value: object, **_: object) -> None:
        """Show an object in place of the last one."""
        update_display(value, display_id=self.display_id)


def display(*values: Any, display_id: object = None, raw: bool = False, **_: object) -> DisplayHandle | None:
    """Show objects in all their forms, as the function of IPython does.

    Args:
        values: Objects.
        display_id: Id by which they can be replaced; True for a new one. The function then returns a handle.
        raw: Whether the objects are dicts of forms, by MIME type.
    """
    name = os.urandom(8).hex() if display_id is True else display_id
    for value in values:
        _show(value, raw, name, False)
    return DisplayHandle(name) if isinstance(name, str) else None


def update_display(value: Any, *, display_id: str, raw: bool = False, **_: object) -> None:
    """Show an object in place of the one that was shown with this id."""
    _show(value, raw, display_id, True)


def clear_output(wait: bool = False) -> None:
    """Remove what the cell has shown so far; with `wait`, once there is something new."""
    _tell("clear", bool(wait))


def _show(value: Any, raw: bool, display_id: object, replaces: bool) -> None:
    if raw:
        forms = dict(value)
    else:
        texts, pictures = all_forms_of(value)
        forms = {
            **texts,
            **{kind: binascii.b2a_base64(data, newline=False).decode() for kind, data in pictures.items()},
        }
    _tell("display", forms, display_id, replaces)


def _input(prompt: object = "", /) -> str:
    """Return a line that the person at the front end types."""
    return _typed(prompt, False)


def _getpass(prompt: object = "Password: ", *_: object, **__: object) -> str:
    """Return a line that the person types unseen."""
    return _typed(prompt, True)


def _typed(prompt: object, is_hidden: bool) -> str:
    text: str | None = _tell("input", str(prompt), is_hidden)
    if text is None:
        raise EOFError("the front end takes no input here")
    return text


def complete(text: str) -> None:
    """Tell the kernel which names may stand at the end of a text, and how many of its characters they replace."""
    line = text.rpartition("\n")[2]
    (path,) = re.findall(r"[\w.]*$", line)[:1]
    parent, _, begun = path.rpartition(".")
    names = _names(line, parent, is_attribute="." in path)
    found = sorted({name for name in names if name.startswith(begun) and (begun or not name.startswith("_"))})
    _tell("found", found[:MOST_MATCHES], len(begun))


def _names(line: str, parent: str, is_attribute: bool) -> Iterable[str]:
    if _IMPORTED.match(line):
        package = sys.modules.get(parent)
        folders = None if not parent else getattr(package, "__path__", ())
        return [
            *(module.name for module in pkgutil.iter_modules(folders)),
            *(() if parent else sys.builtin_module_names),
        ]
    if is_attribute:
        return [name for name in dir(_value_of(parent)) if isinstance(name, str)] if parent else ()
    own = [name for name in list(_variables()) if isinstance(name, str) and name.isidentifier()]
    return [*own, *vars(builtins), *keyword.kwlist, *keyword.softkwlist]


def describe(path: str) -> None:
    """Tell the kernel what an object is: its class, its signature and its documentation; None if there is none."""
    try:
        value = _value_of(path)
    except Exception:  # noqa: BLE001 - an attribute of code's may raise any class
        _tell("found", None)
        return
    lines = [f"Type: {type(value).__name__}"]
    with contextlib.suppress(Exception):  # most built-in functions have none, and code's own may raise any class
        lines.append(f"Signature: {path}{inspect.signature(value)}")
    if not callable(value):
        lines.append(f"Value: {value!r}")
    _tell("found", "\n".join([*lines, "", inspect.getdoc(value) or "No documentation."])[:MOST_CHARS])


def _value_of(path: str) -> Any:
    """Return the object that a dotted name of code's stands for."""
    first, *rest = path.split(".")
    variables = _variables()
    value = variables[first] if first in variables else vars(builtins)[first]
    for name in rest:
        value = getattr(value, name)
    return value


def _variables() -> dict[str, Any]:
    return vars(sys.modules["__main__"])
