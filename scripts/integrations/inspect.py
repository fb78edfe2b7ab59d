"""inspect_ai: samples whose tools run in a sandbox."""

from scripts.integrations.peer import RECORDER, Peer, Suite

SELF_CHECK = "scripts.integrations.inside.inspect_self_check"
PROGRAMS = "scripts.integrations.inside.inspect_programs"

PEER = Peer(
    name="inspect",
    packages=("inspect_ai==0.3.285", "pytest", "pytest-asyncio"),
    suites=(
        Suite(
            "self_check",
            ("-m", "pytest", "-p", RECORDER, "-o", "asyncio_mode=auto", "--pyargs", SELF_CHECK),
        ),
    ),
    programs=tuple(f"{PROGRAMS}:{name}" for name in ("ten_samples", "refusals")),
    example=("inspect_sandbox.py", r"\AThe sum is 6\. C\nThe sum is 30\. C\n\Z"),
    opened=f"{PROGRAMS}:opened",
    figures=(f"{PROGRAMS}:figures",),
)
