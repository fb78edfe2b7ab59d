"""Jupyter: a kernel whose cells run in a sandbox."""

from scripts.integrations.peer import RECORDER, Peer, Suite

PEER = Peer(
    name="jupyter",
    packages=(
        "ipykernel==7.4.0",
        "jupyter_kernel_test==0.7.0",
        "nbclient==0.11.0",
        "matplotlib",
        "pandas",
        "psutil",
        "pytest",
    ),
    suites=(
        Suite(
            "jupyter_kernel_test",
            ("-m", "pytest", "-p", RECORDER, "--pyargs", "scripts.integrations.inside.jupyter_kernel_tests"),
        ),
    ),
    programs=(
        "scripts.integrations.inside.jupyter_programs:notebook",
        "scripts.integrations.inside.jupyter_programs:interrupted",
        "scripts.integrations.inside.jupyter_programs:killed",
    ),
    figures=("scripts.integrations.inside.jupyter_programs:figures",),
)
