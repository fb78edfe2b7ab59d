"""Cells of a notebook, run by the kernel of rlm-broker: in a sandbox, and not in a process with your files.

pip install 'rlm-broker[jupyter]' nbclient
"""

import os
import subprocess
import sys
import tempfile
from typing import Any

import nbclient
import nbformat

CELLS = (
    "import pathlib\nnumbers = [3, 1, 2]\nsorted(numbers)",
    "pathlib.Path('/etc/passwd').read_text()",
    "import urllib.request\nurllib.request.urlopen('http://example.com')",
    "max(numbers)",
)


def main() -> None:
    """Install the kernel in a folder of its own, run the cells, and print what each has shown."""
    v4: Any = nbformat.v4
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in CELLS])
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "rlm_broker", "kernel", "install", "--prefix", folder]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        os.environ["JUPYTER_PATH"] = f"{folder}/share/jupyter"
        nbclient.NotebookClient(notebook, kernel_name="rlm-broker", allow_errors=True).execute()
    for cell in notebook.cells:
        for output in cell.outputs:
            print(output.get("ename") or output.data["text/plain"])


if __name__ == "__main__":
    main()
