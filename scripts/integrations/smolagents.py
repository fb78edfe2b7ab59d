"""smolagents, with the tests of its local executor, of the one for Docker, and of agents that run code."""

from scripts.integrations.peer import RECORDER, Peer, Suite

INSIDE = "scripts.integrations.inside"
PYTEST = ("-m", "pytest", "-q", "-p", f"{INSIDE}.smolagents_suites", "-p", RECORDER, "-p", "no:cacheprovider")
CHECKOUT = "checkout https://github.com/huggingface/smolagents v1.26.0"
PROGRAMS = f"{INSIDE}.smolagents_programs"

PEER = Peer(
    name="smolagents",
    packages=(
        "smolagents==1.26.0",
        "ddgs==9.16.1",
        "docker==7.2.0",  # tests of all remote executors are in one module
        "markdownify==1.2.3",
        "numpy==2.4.6",
        "pandas==2.3.3",
        "pytest==9.2.0",
        "scikit-learn==1.9.1",
    ),
    suites=(
        Suite(
            "Docker executor",
            (*PYTEST, "tests/test_remote_executors.py::TestDockerExecutorIntegration"),
            CHECKOUT,
        ),
        Suite(
            "agents",
            (*PYTEST, "tests/test_agents.py::TestCodeAgent", "tests/test_agents.py::TestMultiAgents"),
            CHECKOUT,
        ),
        Suite(
            "local executor",
            (*PYTEST, "tests/test_local_python_executor.py"),
            "sdist smolagents==1.26.0",
        ),
    ),
    programs=(f"{PROGRAMS}:managed_agent_and_pictures", f"{PROGRAMS}:own_answer"),
    example=("smolagents_agent.py", r"\A145\.0\n(?s:.*)No such file or directory: '/etc/passwd'"),
    opened=f"{PROGRAMS}:opened",
)
