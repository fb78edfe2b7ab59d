"""Output of a block: text and displays from the connection, and bytes on descriptors 1 and 2 that init has read."""

import codecs
from collections.abc import Callable

from rlm_broker.display import Display
from rlm_broker.values.callback import Callback
from sandbox_worker.wire import messages
from sandbox_worker.wire.control import Written
from sandbox_worker.wire.headtail import HeadTail, OutputBounds
from sandbox_worker.wire.messages import Output, Stream

OnOutput = Callable[[Stream, str], None]
"""Called with each piece of output as it comes. An exception that it raises is logged once for each block."""


class BlockOutput:
    """Collects one block's output and passes it on as it comes. The bounds hold also if the worker ignores them.

    Args:
        bounds: Bounds of each of the two ways that a stream has: the connection and the descriptor. The head and tail
            that are kept stay within both together.
        on_output: Called with each piece; None for no such function.

    Attributes:
        displays: Displays of the block. The session has bounded them.
    """

    def __init__(self, bounds: OutputBounds, on_output: OnOutput | None) -> None:
        self._on_output = Callback.of(on_output, "on_output")
        self.displays: list[Display] = []
        # The REPL's own code keeps to the bounds of each way. Only output that model code forges is cut here.
        bounds = bounds.both_ways()
        self._kept = {"stdout": HeadTail(bounds, ""), "stderr": HeadTail(bounds, "")}
        self._text: dict[str, list[str]] = {"stdout": [], "stderr": []}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}

    def printed(self, output: Output) -> None:
        """Add text that Python code printed."""
        self._add(output.stream, output.text)

    def shown(self, message: Output | messages.Display) -> None:
        """Add text or a display that came over the connection."""
        if isinstance(message, Output):
            self.printed(message)
        else:
            self.displays.append(Display(dict([*message.pictures.items(), *message.texts.items()])))

    def written(self, written: Written) -> None:
        """Add bytes that were written to a descriptor, by C code or a program."""
        self._add(written.stream, self._decoders[written.stream].decode(written.data))

    def finish(self) -> tuple[str, str]:
        """Return all of stdout and all of stderr, with the tails that were kept."""
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
