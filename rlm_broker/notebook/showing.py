"""The hook by which IPython shows an object of this package."""

from typing import Any


class Shown:
    """A base of what shows itself in a notebook: as HTML, as Markdown, and as its `repr`."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:  # noqa: ARG002 - IPython's
        from rlm_broker.notebook import pages  # 10 ms, which a program without a notebook need not pay

        return pages.of(self)
