"""The lines of a journal's files, as typed values."""

import hashlib
from typing import Annotated, Any

import msgspec

from rlm_broker.broker.clients.base import CallId
from rlm_broker.broker.clients.recording import Request
from rlm_broker.events.redaction import LONGEST_CHARS, redacted
from rlm_broker.journal.paid import PaidCall
from rlm_broker.results import Call
from rlm_broker.usage import Usage
from sandbox_worker.wire.text_json import encode_escaped

DIGEST_BYTES = 16
"""Bytes of a digest: among a billion items, two share one with a probability of 1 in 10^21."""
HOLE = b"\0\0"
"""Bytes that a power cut may leave in place of text. JSON has none, and text in UTF-16 has single zeros."""
Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Hexadecimal = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2})*\Z")]
"""Bytes as hexadecimal digits."""


class Used(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Usage of calls of one model, in the shape of `Usage.to_dict`."""

    total_calls: Count = 0
    total_input_tokens: Count = 0
    total_output_tokens: Count = 0
    total_cost: Amount | None = None
    stored_calls: Count = 0
    cached_input_tokens: Count = 0

    @staticmethod
    def of(usage: Usage) -> "Used":
        """Return a usage as a line has it."""
        return Used(*msgspec.structs.astuple(msgspec.convert(usage, Used, from_attributes=True)))

    def usage(self) -> Usage:
        """Return the usage."""
        return Usage(*msgspec.structs.astuple(self))


class Finished(msgspec.Struct, gc=False):
    """The part of a line of results that a further process needs; all else in the line is skipped."""

    id: str
    status: str
    digest: Hexadecimal
    usage: dict[str, Used] = {}


class CallLine(msgspec.Struct, omit_defaults=True):
    """One call that was paid: a line of a segment.

    Attributes:
        item: Id of the item on whose behalf it was made.
        n: Number of the line: a later line has a larger one, over all segments and processes.
        key: Digest of the request, in hexadecimal digits; its answer is found by it.
        depth: Depth of the call in its tree.
        model: Name of the model that served.
        text: Answer, word for word: the run that goes on needs it as it was.
        id: Place of the call in its tree.
        request: What was asked, without secrets; very long texts lose their middle. It is there for people.
    """

    item: str
    n: int
    key: str
    depth: int
    model: str
    text: str = ""
    problem: str | None = None
    requested: str | None = None
    used: Used = Used()
    id: CallId | None = None
    request: Request | None = None

    @staticmethod
    def of(item: str, n: int, paid: PaidCall) -> "CallLine":
        """Return the line of a call."""
        call, request = paid.call, paid.request
        if request is not None:
            request = msgspec.structs.replace(request, messages=redacted(request.messages, LONGEST_CHARS))
        used = Used.of(call.usage)
        key = paid.key.hex()
        answer = (call.root_model, call.response, call.problem, call.requested_model, used)
        return CallLine(item, n, key, paid.depth, *answer, id=paid.id, request=request)

    def encoded(self) -> bytes:
        """Return the line as bytes, with its end."""
        return encode_escaped(self) + b"\n"


class CallHead(msgspec.Struct, gc=False):
    """The part of a call's line that a scan needs; the texts in it are skipped."""

    item: str
    n: int
    model: str = ""
    used: Used = Used()
    again: bool = False


class CallAnswer(msgspec.Struct, gc=False):
    """The part of a call's line that a further attempt needs: the request is skipped."""

    key: Hexadecimal
    depth: int
    model: str
    text: str = ""
    problem: str | None = None
    requested: str | None = None
    used: Used = Used()

    def paid(self) -> PaidCall:
        """Return the call."""
        call = Call(self.model, self.text, self.used.usage(), 0.0, self.requested, self.problem)
        return PaidCall(bytes.fromhex(self.key), self.depth, call)


class Again(msgspec.Struct):
    """A line of a segment: the calls of the item with a smaller number are void, since the item begins anew."""

    item: str
    n: int
    again: bool = True


def digest(text: str) -> bytes:
    """Return the digest of a text, such as an item's id."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def is_torn(line: bytes) -> bool:
    """Whether a kill or a power cut may have left a line of a file: it has no end, or a hole."""
    return not line.endswith(b"\n") or HOLE in line


def line_of(value: Any) -> bytes:
    """Return a value as a line of JSON, with its end."""
    return encode_escaped(value) + b"\n"
