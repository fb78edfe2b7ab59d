"""Harbor, by one task, since it has no suite for environments of others."""

from scripts.integrations.peer import Peer

INSIDE = "scripts.integrations.inside"

PEER = Peer(
    name="harbor",
    packages=("harbor==0.26.0",),
    python="3.12",
    programs=(f"{INSIDE}.harbor_programs:task",),
)
