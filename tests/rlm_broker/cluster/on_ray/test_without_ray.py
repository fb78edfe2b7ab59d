"""`RayCluster` where Ray is not installed."""

import sys

import pytest

from rlm_broker import ConfigurationError, RayCluster


def test_missing_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"RayCluster needs packages .*: pip install 'rlm-broker\[ray\]'"):
        RayCluster()
