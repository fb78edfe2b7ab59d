"""Names of files that likely hold secrets. Such a file is in a context only if the user names it itself."""

import re
from collections.abc import Sequence
from typing import Final

SECRET: Final = "likely a secret: name the file itself to include it"
"""Reason for files that are left out since they likely hold secrets."""

FILES: Final = (
    # variables of programs and services
    *(".env", ".env.*", "*.env", ".envrc"),
    # keys and what holds them
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.p8", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    # logins
    *(".netrc", "_netrc", ".pgpass", ".my.cnf", ".htpasswd", ".git-credentials", ".npmrc", ".pypirc", ".dockercfg"),
    *("credentials", "credentials.json", "client_secret*.json", "service-account*.json", "service_account*.json"),
    *(".docker/config.json", ".kube/config", ".s3cfg", ".boto", ".vault-token"),
    # state of a tool that has been given any of these
    "*.tfstate",
)
"""Patterns of the end of a path: the name, or the folder and the name."""

FOLDERS: Final = (".ssh", ".aws", ".gnupg", ".azure", ".config/gcloud", ".config/gh", ".password-store")
"""Folders of which all files are left out."""

HARMLESS: Final = (".env.example", ".env.sample", ".env.template", ".env.dist", "*.pub")
"""Exceptions to the patterns: examples without values, and public keys."""

_COPIES: Final = ("~", ".bak", ".backup", ".old", ".orig", ".save", ".swp", ".gz", ".bz2", ".xz", ".zst")
"""Endings of copies that tools leave, and of compressed files."""


def is_secret(parts: Sequence[str], *, is_folder: bool = False) -> bool:
    """Whether the entry at `parts` below a folder likely holds secrets, by its name alone. Upper and lower case are
    equal.

    A name is looked at with and without the endings of copies. The caller has asked about the entry's parents.
    """
    tail = "/".join(parts[-2:]).lower()
    if is_folder:
        return _FOLDERS.search(tail) is not None
    original = tail
    while ending := next((each for each in _COPIES if original.endswith(each)), ""):
        original = original.removesuffix(ending)
    if _HARMLESS.search(original):
        return False
    return any(_FILES.search(each) for each in (tail, original))


def leads_to_secret(parts: Sequence[str]) -> bool:
    """Whether the file at `parts`, or a folder on the way to it, likely holds secrets."""
    folders = (parts[max(0, end - 2) : end] for end in range(1, len(parts)))
    return is_secret(parts) or any(is_secret(folder, is_folder=True) for folder in folders)


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that finds a path with one of these ends. A `*` is any text within one part."""
    choices = (re.escape(pattern).replace(r"\*", "[^/]*") for pattern in patterns)
    return re.compile(rf"(?:^|/)(?:{'|'.join(choices)})\Z")


_FILES: Final = _any_of(FILES)
_FOLDERS: Final = _any_of(FOLDERS)
_HARMLESS: Final = _any_of(HARMLESS)
