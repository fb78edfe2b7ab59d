"""What can be wrong with bytes that arrived.

WireError
├── FrameTooLarge     a length prefix announces more than the limit
├── FrameTruncated    the stream ended inside a frame
└── MessageInvalid    a whole frame is not one of our messages
    └── ValueInvalid  what came as a value is none

ValueRefused is raised before anything is sent: a value does not cross.
"""


class WireError(Exception):
    """The peer broke the protocol. The connection is useless after it: close it."""


class FrameTooLarge(WireError):
    """A frame is longer than the limit.

    Attributes:
        frame_bytes: Length of the payload that was announced or offered.
        limit_bytes: The limit it exceeds.
    """

    def __init__(self, frame_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"frame of {frame_bytes:,} bytes, the limit is {limit_bytes:,}")
        self.frame_bytes = frame_bytes
        self.limit_bytes = limit_bytes


class FrameTruncated(WireError):
    """The stream ended inside a frame."""


class MessageInvalid(WireError):
    """A frame is not JSON, or not one of the messages that may come here."""


class ValueInvalid(MessageInvalid):
    """What came as a value is none, or cannot be made here."""


class ValueRefused(Exception):
    """A value does not cross; the text says where in it, and why."""


class ValueProblem(Exception):
    """What is wrong with one part of a value, without its place. It leaves no function that encodes or decodes."""
