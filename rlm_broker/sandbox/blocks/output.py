"""What a block printed and showed, put together from two ways: the connection, and descriptor output from init."""

import codecs
from collections.abc import Callable

from rlm_broker.callback import Callback
from rlm_broker.display import Display
from sandbox_worker.wire import messages
from sandbox_worker.wire.control import Written
from sandbox_worker.wire.headtail import HeadTail, OutputBounds
from sandbox_worker.wire.messages import Output, Stream

OnOutput = Callable[[Stream, str], None]
"""Called with each piece of output as it comes. What it raises is logged once for each block."""


class BlockOutput:
    """Collects one block's output within a limit, whatever the worker sends, and passes it on as it comes.

    Args:
        bounds: Of each of the two ways that a stream has. What is kept, head and tail, is within both together.

    Attributes:
        displays: What it showed; the session has bounded it.
    """

    def __init__(self, bounds: OutputBounds, on_output: OnOutput | None) -> None:
        self._on_output = Callback.of(on_output, "on_output")
        self.displays: list[Display] = []
        # An honest REPL keeps to the bounds either way: only a forged flood is cut here.
        bounds = bounds.both_ways()
        self._kept = {"stdout": HeadTail(bounds, ""), "stderr": HeadTail(bounds, "")}
        self._text: dict[str, list[str]] = {"stdout": [], "stderr": []}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}

    def printed(self, output: Output) -> None:
        """Text that Python code printed."""
        self._add(output.stream, output.text)

    def shown(self, message: Output | messages.Display) -> None:
        """What came over the connection: text, or a display."""
        if isinstance(message, Output):
            self.printed(message)
        else:
            self.displays.append(Display(dict([*message.pictures.items(), *message.texts.items()])))

    def written(self, written: Written) -> None:
        """Bytes that something wrote to a descriptor."""
        self._add(written.stream, self._decoders[written.stream].decode(written.data))

    def finish(self) -> tuple[str, str]:
        """All of stdout and of stderr."""
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        for stream in streams:
            if tail := self._kept[stream].finish():
                self._text[stream].append(tail)
                self._on_output(stream, tail)
        return "".join(self._text["stdout"]), "".join(self._text["stderr"])

    def _add(self, stream: Stream, text: str) -> None:
        if head := self._kept[stream].add(text):
            self._text[stream].append(head)
            self._on_output(stream, head)
