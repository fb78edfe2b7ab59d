"""DSPy, with the tests of its own interpreters and the conformance checks of dspy-interpreters.

The tests of `PythonInterpreter` and `RLM` are those of 3.3.1, which is the newest release whose tests are tagged.
"""

from scripts.integrations.peer import RECORDER, Peer, Suite

INSIDE = "scripts.integrations.inside"
PYTEST = ("-m", "pytest", "-q", "-p", RECORDER, "-p", f"{INSIDE}.dspy_suite", "-p", "no:cacheprovider", "--deno")
PYTESTS = ("pytest==9.2.0", "pytest-asyncio==1.5.0")

PEER = Peer(
    name="dspy",
    packages=("dspy==3.4.1", *PYTESTS),
    suites=(
        Suite(
            "dspy-interpreters",
            ("-m", f"{INSIDE}.dspy_conformance"),
            "checkout https://github.com/cmpnd-ai/dspy-interpreters",
        ),
        Suite(
            "LocalInterpreter",
            (*PYTEST, "tests/primitives/test_local_interpreter.py"),
            "checkout https://github.com/stanfordnlp/dspy 3.4.1",
        ),
        Suite(
            "PythonInterpreter and RLM",
            (*PYTEST, "tests/primitives/test_python_interpreter.py", "tests/predict/test_rlm.py"),
            "checkout https://github.com/stanfordnlp/dspy 3.3.1",
            packages=("dspy==3.3.1", *PYTESTS),
        ),
    ),
    programs=tuple(f"{INSIDE}.dspy_programs:{name}" for name in ("rlm", "flex")),
    example=("dspy_rlm.py", r"\A\[Error\] FileNotFoundError: .* '/etc/passwd'\n"),
    opened=f"{INSIDE}.dspy_programs:opened",
    figures=(f"{INSIDE}.dspy_figures:interpreters",),
)
