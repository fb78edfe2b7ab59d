"""What a prompt may consist of, and the prompts of a large query, which are decoded one at a time.

Content parts have the shape of OpenAI's API, and a chat message is one part more. They are typed to the last field: a
frame could hold so many empty lists or dicts that they would be gigabytes in memory.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, overload

import msgspec

from sandbox_worker.wire.errors import MessageInvalid

MAX_PARTS = 256
"""Content parts or messages of one prompt, and content parts of one message; a prompt with more is invalid."""
MAX_PROMPT_BYTES = 8 << 20
"""Bytes of one prompt as JSON; a larger one is refused. They are two million tokens, more than models read."""


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A content part that is text."""

    text: str


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A picture as a `data:` address. How much of its detail is looked at, the provider decides."""

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
    """A chat message, of a prompt that is a list of nothing else."""

    role: Literal["system", "user", "assistant"]
    content: Content


Prompt = str | Annotated[list[Part | MessagePart], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]
"""What code asks a model: a text, content parts, or chat messages."""


def are_messages(parts: Sequence[Part | MessagePart]) -> bool:
    """Return whether a prompt that is a list consists of chat messages.

    Raises:
        MessageInvalid: It has both messages and content parts.
    """
    messages = sum(isinstance(part, MessagePart) for part in parts)
    if 0 < messages < len(parts):
        raise MessageInvalid("a prompt is a list of content parts or of chat messages, and not of both")
    return messages > 0


_prompt: msgspec.json.Decoder[Prompt] = msgspec.json.Decoder(Prompt)


class Prompts(Sequence[Prompt]):
    """Prompts as they came, slices of their frame, each decoded anew whenever it is asked for.

    A query of 64 MB would be up to four times as large if all its prompts were decoded at once: CPython keeps a text
    with a single wide character in four bytes a character.
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
        """Decode one prompt; a slice decodes none.

        Raises:
            MessageInvalid: The prompt is neither text, content parts nor chat messages, or it is larger than
                `MAX_PROMPT_BYTES`.
        """
        if isinstance(index, slice):
            return Prompts(self._raw[index])
        raw = self._raw[index]
        if len(raw) > MAX_PROMPT_BYTES:
            raise MessageInvalid(
                f"a prompt of {len(raw):,} bytes, more than {MAX_PROMPT_BYTES:,}: ask about a smaller part"
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
        """Some of the prompts, still as they came."""
        return Prompts([self._raw[index] for index in indexes])

    def is_text(self, index: int) -> bool:
        """Whether a prompt is text, told without decoding it."""
        return self._raw[index][0] == ord('"')

    def decoded_bytes(self, index: int) -> int:
        """Memory that a prompt may take once it is decoded, at most; 0 for one that is too large to be decoded."""
        if len(self._raw[index]) > MAX_PROMPT_BYTES:
            return 0
        raw = bytes(self._raw[index])
        is_narrow = raw.isascii() and b"\\u" not in raw
        return len(raw) if is_narrow else 4 * len(raw)

    def encoded(self, index: int) -> bytes:
        """A prompt as it came, as JSON."""
        return bytes(self._raw[index])
