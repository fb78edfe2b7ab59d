"""Connections without a token, and bounds of their number, their silence and their memory.

Each shows a token, or uses the field's one-shot protocol, or is turned away.
"""

import asyncio
import contextlib
import resource
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

from rlm_broker.broker.transport import one_shot
from rlm_broker.broker.transport.connection import Connection
from sandbox_worker.wire.errors import WireError
from sandbox_worker.wire.frames import FrameDecoder, Payload, encode_frame
from sandbox_worker.wire.messages import decode_hello

MOST_SILENT = 256
"""Maximum silent connections. When one more comes, the longest silent one is dropped."""
MOST_SERVED = 2048
"""One-shot requests served at the same time. A further one is refused as `BUSY`."""
DESCRIPTOR_SHARE = 4
"""Divisor of the process's limit of descriptors: served requests may hold a quarter. REPLs and files need the rest."""
MOST_WEIGHT = 128 << 20
"""Maximum bytes of memory of one-shot requests and their unread replies, see `request_weight`. A further request is
refused as `BUSY`."""
SMALL_BYTES = 1 << 12
"""Bytes of a request parsed at once. Of larger ones, one is parsed in each turn of the event loop."""
BUSY = "busy: the handler serves as many one-shot requests as it can hold; try again in 1 s"

STRING_WEIGHT = 1024
"""Bytes of memory for each string of a request: a prompt, its call and its part of the reply."""
MOST_STRINGS = 1 << 14
"""Maximum strings in the weight of a request: a long text may have more quotes, but no request has more prompts."""
READ_BYTES = 1 << 16
"""Bytes read at once. Between two reads, all other connections have their turn."""
MAX_HELLO_BYTES = 512
"""Maximum bytes of the first frame on a port without the one-shot protocol. A `Hello` has about 70."""
ONE_AT_A_TIME = "one request at a time: send the next one after the reply"
NOT_SERVED = "this port serves the one-shot protocol only when it was started with one_shot=True"

OneShotServer = Callable[[bytes], Awaitable[bytes]]
"""Function that answers one request of the field's one-shot protocol: payload in, payload out."""


