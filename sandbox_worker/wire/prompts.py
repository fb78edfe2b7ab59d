"""Types of prompts, and the contexts of child runs. Of a long task, the prompt holds only the beginning and the end.

Content parts have the shape of OpenAI's API; a chat message is one more kind of part. Each field is typed, so that the
decoder refuses free JSON: the empty lists or dicts of one frame could take gigabytes in memory.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from sandbox_worker.wire.errors import MessageInvalid

MAX_PARTS = 256
"""Maximum content parts or messages of one prompt, and content parts of one message; a prompt with more is invalid."""
MAX_CONTEXT_NAME_CHARS = 64
"""Maximum characters of the name of a context of a child: of its file, or of its variable. A query with a longer name
is invalid."""
MAX_INLINE_BYTES = 1 << 14
"""Maximum bytes of a child's context, as JSON, inside the query. A larger context goes into a file."""
LONG_TASK_CHARS = 4_000
"""Maximum characters of a task standing in the child's prompt as a whole. Of a longer task the prompt holds the
beginning and the end; the whole task is the child's context."""
SHOWN_CHARS = 1_000
"""Characters of the beginning of a long task in the prompt, and as many of its end."""


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A content part of text."""

    text: str


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A picture as a `data:` address. `detail` is a hint to the provider, for example "low"."""

    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    """A content part with a picture.

    Example:
        ```python
        picture = ImagePart(image_url=ImageUrl(url="data:image/png;base64,iVBORw0KGgo="))
        prompt = MessagePart(role="user", content=[TextPart(text="What is it?"), picture])
        ```
    """

    image_url: ImageUrl


class Audio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sound as base64 text, and its format, for example `wav`."""

    data: str
    format: str


class AudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio", forbid_unknown_fields=True):
    """A content part with sound.

    Example:
        ```python
        AudioPart(input_audio=Audio(data="UklGRg==", format="wav"))
        ```
    """

    input_audio: Audio


Part = TextPart | ImagePart | AudioPart
Content = str | Annotated[list[Part], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]


class MessagePart(msgspec.Struct, frozen=True, tag_field="type", tag="message", forbid_unknown_fields=True):
    """A chat message. A prompt with one consists of chat messages alone.

    Example:
        ```python
        async def answer(query: Query) -> list[Slot]:
            return [Slot(str(isinstance(prompt[0], MessagePart))) for prompt in query.prompts]

        with sandbox.repl(answer=answer) as repl:
            print(repl.execute("print(llm_query([{'role': 'user', 'content': 'Hello'}]))").stdout)  # True
        ```
    """

    role: Literal["system", "user", "assistant"]
    content: Content


Prompt = str | Annotated[list[Part | MessagePart], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]
"""Prompt of a model: a text, content parts, or chat messages."""


def are_messages(parts: Sequence[Part | MessagePart]) -> bool:
    """Whether a list of parts consists of chat messages.

    Raises:
        MessageInvalid: The prompt has both messages and content parts.
    """
    messages = sum(isinstance(part, MessagePart) for part in parts)
    if 0 < messages < len(parts):
        raise MessageInvalid("a prompt that is a list has either content parts or chat messages, not both")
    return messages > 0


def beginning_and_end(text: str) -> str:
    """Return the first and last `SHOWN_CHARS` characters of a text, with the number of omitted ones between them."""
    left_out = len(text) - 2 * SHOWN_CHARS
    if left_out <= 0:
        return text
    whole = f"{text[:SHOWN_CHARS]}\n... [{left_out:,} characters left out here] ...\n{text[-SHOWN_CHARS:]}"
    return whole.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent


class ChildContext(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The context of one child run, in one of three places.

    Attributes:
        value: Text of the context's JSON, of at most `MAX_INLINE_BYTES`; or None.
        file: Name of a file in the scratch folder holding the context as UTF-8; or None.
        own: Name of one of the REPL's own contexts, for the child to share; or None.
        is_json: Whether the file holds JSON. Otherwise it holds plain text.
        is_task: Whether the context is the child's long task; the prompt is then its beginning and end.
    """

    value: str | None = None
    file: Annotated[str, msgspec.Meta(max_length=MAX_CONTEXT_NAME_CHARS)] | None = None
    own: Annotated[str, msgspec.Meta(max_length=MAX_CONTEXT_NAME_CHARS)] | None = None
    is_json: bool = False
    is_task: bool = False
