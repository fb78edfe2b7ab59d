"""OpenEnv, with the tests of its environments `repl_env` and `coding_env`.

They are those of 0.3.1, and run with the sources of that release.
"""

from scripts.integrations.peer import RECORDER, Peer, Suite

INSIDE = "scripts.integrations.inside"
PYTEST = ("-m", "pytest", "-q", "-p", f"{INSIDE}.openenv_suite", "-p", RECORDER, "-p", "no:cacheprovider")
PROGRAMS = f"{INSIDE}.openenv_programs"
REPOSITORY = "checkout https://github.com/huggingface/OpenEnv v0.3.1"

PEER = Peer(
    name="openenv",
    packages=("openenv==0.10.0", "smolagents==1.26.0", "pytest==9.2.0", "pytest-asyncio==1.5.0"),
    suites=(
        Suite(
            "repl_env", (*PYTEST, "tests/envs/test_repl_env.py", "tests/envs/test_repl_env_reset_cache.py"), REPOSITORY
        ),
        Suite(
            "coding_env",
            (*PYTEST, "tests/envs/test_python_codeact_reset.py", "tests/envs/test_python_codeact_rewards.py"),
            REPOSITORY,
        ),
    ),
    programs=(f"{PROGRAMS}:coding", f"{PROGRAMS}:recursive"),
    example=("openenv_server.py", r"1\.0 True 42\n\Z"),
    opened=f"{PROGRAMS}:opened",
)
