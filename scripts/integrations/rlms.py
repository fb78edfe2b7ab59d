"""The reference RLM, with its own tests. Those of its environments for Docker, IPython and clouds are skipped."""

from scripts.integrations.peer import RECORDER, Peer, Suite

INSIDE = "scripts.integrations.inside"
PROGRAMS = f"{INSIDE}.rlms_programs"
PYTEST = (
    *("-m", "pytest", "-q", "-p", RECORDER, "-p", f"{INSIDE}.rlms_suite"),
    *("-p", "no:cacheprovider", "--continue-on-collection-errors"),
)
MORE_TESTS = ("tests/test_lm_handler.py", "tests/clients", "tests/repl")
"""Tests that are in the repository, and not or not as a whole in the archive of sources."""

PEER = Peer(
    name="rlms",
    packages=("rlms==0.1.3", "pytest==9.2.0", "pytest-asyncio==1.5.0"),
    suites=(
        Suite("its tests", (*PYTEST, "tests"), "sdist rlms==0.1.3"),
        Suite("its further tests", (*PYTEST, *MORE_TESTS), "checkout https://github.com/alexzhang13/rlm v0.1.3"),
    ),
    programs=tuple(f"{PROGRAMS}:{name}" for name in ("depth_two", "persistent")),
    example=("rlms_depth_two.py", r"\A4 of 6\n"),
    opened=f"{PROGRAMS}:opened",
)
