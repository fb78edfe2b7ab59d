"""Time zones on the wire: the offset from UTC in microseconds, or the name of a zone."""

import datetime
import functools
import re
import sys
from pathlib import Path
from typing import Any, Final

from sandbox_worker.wire.errors import ValueProblem

_NAME: Final = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,2}")


def encoded(zone: datetime.tzinfo | None) -> int | str | None:
    """Return the wire form of a zone: its offset in microseconds, its name, or None for no zone.

    Raises:
        ValueProblem: The zone is neither a `datetime.timezone` nor a `zoneinfo.ZoneInfo`.
    """
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        return zone.utcoffset(None) // datetime.timedelta(microseconds=1)
    zoneinfo: Any = sys.modules.get("zoneinfo")
    name = getattr(zone, "key", None) if zoneinfo is not None and type(zone) is zoneinfo.ZoneInfo else None
    if name is not None:
        return str(name)
    raise ValueProblem(f"has a time zone of another class, {zone!r:.60}: use datetime.timezone or zoneinfo.ZoneInfo")


def decoded(zone: Any) -> datetime.tzinfo | None:
    """Return the zone of a wire form that `encoded` made.

    Raises:
        ValueProblem: This machine has no zone of that name.
        ValueError: The offset is a day or more.
    """
    if zone is None:
        return None
    if type(zone) is int:
        if not zone:
            return datetime.UTC
        return datetime.timezone(datetime.timedelta(microseconds=zone))
    if type(zone) is not str or not _NAME.fullmatch(zone):
        raise ValueProblem(f"there is no time zone {zone!r:.60}")
    return _named(zone)


@functools.lru_cache(maxsize=1024)
def _named(name: str) -> datetime.tzinfo:
    """Return the zone of a name.

    The name is checked first: for an unknown name, `zoneinfo` would import a module that the peer named.
    """
    import zoneinfo  # imported here because most processes never need it

    if not any(Path(folder, name).is_file() for folder in zoneinfo.TZPATH) and name not in _packaged():
        raise ValueProblem(f"the time zone {name!r} is not known here: it needs the package tzdata")
    return zoneinfo.ZoneInfo(name)


@functools.cache
def _packaged() -> set[str]:
    import zoneinfo

    return zoneinfo.available_timezones()
