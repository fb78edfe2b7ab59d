"""A table of cases as one test: each row is tried, and all rows that fail are reported together."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import pytest

Test = Callable[..., Any]
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
            if isinstance(error, pytest.skip.Exception):
                self._skipped.append(error)
            else:
                error.add_note(f"row: {row!r:.500}")
                self._failed.append(error)

    def end(self) -> None:
        """Raise what the rows raised. If all were skipped, the test is."""
        if self._failed:
            raise BaseExceptionGroup(f"{len(self._failed)} of {self._tried} rows failed", self._failed)
        if len(self._skipped) == self._tried:
            raise self._skipped[0]


def table(names: str, rows: Iterable[Any], *, at_once: int = 1) -> Callable[[Test], Test]:
    """Decorate a test that is called once for each row, within one item; else it means what `parametrize` does.

    Fixtures are made once for all rows, but `tmp_path` is a folder for each row, and `monkeypatch` is undone after it.
    `pytest.mark.parametrize` is for rows that need other fresh fixtures, or seconds. `at_once` rows are tried at the same
    time, in threads, if most of it is waiting.
    """
    fields = names.replace(",", " ").split()
    all_rows = list(rows)
    assert all_rows, "an empty table tests nothing"

    @contextmanager
    def values(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
        row = all_rows[number]
        own = {fields[0]: row} if len(fields) == 1 else dict(zip(fields, row, strict=True))
        if "tmp_path" in fixtures:
            own["tmp_path"] = fixtures["tmp_path"] / str(number)
            own["tmp_path"].mkdir()
        with pytest.MonkeyPatch.context() as patched:
            yield fixtures | own | ({"monkeypatch": patched} if "monkeypatch" in fixtures else {})

    def decorated(test: Test) -> Test:
        signature = inspect.signature(test)
        others = [each for each in signature.parameters.values() if each.name not in fields]

        @functools.wraps(test)
        def whole(**fixtures: Any) -> None:
            tried = Rows()

            def try_one(number: int) -> None:
                with tried.trying(all_rows[number]), values(fixtures, number) as given:
                    test(**given)

            with ThreadPoolExecutor(at_once) as threads:
                list((threads.map if at_once > 1 else map)(try_one, range(len(all_rows))))
            tried.end()

        @functools.wraps(test)
        async def whole_async(**fixtures: Any) -> None:
            tried = Rows()
            for number, row in enumerate(all_rows):
                with tried.trying(row), values(fixtures, number) as given:
                    await test(**given)
            tried.end()

        made: Any = whole_async if inspect.iscoroutinefunction(test) else whole
        made.__signature__ = signature.replace(parameters=others)
        return cast("Test", made)

    return decorated
