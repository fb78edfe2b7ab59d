"""Runs in the open sandbox of a module."""

from collections.abc import Callable
from typing import Any

import pytest

from rlm_broker.broker.models.model import Model
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.fake_openai import FakeOpenAI

MakeRLM = Callable[..., RLM]


@pytest.fixture
def rlm(open_sandbox: Sandbox) -> MakeRLM:
    """Makes an RLM in the open sandbox: of a client, or of the model of a server."""

    def make(*models: Any, **options: Any) -> RLM:
        known = [Model(base_url=each.base_url, name="m") if isinstance(each, FakeOpenAI) else each for each in models]
        return RLM(*known, sandbox=open_sandbox, **options)

    return make
