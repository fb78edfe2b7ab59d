"""Many adapters at once, and adapters whose process is killed. `FUNCTION` is a peer's `opened`, as "module:name".

python -m scripts.integrations.inside.crowd FUNCTION      # 200 of them, on 64 threads
python -m scripts.integrations.inside.crowd FUNCTION 8    # eight of them, open until the process is killed
"""

import contextlib
import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

ALL, THREADS = 200, 64


def main() -> None:
    """Do what the command line says."""
    module, _, name = sys.argv[1].partition(":")
    opened = getattr(importlib.import_module(module), name)
    if len(sys.argv) > 2:
        with contextlib.ExitStack() as stack:
            for _ in range(int(sys.argv[2])):
                stack.enter_context(opened())
            print("open", flush=True)
            threading.Event().wait()

    def use(_: int) -> None:
        given: AbstractContextManager[Any] = opened()
        with given:
            pass

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(use, range(ALL)))


if __name__ == "__main__":
    main()
