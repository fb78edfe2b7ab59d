"""Errors of the wire: faults in received bytes, and values that cannot be sent.

WireError
├── FrameTooLarge     a length prefix announces more than the limit
├── FrameTruncated    the stream ended inside a frame
└── MessageInvalid    a whole frame is not one of our messages
    ├── QueryTooLarge a query is longer than the limit
    └── ValueInvalid  bytes do not encode a value

ValueRefused is raised before any byte is sent: the value cannot cross the wire.
"""

import errno
from typing import Literal

FileKind = Literal["file", "missing", "folder", "permission", "too_large", "no_room"]
"""Why a file of a REPL is refused.

- `missing`: there is no such file or folder.
- `folder`: a folder has that name.
- `permission`: it may not be read, or not be changed; links are among these, since none is followed.
- `too_large`: it has more bytes, or more entries, than are taken.
- `no_room`: the scratch folder is full.
- `file`: any other reason.
"""
_KINDS: dict[int | None, FileKind] = {
    errno.ENOENT: "missing",
    errno.EISDIR: "folder",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.ELOOP: "permission",
    errno.EFBIG: "too_large",
    errno.ENOSPC: "no_room",
    errno.EDQUOT: "no_room",
}


def file_kind(error: OSError) -> FileKind:
    """Return the kind of a refusal by the kernel."""
    return _KINDS.get(error.errno, "file")


class WireError(Exception):
    """The peer broke the protocol. The connection is useless after it: close it."""


class FrameTooLarge(WireError):
    """A frame is longer than the limit.

    Attributes:
        frame_bytes: Announced or offered length of the payload.
        limit_bytes: Exceeded limit.
    """

    def __init__(self, frame_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"frame of {frame_bytes:,} bytes, the limit is {limit_bytes:,}")
        self.frame_bytes = frame_bytes
        self.limit_bytes = limit_bytes


class FrameTruncated(WireError):
    """The stream ended inside a frame."""


class MessageInvalid(WireError):
    """A frame is not JSON, or no message for its receiver."""


class QueryTooLarge(MessageInvalid):
    """A query is longer than the limit. The connection goes on: the query is answered with the text of this error.

    Attributes:
        id: Id of the query.
    """

    def __init__(self, id: str, query_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"the query is too large: {query_bytes:,} bytes, {limit_bytes:,} at most; pass a large text as a context, "
            "which takes any size: rlm_query(task, context=part)"
        )
        self.id = id


class ValueInvalid(MessageInvalid):
    """Bytes do not encode a value, or this process cannot build the value."""


class ValueRefused(Exception):
    """A value cannot cross the wire. The text names the place in the value, and the reason."""


class ValueProblem(Exception):
    """A fault in one part of a value, without its place.

    Encoders and decoders of whole values turn it into `ValueRefused` or `ValueInvalid`, with the place.
    """
