import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.sandbox.levels.level import IsolationWarning, candidates, unavailable, warn_if_unprotected
from sandbox_worker.wire.level import PROCESS, STANDARD, STRICT


@pytest.mark.parametrize(
    ("isolation", "allow_exec", "levels"),
    [
        ("auto", None, ("strict", "standard")),
        ("auto", False, ("strict", "standard")),
        ("auto", True, ("strict",)),
        ("strict", True, ("strict",)),
        ("standard", None, ("standard",)),
        ("standard", False, ("standard",)),
        ("process", None, ("process",)),
    ],
)
def test_level_name_stands_for_levels_to_try(isolation: str, allow_exec: bool | None, levels: tuple[str, ...]) -> None:
    """A name stands for levels to try, and "auto" never includes "process"."""
    assert tuple(level.name for level in candidates(isolation, allow_exec)) == levels


def test_an_unknown_level_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigurationError, match="no isolation level 'vault'; choose one of: auto, strict, standard, process"
    ):
        candidates("vault", None)


@pytest.mark.parametrize("isolation", ["Strict", "", None, 3, ["strict"], b"strict"])
def test_unknown_level_is_refused(isolation: object) -> None:
    with pytest.raises(ConfigurationError, match=r"no isolation level .*; choose one of: auto, strict"):
        candidates(isolation, None)  # type: ignore[arg-type]


def test_programs_are_refused_at_standard() -> None:
    """Programs at "standard" are refused because they could outlive their REPL."""
    with pytest.raises(ConfigurationError, match="'standard' cannot start programs"):
        candidates("standard", allow_exec=True)


def test_unavailable_level_names_reason_and_remedy() -> None:
    """An unavailable level names the reason and what would give it."""
    error = unavailable(STRICT, "landlock", "landlock: Operation not supported")
    assert str(error).startswith("isolation level 'strict' is not available here: landlock: Operation not supported. ")
    assert error.remedy is not None
    assert error.remedy in str(error)
    assert "`rlm-broker doctor`" in str(error)


def test_only_process_is_warned_of() -> None:
    with pytest.warns(IsolationWarning, match="not a security boundary"):
        warn_if_unprotected(PROCESS)
    warn_if_unprotected(STRICT)
    warn_if_unprotected(STANDARD)
