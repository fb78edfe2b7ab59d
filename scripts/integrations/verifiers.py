"""Verifiers, by one task, since it has no suite for environments of others."""

from scripts.integrations.peer import Peer

INSIDE = "scripts.integrations.inside"

PEER = Peer(
    name="verifiers",
    packages=("verifiers==0.4.0",),
    programs=(f"{INSIDE}.verifiers_programs:task",),
    opened=f"{INSIDE}.verifiers_programs:opened",
)
