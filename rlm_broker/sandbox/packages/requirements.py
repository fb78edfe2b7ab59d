"""Lists of packages, as users give them: checked, in one normal form, and with a name for each list."""

import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

from rlm_broker.errors import ConfigurationError

MAX_REQUIREMENTS, MAX_CHARS = 256, 256
"""Packages in a list, and characters of each. A longer list or entry is refused."""

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_CLAUSE = r"\s*(?:===|==|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9][A-Za-z0-9.!+_-]*(?:\.\*)?\s*"
_REQUIREMENT = re.compile(
    rf"({_NAME})\s*(?:\[\s*({_NAME}(?:\s*,\s*{_NAME})*)\s*\])?\s*({_CLAUSE}(?:,{_CLAUSE})*)?", re.ASCII
)


@dataclass(frozen=True)
class Requirements:
    """Packages to install, sorted and without repetitions, so that two lists with the same packages are equal.

    Attributes:
        texts: Names with extras and versions, in normal form.
    """

    texts: tuple[str, ...]

    @staticmethod
    def of(given: object) -> "Requirements":
        """Check a list such as `["numpy>=2", "six==1.16.0"]`, and return it in normal form.

        Raises:
            ConfigurationError: It is not a list, or an entry is not a name with versions.
        """
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ConfigurationError(
                f'packages must be a list such as ["numpy>=2", "six==1.16.0"], not {type(given).__name__}'
            )
        if len(given) > MAX_REQUIREMENTS:
            raise ConfigurationError(
                f"packages lists {len(given):,} packages, more than {MAX_REQUIREMENTS}: make a venv of them"
            )
        return Requirements(tuple(sorted({_normalised(each) for each in given})))

    @property
    def digest(self) -> str:
        """Name of an environment with these packages, for this Python on this kind of machine."""
        python = [sys.implementation.name, *sys.version_info[:3], os.path.realpath(sys.executable)]
        machine = [sysconfig.get_config_var("SOABI"), sysconfig.get_platform()]
        sources = sorted((name, value) for name, value in os.environ.items() if _NAMES_A_SOURCE.fullmatch(name))
        return hashlib.sha256(json.dumps([self.texts, python, machine, sources]).encode()).hexdigest()[:40]


_NAMES_A_SOURCE = re.compile(r"(?:UV|PIP)_\w*(?:INDEX|FIND_LINKS)\w*")
"""Variables that say where an installer finds packages. They are part of the digest: another source is another list."""


def _normalised(given: object) -> str:
    if not isinstance(given, str):
        raise ConfigurationError(f"packages: each must be text such as 'numpy>=2', not {type(given).__name__}")
    found = _REQUIREMENT.fullmatch(given.strip()) if len(given) <= MAX_CHARS else None
    if found is None:
        raise ConfigurationError(
            f"packages: {given[:80]!r} is not a name with versions, such as 'numpy>=2' or 'httpx[http2]==0.28.*': "
            "options, paths, addresses and markers are refused; make a venv with such packages, and give it as python="
        )
    name, extras, clauses = found.groups()
    extra = ",".join(sorted({_canonical(each) for each in (extras or "").split(",") if each.strip()}))
    versions = ",".join(sorted({re.sub(r"\s", "", each) for each in (clauses or "").split(",") if each.strip()}))
    return _canonical(name) + (f"[{extra}]" if extra else "") + versions


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
