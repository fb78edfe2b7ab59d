"""The OpenAI Agents SDK, with the base operations of a session, since it has no suite for providers."""

from scripts.integrations.peer import Peer, Suite

INSIDE = "scripts.integrations.inside"

PEER = Peer(
    name="openai_agents",
    packages=("openai-agents==0.24.0", "pytest==9.2.0", "pytest-asyncio==1.5.0"),
    suites=(
        Suite(
            "base operations",
            ("-m", f"{INSIDE}.openai_agents_suite"),
        ),
    ),
    example=("sandbox_agent.py", r"\AIt is 30\.\n\Z"),
    opened=f"{INSIDE}.openai_agents_programs:opened",
)
