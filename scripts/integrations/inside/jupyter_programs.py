"""A notebook by nbclient, an interrupt and a kill, with our kernel; and how long a start and a cell take."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import psutil
from jupyter_client.manager import start_new_kernel

NAME = "rlm-broker"
WAIT_S = 60
STARTS, CELLS = 10, 200
CELLS_OF_NOTEBOOK = (
    "%matplotlib inline\nimport pandas\ntable = pandas.DataFrame({'n': [1, 2]})\ntable",
    "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.title('a figure that is left open')\nNone",
    "import time\nfor step in range(3):\n    print(step, flush=True)",
    "from IPython.display import display\ndisplay(table.n.sum())",
    "open('kept.txt', 'w').write('x')",
    "open('/etc/passwd')",
)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install the kernel as a user does, for as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rlm_broker", "kernel", "install", "--prefix", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        os.environ["JUPYTER_PATH"] = f"{folder}/share/jupyter"
        yield


def notebook() -> None:
    """Run a notebook of six cells, of which the last reads a file of the machine's."""
    v4: Any = nbformat.v4
    made = v4.new_notebook(cells=[v4.new_code_cell(each) for each in CELLS_OF_NOTEBOOK])
    with installed():
        nbclient.NotebookClient(made, kernel_name=NAME, timeout=WAIT_S, allow_errors=True).execute()
    table, figure, stream, shown, written, refused = (cell.outputs for cell in made.cells)
    assert "<iframe sandbox" in table[0].data["text/html"], table
    assert "image/png" in figure[0].data, figure
    assert "".join(each.text for each in stream) == "0\n1\n2\n", stream
    assert shown[0].output_type == "display_data", shown
    assert shown[0].data["text/plain"] in ("3", "np.int64(3)"), shown
    assert written[0].data["text/plain"] == "1", written
    assert refused[0].ename == "FileNotFoundError", refused


def interrupted() -> None:
    """Interrupt a cell that computes, as a front end does. Its variables stay, and the next cell runs."""
    with _kernel(NAME) as (manager, client):
        request = client.execute("n = 5\nprint('begun', flush=True)\nwhile True: pass")
        _until(client, request, lambda message: message["content"].get("text") == "begun\n")
        manager.interrupt_kernel()
        assert client.get_shell_msg(timeout=WAIT_S)["content"]["ename"] == "KeyboardInterrupt"
        reply = client.execute("n * 2", reply=True, timeout=WAIT_S)
        assert reply["content"]["status"] in ("ok", "aborted"), reply  # aborted, if it came before the end of the other
        assert client.execute("assert n == 5", reply=True, timeout=WAIT_S)["content"]["status"] == "ok"


def killed() -> None:
    """Kill the kernel, and shut one down: nothing of either is left."""
    for ends in (
        lambda manager: os.kill(manager.provisioner.pid, signal.SIGKILL),
        lambda manager: manager.shutdown_kernel(),
    ):
        with _kernel(NAME) as (manager, client):
            client.execute("import subprocess; subprocess.Popen(['sleep', '600'])", reply=True, timeout=WAIT_S)
            below = psutil.Process(manager.provisioner.pid).children(recursive=True)
            assert len(below) >= 4, below
            ends(manager)
            _, left = psutil.wait_procs(below, WAIT_S)
            assert not left, left


def figures() -> None:
    """Print the time from a start to the first result, and of a cell, by turns with ipykernel's own kernel."""
    starts: dict[str, list[float]] = {NAME: [], "python3": []}
    cells: dict[str, list[float]] = {NAME: [], "python3": []}
    with installed():
        for _ in range(STARTS):
            for name in starts:
                begun = time.perf_counter()
                with _kernel(name) as (_, client):
                    client.execute("1 + 1", reply=True, timeout=WAIT_S)
                    starts[name].append(time.perf_counter() - begun)
                    for _ in range(CELLS // STARTS):
                        begun = time.perf_counter()
                        client.execute("1 + 1", reply=True, timeout=WAIT_S)
                        cells[name].append(time.perf_counter() - begun)
    for what, taken in (("kernel to first result", starts), ("a cell", cells)):
        mine, other = statistics.median(taken[NAME]), statistics.median(taken["python3"])
        print(f"{what}: {mine * 1e3:.1f} ms, ipykernel {other * 1e3:.1f} ms: {mine / other:.2f} x")


@contextlib.contextmanager
def _kernel(name: str) -> Iterator[tuple[Any, Any]]:
    with contextlib.ExitStack() as stack:
        if name == NAME and not Path(os.environ.get("JUPYTER_PATH", "/none")).exists():
            stack.enter_context(installed())
        manager, client = start_new_kernel(kernel_name=name, startup_timeout=WAIT_S)
        try:
            yield manager, client
        finally:
            client.stop_channels()
            if manager.has_kernel:
                manager.shutdown_kernel(now=True)


def _until(client: Any, request: str, is_it: Any) -> None:
    while True:
        message = client.get_iopub_msg(timeout=WAIT_S)
        if message["parent_header"].get("msg_id") == request and is_it(message):
            return
