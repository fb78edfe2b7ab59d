"""Types of a prompt, and the prompts of a large query, which are decoded one at a time.

Content parts have the shape of OpenAI's API; a chat message is one more kind of part. Each field is typed, so that the
decoder refuses free JSON: a frame could hold empty lists or dicts that take gigabytes in memory.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, overload

import msgspec

from sandbox_worker.wire.errors import MessageInvalid

MAX_PARTS = 256
"""Maximum content parts or messages of one prompt, and content parts of one message; a prompt with more is invalid."""
MAX_PROMPT_BYTES = 8 << 20
"""Maximum bytes of one prompt as JSON; a larger one is refused. 8 MiB are about two million tokens, more than models
read."""


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A content part that is text."""

    text: str


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A picture as a `data:` address. `detail` is a hint to the provider, such as "low"."""

    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    """A content part that is a picture."""

    image_url: ImageUrl


class Audio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sound as base64 text, and its format, such as `wav`."""

    data: str
    format: str


class AudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio", forbid_unknown_fields=True):
    """A content part that is sound."""

    input_audio: Audio


Part = TextPart | ImagePart | AudioPart
Content = str | Annotated[list[Part], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]


class MessagePart(msgspec.Struct, frozen=True, tag_field="type", tag="message", forbid_unknown_fields=True):
    """A chat message. A prompt that has one consists of chat messages alone."""

    role: Literal["system", "user", "assistant"]
    content: Content


Prompt = str | Annotated[list[Part | MessagePart], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]
"""Prompt of a model: a text, content parts, or chat messages."""


def are_messages(parts: Sequence[Part | MessagePart]) -> bool:
    """Whether a prompt that is a list consists of chat messages.

    Raises:
        MessageInvalid: The prompt has both messages and content parts.
    """
    messages = sum(isinstance(part, MessagePart) for part in parts)
    if 0 < messages < len(parts):
        raise MessageInvalid("a prompt that is a list has either content parts or chat messages, not both")
    return messages > 0


_prompt: msgspec.json.Decoder[Prompt] = msgspec.json.Decoder(Prompt)


class Prompts(Sequence[Prompt]):
    """Sequence of prompts that are still encoded: slices of their frame, each decoded anew whenever it is read.

    If all prompts of a query were decoded at once, then they could take four times the bytes of the query. CPython
    stores a text at one, two or four bytes per character, and its widest character decides (PEP 393).

    Args:
        raw: One JSON text for each prompt.
    """

    def __init__(self, raw: Sequence[memoryview]) -> None:
        self._raw = raw

    def __len__(self) -> int:
        return len(self._raw)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> "Prompts": ...

    def __getitem__(self, index: int | slice) -> "Prompt | Prompts":
        """Decode one prompt; or return the prompts of a slice, still encoded.

        Raises:
            MessageInvalid: The prompt is neither text, content parts nor chat messages, or it is larger than
                `MAX_PROMPT_BYTES`.
        """
        if isinstance(index, slice):
            return Prompts(self._raw[index])
        raw = self._raw[index]
        if len(raw) > MAX_PROMPT_BYTES:
            raise MessageInvalid(
                f"a prompt has {len(raw):,} bytes, more than {MAX_PROMPT_BYTES:,}: ask about a smaller part"
            )
        try:
            return _prompt.decode(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise MessageInvalid(f"a prompt is neither text, content parts nor chat messages: {error}") from None

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        return all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def subset(self, indexes: Sequence[int]) -> "Prompts":
        """Return the prompts at `indexes`, still encoded."""
        return Prompts([self._raw[index] for index in indexes])

    def is_text(self, index: int) -> bool:
        """Whether a prompt is text. The prompt is not decoded for this."""
        return self._raw[index][0] == ord('"')

    def decoded_bytes(self, index: int) -> int:
        """Return the maximum bytes of a prompt in memory once it is decoded; 0 if it is too large to be decoded."""
        if len(self._raw[index]) > MAX_PROMPT_BYTES:
            return 0
        raw = bytes(self._raw[index])
        is_narrow = raw.isascii() and b"\\u" not in raw
        return len(raw) if is_narrow else 4 * len(raw)

    def encoded(self, index: int) -> bytes:
        """Return a prompt as its JSON, unchanged."""
        return bytes(self._raw[index])
