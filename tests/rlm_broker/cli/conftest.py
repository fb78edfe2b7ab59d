"""A folder of control sockets for the tests of one module."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def own_sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield
