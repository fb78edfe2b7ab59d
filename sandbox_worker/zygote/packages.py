"""Packages of an environment in the place of the orchestrator's: what a fork server and its workers import from."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

from sandbox_worker.wire.zygote_control import Packages


def import_from(packages: Packages) -> None:
    """Import from these packages alone from here on. To be called in the zygote, before modules of the user's are.

    Modules of the worker's own that are loaded stay what they are, but for those that the environment may have, too.
    """
    for name in packages.own:
        sys.modules.pop(name, None)
    sys.path[:] = packages.search
    sys.path_importer_cache.clear()
    sys.executable = packages.executable
    sys.meta_path.append(_OwnFinder(packages.own))


class _OwnFinder:
    """Finds what the worker's own code needs and the environment does not have."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self._places.get(name)
        if place is None:
            return None
        if os.path.isdir(place):  # noqa: PTH112 - path objects copy pages
            return spec_from_file_location(name, f"{place}/__init__.py", submodule_search_locations=[place])
        return spec_from_file_location(name, place)
