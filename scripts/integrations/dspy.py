"""DSPy, with the tests of its own interpreters and the conformance checks of dspy-interpreters."""

from scripts.integrations.peer import RECORDER, Peer, Suite

INSIDE = "scripts.integrations.inside"
PYTEST = ("-m", "pytest", "-q", "-p", RECORDER, "-p", f"{INSIDE}.dspy_suite", "-p", "no:cacheprovider", "--deno")
DSPY = "checkout https://github.com/stanfordnlp/dspy"
LOCAL = "tests/primitives/test_local_interpreter.py"
PYTHON = ("tests/primitives/test_python_interpreter.py", "tests/predict/test_rlm.py")

PEER = Peer(
    name="dspy",
    packages=("dspy==3.4.1", "pytest==9.2.0", "pytest-asyncio==1.5.0"),
    suites=(
        Suite(
            "dspy-interpreters",
            ("-m", f"{INSIDE}.dspy_conformance"),
            "checkout https://github.com/cmpnd-ai/dspy-interpreters",
        ),
        Suite("LocalInterpreter", (*PYTEST, LOCAL), DSPY),
        Suite("PythonInterpreter and RLM", (*PYTEST, *PYTHON), DSPY),
    ),
    programs=(f"{INSIDE}.dspy_programs:rlm", f"{INSIDE}.dspy_programs:flex"),
    opened=f"{INSIDE}.dspy_programs:opened",
    figures=(f"{INSIDE}.dspy_figures:interpreters",),
)