def request_weight(payload: bytes | bytearray) -> int:
    """Estimate the memory of a served request in bytes without parsing it: wide characters, and an object for each two
    quotes."""
    return 8 * len(payload) + STRING_WEIGHT * min(MOST_STRINGS, payload.count(b'"') // 2)


class Stranger(Protocol):
    """A connection without a token."""

    def hang_up(self) -> None:
        """Close the connection at once."""
        ...

    async def end(self) -> None:
        """Close the connection, and wait until the request served for it has ended."""
        ...


class Strangers:
    """The connections of one listener without a token.

    Args:
        silence_s: Seconds of silence after which one of them is dropped.

    Attributes:
        present: All these connections.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.present: set[Stranger] = set()
        self._silent: OrderedDict[Stranger, float] = OrderedDict()
        """Each silent connection → the loop's time of its end. The longest silent comes first."""
        self._sweep: asyncio.TimerHandle | None = None
        self._weights: dict[Stranger, int] = {}
        self._weight = 0
        self._served = 0
        self._beginning = asyncio.Lock()

    def close(self) -> None:
        """Cancel the timer."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    # -- silence -----------------------------------------------------------------------------------------------------

    def awaits(self, stranger: Stranger) -> None:
        """Drop `stranger` unless it says something within `silence_s`.

        One timer serves all connections: most of them speak long before their time, and would only set and cancel one.
        """
        loop = asyncio.get_running_loop()
        self._silent[stranger] = until = loop.time() + self.silence_s
        self._silent.move_to_end(stranger)
        if self._sweep is None:
            self._sweep = loop.call_at(until, self._drop_the_late)
        if len(self._silent) > MOST_SILENT:
            self.drop_longest_silent()

    def hears(self, stranger: Stranger) -> None:
        """Stop the time of `stranger`, after it has said something or is gone."""
        self._silent.pop(stranger, None)

    def drop_longest_silent(self) -> None:
        """Drop the connection silent for longest, if there is one, to make room."""
        if self._silent:
            stranger, _ = self._silent.popitem(last=False)
            stranger.hang_up()

    def _drop_the_late(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        while self._silent:
            until = next(iter(self._silent.values()))
            if until > loop.time():
                self._sweep = loop.call_at(until, self._drop_the_late)
                return
            self.drop_longest_silent()

    # -- memory and requests -----------------------------------------------------------------------------------------

    def weigh(self, stranger: Stranger, weight: int) -> bool:
        """Set the memory of `stranger` in bytes.

        Returns:
            Whether there is room for them. A stranger always has room while no other holds memory.
        """
        self._weight += weight - self._weights.pop(stranger, 0)
        if weight:
            self._weights[stranger] = weight
        return self._weight <= MOST_WEIGHT or len(self._weights) <= 1

    def begins(self) -> bool:
        """Count one more served request, unless there are too many. Call `ends` afterwards.

        Returns:
            Whether the request may be served.
        """
        if self._served >= min(MOST_SERVED, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // DESCRIPTOR_SHARE):
            return False
        self._served += 1
        return True

    async def turn(self, payload_bytes: int) -> None:
        """Wait until a request of this size may be parsed: many large ones in a row would keep the event loop busy."""
        if payload_bytes > SMALL_BYTES:
            async with self._beginning:
                await asyncio.sleep(0)

    def ends(self, _served: object = None) -> None:
        """Count one served request less."""
        self._served -= 1


class Arrival:
    """One connection without a token.

    It has no asyncio transport: most of these connections bring one request and end, and a transport with its first
    task takes longer than the request. A connection that shows its token gets one (`Listener`).

    Args:
        connected: Non-blocking socket. It is closed, or handed over with its token.
        strangers: Counts the connection, and drops it when there are too many.
        claim: Returns the connection that a token was made for, or None.
        hand_over: Called with the socket, the claimed connection and the bytes that came behind the token.
        server: Answers one-shot requests; None turns them away.
    """

    def __init__(
        self,
        connected: socket.socket,
        strangers: Strangers,
        claim: Callable[[str], Connection | None],
        hand_over: Callable[[socket.socket, Connection, bytes], object],
        server: OneShotServer | None,
    ) -> None:
        self._socket = connected
        self._fd = connected.fileno()
        self._loop = asyncio.get_running_loop()
        self._strangers = strangers
        self._claim = claim
        self._hand_over = hand_over
        self._server = server
        self._frames = FrameDecoder(one_shot.MAX_REQUEST_BYTES if server else MAX_HELLO_BYTES)
        self._serving: asyncio.Task[None] | None = None
        self._request_weight = 0
        self._unsent = memoryview(b"")
        self._is_open = True
        self._call_cancelled = False
        self._refused = False
        self._is_last = False
        self._loop.add_reader(self._fd, self._read)
        strangers.present.add(self)
        strangers.awaits(self)

    def hang_up(self) -> None:
        """Close the connection at once, without a message."""
        if not self._is_open:
            return
        self._stop_watching()
        self._socket.close()
        if self._serving is None:
            self._leave()
        else:
            self._strangers.hears(self)
            self._cancel_call()
            self._serving.add_done_callback(lambda _: self._leave())

    async def end(self) -> None:
        """Close the connection, and wait for the end of the request served for it."""
        self.hang_up()
        if self._serving is not None:
            await asyncio.wait({self._serving})

    def _stop_watching(self) -> None:
        self._is_open = False
        self._loop.remove_reader(self._fd)
        if self._unsent:
            self._unsent = memoryview(b"")
            self._loop.remove_writer(self._fd)

    def _leave(self) -> None:
        self._strangers.hears(self)
        self._strangers.present.discard(self)
        self._strangers.weigh(self, 0)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data and self._unsent:  # the client sends no further request, and may still read its reply
            self._is_last = True
            self._loop.remove_reader(self._fd)
        elif not data:  # the client has left
            self.hang_up()
        elif not self._refused:
            self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            payloads = self._frames.feed(data)
        except WireError as error:
            self._refuse(str(error))
            return
        if payloads:
            self._strangers.hears(self)
            self._first(payloads[0], rest=payloads[1:])
        held = self._request_weight + self._frames.buffered_bytes
        if held and self._is_open and not self._refused and not self._strangers.weigh(self, held):
            self._refuse(BUSY)

    def _first(self, payload: Payload, rest: list[Payload]) -> None:
        if self._serving is not None or self._unsent:
            self._refuse(ONE_AT_A_TIME)
        elif len(payload) > MAX_HELLO_BYTES or one_shot.is_one_shot(payload):
            self._one_shot(payload, rest)
        else:
            self._show(decode_hello(payload).token, rest)

    def _show(self, token: str, rest: list[Payload]) -> None:
        connection = self._claim(token)
        if connection is None:  # no reply: a stranger must not learn that tokens exist
            self.hang_up()
            return
        early = b"".join(encode_frame(payload, len(payload)) for payload in rest) + self._frames.pending
        self._frames = FrameDecoder(0)  # all further bytes belong to `connection`
        self._stop_watching()
        self._leave()
        self._hand_over(self._socket, connection, early)

    # -- the one-shot protocol ---------------------------------------------------------------------------------------

    def _one_shot(self, payload: Payload, rest: list[Payload]) -> None:
        if self._server is None or rest:
            self._refuse(ONE_AT_A_TIME if self._server else NOT_SERVED)
            return
        weight = request_weight(payload)
        if not (self._strangers.weigh(self, weight) and self._strangers.begins()):
            self._refuse(BUSY)
        else:
            self._request_weight = weight
            self._serving = self._loop.create_task(self._serve(self._server, bytes(payload)))
            self._serving.add_done_callback(self._strangers.ends)

    async def _serve(self, server: OneShotServer, payload: bytes) -> None:
        try:
            await self._strangers.turn(len(payload))
            reply = await server(payload)
        except Exception as error:  # noqa: BLE001 - a bug of the server must not leave the caller without a reply
            reply = one_shot.error_reply(f"{type(error).__name__}: {error}")
        self._serving = None
        self._request_weight = 0
        self._write(reply)
        if self._is_open:
            self._strangers.weigh(self, len(self._unsent) + self._frames.buffered_bytes)
            self._strangers.awaits(self)  # the next request, or the end of the connection

    def _cancel_call(self) -> None:
        """Cancel the call once: a second cancellation would hit the clean-up of the model's client."""
        if self._serving is not None and not self._call_cancelled:
            self._call_cancelled = True
            self._serving.cancel()

    def _refuse(self, why: str) -> None:
        self._refused = True
        self._strangers.weigh(self, 0)
        self._frames = FrameDecoder(0)
        self._cancel_call()
        self._write(one_shot.error_reply(why))
        if self._is_open:
            self._strangers.awaits(self)  # the end of the connection

    # -- what is sent ------------------------------------------------------------------------------------------------

    def _write(self, payload: bytes) -> None:
        """Send a reply, or its beginning now and the rest when the client has read."""
        if not self._is_open:
            return
        frame = encode_frame(payload, 0xFFFF_FFFF)
        if self._unsent:
            self._unsent = memoryview(b"".join([self._unsent, frame]))
            return
        self._unsent = memoryview(frame)
        self._send()
        if self._unsent:
            self._loop.add_writer(self._fd, self._write_on)

    def _write_on(self) -> None:
        self._send()
        if self._unsent or not self._is_open:
            return
        self._loop.remove_writer(self._fd)
        if self._is_last:
            self.hang_up()
        elif self._serving is None:
            self._strangers.weigh(self, self._frames.buffered_bytes)

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the other side has reset the connection, and reads no reply
            self.hang_up()
            return
        if self._refused and not self._unsent:
            # Not closed: the kernel answers data for a closed socket with a reset, which overtakes the reason.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
