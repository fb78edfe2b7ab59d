"""Packages to install without a network: wheels written by hand, and programs that stand in for an installer."""

import base64
import hashlib
import os
import shutil
import sys
import types
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

FOREIGN = sorted(name for name in os.environ if name.startswith(("UV_", "PIP_")))
"""Variables of this machine's that would lead an installer elsewhere."""

COMPILES = """
if "compile" in sys.argv:
    open(sys.argv[sys.argv.index("--output-file") + 1], "w").write("lenses==1.0\\n")
"""
"""Code of an installer that finds one package, and installs none."""


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    code: str,
    requires: Iterable[str] = (),
    more: Mapping[str, str] = types.MappingProxyType({}),
) -> Path:
    """Write a wheel of one module, and of `more` files with their texts."""
    info = f"{name}-{version}.dist-info"
    needed = "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{name}.py": code,
        **more,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return wheel


def installers_environment(folder: Path, wheels: Path, installer: str) -> dict[str, str]:
    """Return variables under which packages come from a folder of wheels, and are kept in a cache of the test's own.

    Args:
        installer: "uv" or "pip".
    """
    programs = folder / "programs"
    programs.mkdir()
    if installer == "uv":
        (programs / "uv").symlink_to(found_uv())
    return {
        "PATH": str(programs),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "UV_FIND_LINKS": str(wheels),
        "UV_OFFLINE": "1",  # it knows no variable for --no-index
        "PIP_FIND_LINKS": str(wheels),
        "PIP_NO_INDEX": "1",
    }


def found_uv() -> str:
    """Return the path of uv, or skip the test."""
    beside = Path(sys.executable).with_name("uv")
    found = shutil.which("uv") or (str(beside) if beside.exists() else None)
    if found is None:
        pytest.skip("needs uv")
    return found


def stand_in_for_uv(programs: Path, code: str) -> None:
    """Write a program `uv` that is this Python code; `sys.argv` is what uv is given."""
    programs.mkdir(exist_ok=True)
    (programs / "uv").write_text(f"#!{sys.executable} -IS\nimport os, sys\n{code}\n")
    (programs / "uv").chmod(0o755)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
