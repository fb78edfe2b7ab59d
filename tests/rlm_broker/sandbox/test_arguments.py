"""Variables and a seed of one REPL: values that are refused, and those that its code finds."""

import re
from typing import Any

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.arguments import MAX_ENV_BYTES, environment_of
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.level import LevelName
from sandbox_worker.wire.messages import Environment
from tests.support.tables import table

LEVELS = pytest.mark.parametrize("level", ["strict", "standard"])
DRAWS = "import random; print(random.random())"
AFRESH = ReplLimits(max_replay_s=0)


@table(
    "env, why",
    [
        ("PATH=/bin", "env must be a dict from name to text, not str"),
        ({"": "x"}, "a variable's name must be text without '=', not ''"),
        ({"A=B": "x"}, "a variable's name must be text without '=', not 'A=B'"),
        ({1: "x"}, "a variable's name must be text without '=', not 1"),
        ({"PORT": 80}, "the variable PORT must be text, not int"),
        ({"A": "x\0y"}, "the variable 'A' has a NUL character"),
        ({"A\0": "x"}, "has a NUL character"),
        ({"A": "\ud800"}, "has lone surrogates"),
        ({"A": "x" * MAX_ENV_BYTES}, f"more than {MAX_ENV_BYTES:,}: give it in a file"),
    ],
)
def test_variable_that_cannot_be_set_is_refused(env: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        environment_of(env, None)


@table("seed", [-1, 1 << 32, True, "7", 1.0])
def test_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(ConfigurationError, match="seed must be an integer from 0"):
        environment_of(None, seed)


def test_nothing_given_is_nothing_said() -> None:
    assert environment_of(None, None) is None
    assert environment_of({}, None) is None
    assert environment_of({"A": ""}, 0) == Environment({"A": ""}, 0)


def test_bad_values_are_refused_where_they_are_given() -> None:
    with Sandbox(ReplLimits(max_frame_bytes=1 << 12)) as sandbox, sandbox.template() as template:
        makes: list[Any] = [sandbox.repl, template.repl]
        for make in makes:
            with pytest.raises(ConfigurationError, match="NUL"):
                make(env={"A": "\0"})
            with pytest.raises(ConfigurationError, match="seed must be"):
                make(seed=-1)
            with pytest.raises(ConfigurationError, match="limits must be a ReplLimits or a Limits, not dict"):
                make(limits={"memory_bytes": 1})
            with pytest.raises(ConfigurationError, match="env is too large for a message"):
                make(env={"A": "x" * (1 << 13)})


@LEVELS
@table("warm", [0, 1])
def test_variables_are_there_at_once_and_after_a_kill(level: LevelName, warm: int) -> None:
    look = "import os; print(os.environ['GREETING'], os.environ['HOME'] != '')"
    env = {"GREETING": "h\xe9llo \N{SNOWMAN}"}
    with Sandbox(AFRESH, level, warm=warm) as sandbox, sandbox.repl(env=env) as repl:
        assert repl.execute(look).stdout == "h\xe9llo \N{SNOWMAN} True\n"
        repl.execute("import os; os.environ['GREETING'] = 'changed'")
        assert repl.execute(look).stdout == "changed True\n"
        assert repl.execute("import os; os._exit(1)").status == "killed"
        assert repl.execute(look).stdout == "h\xe9llo \N{SNOWMAN} True\n"
        with sandbox.repl() as other:
            assert "KeyError" in (other.execute(look).error or "")


def test_time_zone_holds_for_the_repls_clock(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(env={"TZ": "XYZ+5"}) as repl:
        assert repl.execute("import time; print(time.localtime(0).tm_hour, time.tzname[0])").stdout == "19 XYZ\n"


@LEVELS
def test_seed_fixes_random_numbers_after_a_kill_too(level: LevelName) -> None:
    with Sandbox(AFRESH, level) as sandbox:
        drawn = []
        for seed in (7, 7, 8, None, None):
            with sandbox.repl(seed=seed) as repl:
                drawn.append(repl.execute(DRAWS).stdout)
                repl.execute("import os; os._exit(1)")
                assert repl.execute(DRAWS).stdout == drawn[-1]
    assert drawn[0] == drawn[1]
    assert len({*drawn}) == 4


def test_seed_of_a_repl_replaces_the_sandboxes() -> None:
    with (
        Sandbox(seed=1) as sandbox,
        sandbox.template(imports=["random"]) as template,
        sandbox.repl() as as_sandbox,
        sandbox.repl(seed=2) as own,
        template.repl(seed=2) as of_template,
    ):
        first, second, third = (repl.execute(DRAWS).stdout for repl in (as_sandbox, own, of_template))
    assert first != second == third
