"""Deep Agents, with the standard tests of langchain-tests for sandboxes."""

from scripts.integrations.peer import Peer, Suite

INSIDE = "scripts.integrations.inside"

PEER = Peer(
    name="langchain",
    packages=("deepagents==0.7.32", "langchain-tests==1.1.9", "pytest==9.2.0", "pytest-asyncio==1.5.0"),
    suites=(
        Suite(
            "SandboxIntegrationTests",
            ("-m", f"{INSIDE}.langchain_suite"),
        ),
    ),
    programs=(f"{INSIDE}.langchain_programs:deep_agent",),
    example=("deep_agent.py", r"cat: /etc/passwd: No such file(?s:.*)The sum is 30\.\n\Z"),
    opened=f"{INSIDE}.langchain_programs:opened",
)
