"""NeMo Gym, by one task, since it has no suite for environments of others."""

from scripts.integrations.peer import Peer

INSIDE = "scripts.integrations.inside"

PEER = Peer(
    name="nemo_gym",
    packages=("nemo-gym==0.4.0",),
    python="3.12",
    programs=(f"{INSIDE}.nemo_gym_programs:task",),
    opened=f"{INSIDE}.nemo_gym_programs:opened",
)
