"""Sessions of each owner: one owner cannot take those of all."""

import pytest

from rlm_broker.hosting.owner import Busy, Owner
from rlm_broker.mcp.sessions import IDLE_S, Sessions

ANN, BOB = Owner("ann"), Owner("bob")


def test_owner_with_too_many_sessions_is_refused() -> None:
    now = [0.0]
    sessions = Sessions(2, lambda: now[0])
    for name in ("a", "b"):
        sessions.require_room(ANN)
        sessions.use(ANN, name)
    with pytest.raises(Busy, match="this key has 2 sessions: end one first"):
        sessions.require_room(ANN)
    sessions.require_room(BOB)
    sessions.end(ANN, "a")
    sessions.require_room(ANN)
    sessions.use(ANN, "c")
    now[0] = IDLE_S - 1
    sessions.use(ANN, "b")
    now[0] = IDLE_S + 1
    sessions.require_room(ANN)  # "c" was idle too long
    sessions.use(ANN, "d")
    with pytest.raises(Busy):
        sessions.require_room(ANN)
    sessions.end(BOB, "unknown")
