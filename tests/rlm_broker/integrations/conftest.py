"""Stand-ins of the peers, which are found where a peer itself is not installed."""

import sys

from tests.support.places import PROJECT

sys.path.append(str(PROJECT / "tests/support/peers"))
