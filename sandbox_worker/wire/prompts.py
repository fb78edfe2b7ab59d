"""Types of a prompt.

Content parts have the shape of OpenAI's API; a chat message is one more kind of part. Each field is typed, so that the
decoder refuses free JSON: a frame could hold empty lists or dicts that take gigabytes in memory.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from sandbox_worker.wire.errors import MessageInvalid

MAX_PARTS = 256
"""Maximum content parts or messages of one prompt, and content parts of one message; a prompt with more is invalid."""


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
