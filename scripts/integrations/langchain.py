"""Deep Agents, with the standard tests of langchain-tests for sandboxes."""

from scripts.integrations.peer import RECORDER, Peer, Suite

INSIDE = "scripts.integrations.inside"

PEER = Peer(
    name="langchain",
    packages=("deepagents==0.7.32", "langchain-tests==1.1.9", "pytest==9.2.0", "pytest-asyncio==1.5.0"),
    suites=(
        Suite(
            "SandboxIntegrationTests",
            (
                *("-m", "pytest", "-q", "-p", RECORDER, "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"),
                *("--pyargs", f"{INSIDE}.langchain_suite"),
            ),
        ),
    ),
    programs=(f"{INSIDE}.langchain_programs:deep_agent",),
    opened=f"{INSIDE}.langchain_programs:opened",
)
