"""The standard tests of langchain-tests for sandboxes, with our backend."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

from rlm_broker.integrations.langchain import Backend
from scripts.integrations.peer import RECORDER


class TestBackend(SandboxIntegrationTests):  # type: ignore[misc]
    """All of them, in one sandbox."""

    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[Backend]:
        """The backend."""
        with Backend() as backend:
            yield backend


if __name__ == "__main__":
    here = Path(__file__)
    options = ["-q", "-p", RECORDER, "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    raise SystemExit(pytest.main([*options, f"--rootdir={here.parent}", str(here)]))
