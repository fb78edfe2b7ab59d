"""The reference RLM, with its own tests. Those of its environments for Docker, IPython and clouds are skipped."""

from scripts.integrations.peer import RECORDER, Peer, Suite

INSIDE = "scripts.integrations.inside"

PEER = Peer(
    name="rlms",
    packages=("rlms==0.1.3", "pytest==9.2.0", "pytest-asyncio==1.5.0"),
    suites=(
        Suite(
            "its tests",
            ("-m", "pytest", "-q", "-p", RECORDER, "-p", f"{INSIDE}.rlms_suite", "-p", "no:cacheprovider", "tests"),
            "checkout https://github.com/alexzhang13/rlm v0.1.3",
        ),
    ),
    programs=tuple(f"{INSIDE}.rlms_programs:{name}" for name in ("depth_two", "persistent", "example")),
    opened=f"{INSIDE}.rlms_programs:opened",
)
