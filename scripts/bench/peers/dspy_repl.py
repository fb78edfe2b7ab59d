"""DSPy's interpreter: Python compiled to WebAssembly, in deno."""

import json
import sys
import time

from dspy.primitives.python_interpreter import PythonInterpreter  # type: ignore[import-not-found, unused-ignore]

BLOCK = "x = 1; print(x)"


def spawn() -> list[float]:
    """Until the first block has run: it starts no earlier."""
    started = time.perf_counter()
    with PythonInterpreter() as repl:
        repl.execute("pass")
        return [time.perf_counter() - started]


def round_trip() -> list[float]:
    """One block, of an interpreter that lives on."""
    kept.execute(BLOCK)
    taken = []
    for _ in range(10):
        started = time.perf_counter()
        kept.execute(BLOCK)
        taken.append(time.perf_counter() - started)
    return taken


def context() -> list[float]:
    """10 MB of text as a variable."""
    kept.execute(BLOCK)
    started = time.perf_counter()
    kept.execute("print(len(context))", variables={"context": "a" * 10_000_000})
    return [time.perf_counter() - started]


with PythonInterpreter() as kept:
    for line in sys.stdin:
        work = {"spawn": spawn, "round_trip": round_trip, "context": context}[line.strip()]
        print(json.dumps(work()), flush=True)
