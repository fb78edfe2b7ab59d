"""Time zones on the wire: the distance from UTC in microseconds, or the name of a zone."""

import datetime
import functools
import re
import sys
from pathlib import Path
from typing import Any, Final

from sandbox_worker.wire.errors import ValueProblem

_NAME: Final = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,2}")


def encoded(zone: datetime.tzinfo | None) -> int | str | None:
    """Return what stands for a zone.

    Raises:
        ValueProblem: It is of another class than the standard library's two.
    """
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        return zone.utcoffset(None) // datetime.timedelta(microseconds=1)
    zoneinfo: Any = sys.modules.get("zoneinfo")
    name = getattr(zone, "key", None) if zoneinfo is not None and type(zone) is zoneinfo.ZoneInfo else None
    if name is not None:
        return str(name)
    raise ValueProblem(f"has the time zone {zone!r:.60}: use datetime.timezone or zoneinfo.ZoneInfo")


def decoded(zone: Any) -> datetime.tzinfo | None:
    """Return what `encoded` stands for.

    Raises:
        ValueProblem: There is no such zone here.
        ValueError: The distance is a day or more.
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
    """Return a zone from a file. A name that is none would have `zoneinfo` look for a module."""
    import zoneinfo  # most processes never need it

    if not any(Path(folder, name).is_file() for folder in zoneinfo.TZPATH) and name not in _packaged():
        raise ValueProblem(f"the time zone {name!r} is not known here: it needs the package tzdata")
    return zoneinfo.ZoneInfo(name)


@functools.cache
def _packaged() -> set[str]:
    import zoneinfo

    return zoneinfo.available_timezones()
