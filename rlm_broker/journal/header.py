"""The header of a journal: the settings that its results depend on, and how other ones differ from them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rlm_broker.errors import ConfigurationError
from rlm_broker.journal import disk
from rlm_broker.values.text import clip
from sandbox_worker.wire.text_json import decode_escaped, encode_escaped

FORMAT = 1
"""Version of the format of a journal. Journals of other versions are refused."""
NAME = "header.json"
MOST_SHOWN = 3
"""Differences that an error names."""
MOST_CHARS = 60
"""Characters of a value that an error shows."""


class Header(msgspec.Struct):
    """Settings of a batch.

    Attributes:
        rlm_broker_journal: Version of the format, see `FORMAT`.
        seed: Seed of the sandbox of all runs; None if a lent sandbox has none.
        settings: All else on which results depend, as JSON values.
    """

    rlm_broker_journal: int
    seed: int | None
    settings: dict[str, Any]


def read_header(folder: Path) -> Header | None:
    """Return the header of a journal; None if there is none.

    Raises:
        ConfigurationError: It cannot be read, or is of another version.
    """
    path = folder / NAME
    try:
        with disk.open_to_read(path) as file:
            header = decode_escaped(file.read(), Header)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not the header of a journal: {error}") from None
    if header.rlm_broker_journal != FORMAT:
        raise ConfigurationError(f"{path} has another version of the format: go on with the release that wrote it")
    return header


def write_header(folder: Path, header: Header) -> None:
    """Write the header of a new journal.

    Raises:
        OSError: The disk is full, or broken.
    """
    written = folder / f"{NAME}.new"
    disk.remove(written)
    descriptor = disk.open_to_append(written)
    with open(descriptor, "rb"):
        disk.append(descriptor, encode_escaped(header), 0)
        disk.sync(descriptor)
    disk.put_in_place(written, folder / NAME)


def require_same(folder: Path, written: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse settings that differ from those of a journal.

    Raises:
        ConfigurationError: They differ; the message shows the first differences.
    """
    before, after = dict(_flat(written)), dict(_flat(now))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if not names:
        return
    shown = "; ".join(f"{name} was {_short(before.get(name))} and is {_short(after.get(name))}" for name in names[:3])
    more = f"; and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    raise ConfigurationError(
        f"the journal {folder} has results of other settings: {shown}{more}; give the same settings, or another file "
        "for the results"
    )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not name):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _short(value: Any) -> str:
    return clip(repr(value), MOST_CHARS)
