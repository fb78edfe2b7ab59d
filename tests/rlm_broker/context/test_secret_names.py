"""Files with the names of secrets are left out of a folder, and taken if the user names them."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from rlm_broker.context.secret_names import SECRET, is_secret
from rlm_broker.context.store import Paths, store
from rlm_broker.errors import ContextRefused
from tests.support.contexts import loaded, written

SECRETS = [
    *(".env", ".env.local", ".env.production", "prod.env", ".envrc", ".ENV", "app/.env.test"),
    *("server.pem", "tls.key", "id_rsa", "id_rsa.old", "id_ed25519", "store.kdbx", "cert.p12", "cert.PFX", "app.jks"),
    *(".netrc", ".pgpass", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd", "credentials", "credentials.json"),
    *("service-account.json", "service-account-prod.json", ".docker/config.json", "home/.kube/config"),
    *(".env.gz", "id_rsa.xz"),
    *(
        ".env~",
        "server.key.bak",
        "key.pem.old",
        ".netrc.orig",
        "x/credentials.save",
        ".server.key.swp",
        ".npmrc~.bak.gz",
    ),
    *("terraform.tfstate", "infra/prod.tfstate.backup"),
]
HARMLESS = [
    *(".env.example", ".env.sample", "a/.env.template", ".env.dist", "environment.py", "env", "dotenv.md"),
    *(
        "id_rsa.pub",
        "id_ed25519.pub",
        ".env.example~",
        "id_rsa.pub.bak",
        "a~",
        "tfstate.md",
        "key.py",
        "keys",
        "pem.txt",
        "config.json",
        "kube/config",
        "credentials.py",
    ),
]


@pytest.mark.parametrize("name", SECRETS)
def test_name_of_a_secret_is_known(name: str) -> None:
    assert is_secret(name.split("/"))


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_name_is_not_taken_for_a_secret(name: str) -> None:
    assert not is_secret(name.split("/"))


def test_secrets_below_a_folder_are_left_out_unless_named(tmp_path: Path) -> None:
    for name in (
        *SECRETS,
        *HARMLESS,
        ".ssh/known_hosts",
        ".aws/config",
        "a/.config/gcloud/x/y.json",
        "a/.config/z.ini",
    ):
        written(tmp_path / name, name)
    (tmp_path / "link").symlink_to(".env")
    (tmp_path / "into").symlink_to(".ssh/known_hosts")
    with store(tmp_path) as stored:
        assert set(loaded(stored)) == {*HARMLESS, "a/.config/z.ini"}
        assert stored.info.skipped == {SECRET: len(SECRETS) + 3 + 2}
        assert stored.info.remarks() == [
            f"left out: {len(SECRETS) + 5} (likely a secret: name the file itself to include it)"
        ]
    with store(Paths([tmp_path / ".env", tmp_path / "keys"])) as stored:
        assert loaded(stored) == {".env": ".env", "keys": "keys"}
    with store(tmp_path / "tls.key") as stored:
        assert loaded(stored) == "tls.key"


def test_glob_names_no_secret(tmp_path: Path) -> None:
    written(tmp_path / "a.pem")
    with pytest.raises(ContextRefused, match=r"\*\.pem matches no file.*name the file itself"):
        store(tmp_path / "*.pem")


def test_secrets_in_an_archive_are_left_out(tmp_path: Path) -> None:
    for name in ("app/.env", "app/main.py", "home/.ssh/config"):
        written(tmp_path / "tree" / name, name)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "tree", "")
    with store(tmp_path / "a.tar") as stored:
        assert loaded(stored) == {"app/main.py": "app/main.py"}
        assert stored.info.skipped == {SECRET: 2}


def test_secrets_in_an_archive_of_windows_are_left_out(tmp_path: Path) -> None:
    names = ["proj\\.ssh\\config", "home\\.aws\\credentials", "keys\\id_rsa", "u\\.netrc", "src\\main.py"]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("src\\", "")
        for name in names:
            archive.writestr(name, "text")
    with store(tmp_path / "a.zip") as stored:
        assert loaded(stored) == {"src/main.py": "text"}
        assert stored.info.skipped == {SECRET: 4}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    with store(tmp_path / "a.tar") as stored:
        assert loaded(stored) == {"src\\main.py": ""}
        assert stored.info.skipped == {SECRET: 4}
