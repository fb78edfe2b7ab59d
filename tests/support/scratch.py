"""Names of the scratch folder that code sees on this machine."""

import sys

from sandbox_worker.isolation import mounts

TEMPORARY = mounts.TEMPORARY if mounts.temporary_is_free([sys.prefix, sys.base_prefix, *sys.path]) else mounts.SCRATCH
"""Second name of the scratch folder at `strict`: the first one, if this Python or its packages lie below /tmp."""
