"""Silence on a link: how long it lasts, and whether the other side is dead or only busy.

A broker whose event loop stands still for some seconds, for example during an import, sends no heartbeats. If all
agents ended their runs then, a busy moment would cost the work of a whole cluster. But its kernel still acknowledges
what they send, which the kernel of a dead machine or behind a cut does not. So an agent is patient while there are
acknowledgements. A broker is not: the runs of an agent that stands still are better placed elsewhere.
"""

import socket
import struct
from typing import Protocol

LAST_ACK = struct.Struct("56xI")
"""Place of `tcpi_last_ack_recv` in Linux's `struct tcp_info`: milliseconds since the last acknowledgement."""


class Connected(Protocol):
    """A connected TCP socket."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """Return an option of the socket."""
        ...


class Silence:
    """The times of a link at which its other side gave a sign of life.

    Args:
        now: Time of the event loop.
        silence_s: Seconds without a sign, or without room for further messages, after which the other side is lost.
        patience_s: Seconds instead of these while its kernel acknowledges what is sent.

    Attributes:
        heard: Time at which bytes came last.
    """

    def __init__(self, now: float, silence_s: float, patience_s: float) -> None:
        self.heard = now
        self._silence_s = silence_s
        self._patience_s = patience_s
        self._taken = -1
        self._taken_at = now

    def why_lost(
        self, now: float, due: float, taken: int, *, has_room: bool, is_reading: bool, connected: Connected
    ) -> str | None:
        """Return why the other side counts as lost, or None. To be called regularly, several times in `silence_s`.

        Args:
            now: Time of the event loop.
            due: Time at which this call was due. This process stood still since then, so that time does not count.
            taken: Bytes that have left for the other side so far.
            has_room: Whether further messages may be sent.
            is_reading: Whether this side reads what comes.
            connected: The socket.
        """
        stalled = now - due
        self.heard, self._taken_at = min(now, self.heard + stalled), min(now, self._taken_at + stalled)
        if has_room or taken != self._taken:
            self._taken, self._taken_at = taken, now
        silent_s, stuck_s = now - self.heard, now - self._taken_at
        if max(silent_s, stuck_s) <= self._silence_s:
            return None
        if not is_reading:
            return f"this side took no message for {self._silence_s:g} s"
        limit = self._patience_s if acknowledged_within(self._silence_s, connected) else self._silence_s
        if silent_s > limit:
            return f"the other side was silent for {limit:g} s"
        return f"the other side took no message for {limit:g} s" if stuck_s > limit else None


def acknowledged_within(seconds: float, connected: Connected) -> bool:
    """Whether the kernel of the other side has acknowledged something in that time."""
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACK.size)
    return len(info) == LAST_ACK.size and LAST_ACK.unpack(info)[0] <= seconds * 1_000
