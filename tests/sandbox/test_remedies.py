from pathlib import Path

import pytest

from rlm_broker.sandbox.remedies import remedy


def machine(folder: Path, **files: str) -> Path:
    """A /proc that says this; names with __ for each slash."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({"sys__kernel__unprivileged_userns_clone": "0"}, "`sysctl kernel.unprivileged_userns_clone=1`"),
        (
            {"sys__kernel__apparmor_restrict_unprivileged_userns": "1"},
            "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
        ),
        ({"sys__user__max_user_namespaces": "0"}, "`sysctl user.max_user_namespaces=15000`"),
        ({"self__status": "Name:\tx\nSeccomp:\t2"}, "`docker run --security-opt seccomp=unconfined`"),
        (
            {"self__status": "Seccomp:\t2", "self__attr__current": "docker-default (enforce)"},
            "`docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined`",
        ),
        (
            {
                "self__status": "Seccomp:\t0",
                "self__attr__current": "unconfined",
                "sys__user__max_user_namespaces": "9",
                "sys__kernel__unprivileged_userns_clone": "1",
            },
            "Start as root",
        ),
    ],
)
def test_what_forbids_namespaces_is_found_and_one_command_named(
    tmp_path: Path, files: dict[str, str], command: str
) -> None:
    sentence = remedy("namespaces", machine(tmp_path, **files))
    assert command in sentence
    assert sentence.count("`") == 2


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ("landlock", "lsm=landlock"),
        ("seccomp", "x86_64 or aarch64"),
        ("private root", "not below /root"),
        ("fork", "Linux 5.13"),
    ],
)
def test_each_layer_has_its_own(tmp_path: Path, layer: str, words: str) -> None:
    assert words in remedy(layer, tmp_path)
