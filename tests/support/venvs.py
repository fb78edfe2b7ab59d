"""Virtual environments, as far as one is read of them before it is used."""

import sys
from pathlib import Path

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def a_venv(folder: Path) -> Path:
    """Write one for this Python by hand, with no packages and no interpreter; one that is there stays."""
    (folder / "lib" / f"python{VERSION}" / "site-packages").mkdir(parents=True, exist_ok=True)
    (folder / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {VERSION}.1\n")
    return folder
