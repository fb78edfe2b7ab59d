"""A table of cases as one test: each row is tried, and all rows that fail are reported together."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)


class Rows:
    """The rows of a table that failed so far."""

    def __init__(self) -> None:
        self._failed: list[BaseException] = []
        self._skipped: list[BaseException] = []
        self._tried = 0

    @contextmanager
    def trying(self, row: object) -> Iterator[None]:
        """Keep what a row raises, and go on."""
        self._tried += 1
        try:
            yield
        except FAILURES as error:
            error.add_note(f"row: {row!r:.500}")
            (self._skipped if isinstance(error, pytest.skip.Exception) else self._failed).append(error)

    def end(self) -> None:
        """Raise what the rows raised. If all were skipped, the test is."""
        if self._failed:
            raise BaseExceptionGroup(f"{len(self._failed)} of {self._tried} rows failed", self._failed)
        if len(self._skipped) == self._tried:
            raise self._skipped[0]


def table(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a test that is called once for each row, within one item.

    Fixtures are made once for all rows, but a `tmp_path` is a folder for each row. `pytest.mark.parametrize` makes an
    item for each row: that is for rows that need fresh fixtures, or seconds.

    Args:
        names: Parameters of the test that a row gives, as in `pytest.mark.parametrize`.
        rows: A tuple for several names, or the value for one.
    """
    fields = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    all_rows = list(rows)
    assert all_rows, "an empty table tests nothing"

    def values(fixtures: dict[str, Any], number: int, row: Any) -> dict[str, Any]:
        own = {}
        if "tmp_path" in fixtures:
            own["tmp_path"] = fixtures["tmp_path"] / str(number)
            own["tmp_path"].mkdir()
        return fixtures | own | ({fields[0]: row} if len(fields) == 1 else dict(zip(fields, row, strict=True)))

    def decorated(test: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(test)
        given = [each for each in signature.parameters.values() if each.name not in fields]

        @functools.wraps(test)
        def whole(**fixtures: Any) -> None:
            tried = Rows()
            for number, row in enumerate(all_rows):
                with tried.trying(row):
                    test(**values(fixtures, number, row))
            tried.end()

        @functools.wraps(test)
        async def whole_async(**fixtures: Any) -> None:
            tried = Rows()
            for number, row in enumerate(all_rows):
                with tried.trying(row):
                    await test(**values(fixtures, number, row))
            tried.end()

        made: Any = whole_async if inspect.iscoroutinefunction(test) else whole
        made.__signature__ = signature.replace(parameters=given)
        decorated_test: Callable[..., Any] = made
        return decorated_test

    return decorated
