"""Imports of a fork server and its workers from another environment than the orchestrator's."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

from sandbox_worker.wire.zygote_control import Packages


def import_from(packages: Packages) -> None:
    """Have all later imports come from these packages alone.

    Call this in the fork server before it imports modules of the user. Loaded modules of the worker's own code stay
    loaded. Only packages in `packages.own` are imported anew, since the environment may have another version of them.
    """
    for name in packages.own:
        sys.modules.pop(name, None)
    sys.path[:] = packages.search
    sys.path_importer_cache.clear()
    sys.executable = packages.executable
    sys.meta_path.append(_OwnFinder(packages.own))


class _OwnFinder:
    """Finder of last resort, for packages that the worker's own code needs and the environment does not have."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self._places.get(name)
        if place is None:
            return None
        if os.path.isdir(place):  # noqa: PTH112 - pathlib would touch, and so copy, pages of the fork server
            return spec_from_file_location(name, f"{place}/__init__.py", submodule_search_locations=[place])
        return spec_from_file_location(name, place)
