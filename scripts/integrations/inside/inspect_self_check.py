"""inspect's own checks of a sandbox, on ours."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - so its documentation says

from rlm_broker.integrations.inspect import SampleSandbox


@pytest.fixture
async def sandbox_env() -> AsyncIterator[Any]:
    """A sample's machine, one for each check."""
    made = await SampleSandbox.sample_init("self_check", None, {})
    yield made["default"]
    await SampleSandbox.sample_cleanup("self_check", None, made, False)
