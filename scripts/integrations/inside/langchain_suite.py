"""The standard tests of langchain-tests for sandboxes, with our backend."""

from collections.abc import Iterator

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

from rlm_broker.integrations.langchain import Backend


class TestBackend(SandboxIntegrationTests):  # type: ignore[misc]
    """All of them, in one sandbox."""

    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[Backend]:
        """The backend."""
        with Backend() as backend:
            yield backend
