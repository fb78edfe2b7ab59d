"""Files named by settings and options: Python files with tools or functions, and JSON Schemas of answers."""

import importlib
import json
import os
import stat
import symtable
import sys
import traceback
from collections.abc import Callable
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rlm_broker.errors import ConfigurationError
from rlm_broker.sandbox.tools import Tools
from rlm_broker.values.host_files import refusal_told

MAX_FILE_BYTES = 4 << 20
"""Maximum bytes of such a file; a larger one is refused."""
TOOLS_MODULE = "rlm_broker_tools"
"""Name of the module that a file of tools runs as. Classes and functions look up their module by it."""


def content(path: Path, what: str) -> bytes:
    """Return the content of a file.

    Args:
        path: File to read.
        what: Setting naming the file, for the error.

    Raises:
        ConfigurationError: It cannot be read, is not a regular file, or has more than `MAX_FILE_BYTES`.
    """
    with refusal_told(f"{what}: cannot read {path}"):
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigurationError(f"{what}: {path} is not a regular file")
            found = file.read(MAX_FILE_BYTES + 1)
    if len(found) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{what}: {path} has more than {MAX_FILE_BYTES:,} bytes")
    return found


def tools_of(path: Path) -> Tools:
    """Run a Python file in this process, with all its rights, and return the tools it defines.

    The tools are the names in its `__all__`. Without one they are all public names it assigns, except classes and
    imports.

    Raises:
        ConfigurationError: It cannot be read, raises, defines no tool, or defines a name that cannot be a tool's.
    """
    module, text = _ran(path, "tools", TOOLS_MODULE)
    named = vars(module).get("__all__")
    try:
        names = _defined(text, module) if named is None else list(named)
        given = {name: getattr(module, name) for name in names}
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigurationError(f"tools: {path} raised {said}") from error
    if not given:
        raise ConfigurationError(f"tools: {path} defines no public function or value")
    try:
        return Tools(given)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}; begin other names with _, or list the tools in __all__") from None


def function_of(text: str, what: str) -> Callable[..., Any]:
    """Return the function that a text names, as FILE.py:FUNCTION or MODULE:FUNCTION.

    The file or the module runs in this process, with all its rights.

    Args:
        text: A path that ends in `.py` or has a slash is a file. All else is a module that Python finds by itself.
        what: Option naming the function, for the error.

    Raises:
        ConfigurationError: The text has another form, the file or module cannot be run, or has no such function.
    """
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise ConfigurationError(f"{what}: {text} names no function: give FILE.py:FUNCTION or MODULE:FUNCTION")
    if place.endswith(".py") or "/" in place:
        module, _ = _ran(Path(place), what, f"rlm_broker_{what}")
    else:
        try:
            module = importlib.import_module(place)
        except (Exception, SystemExit) as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            advice = "; name a file as ./FILE.py" if isinstance(error, ModuleNotFoundError) else ""
            raise ConfigurationError(f"{what}: {place} cannot be imported: {said}{advice}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigurationError(f"{what}: {place} has no function {name!r}")
    return cast("Callable[..., Any]", found)


def schema_of(path: Path) -> dict[str, Any]:
    """Return the JSON Schema in a file. The run checks whether it is a valid schema.

    Raises:
        ConfigurationError: It cannot be read, or is not a JSON object.
    """
    try:
        schema = json.loads(content(path, "output_type"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"output_type: {path} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ConfigurationError(f"output_type: {path} is not a JSON Schema: it must hold a JSON object")
    return schema


def _ran(path: Path, what: str, name: str) -> tuple[ModuleType, str]:
    """Run a Python file as a module of that name, and return the module and its source.

    Raises:
        ConfigurationError: It cannot be read, is not Python, or raises.
    """
    source = content(path, what)
    module = ModuleType(name)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module  # dataclasses, pydantic and pickle look modules up there
    try:
        text = decode_source(source)
        code = compile(text, module.__file__, "exec", dont_inherit=True)
        exec(code, vars(module))  # the user has named this file to be run
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise ConfigurationError(f"{what}: {path}{where}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigurationError(f"{what}: {path} raised {said}{_place(error, module)}") from error
    return module, text


def _place(error: BaseException, module: ModuleType) -> str:
    """Return the line of the file that an error passed through, in words; empty text if it was none of its lines."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__]
    return f" (line {lines[-1]})" if lines else ""


def _defined(source: str, module: ModuleType) -> list[str]:
    """Return the public names assigned by the file itself, in order."""
    symbols = symtable.symtable(source, str(module.__file__), "exec").get_symbols()
    own = {each.get_name() for each in symbols if each.is_assigned() and not each.is_imported()}
    return [
        name
        for name, value in vars(module).items()
        if name in own and not name.startswith("_") and not isinstance(value, type)
    ]
