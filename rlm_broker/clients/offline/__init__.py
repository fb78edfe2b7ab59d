"""The default model, which needs no key and no network. It retrieves, and does not reason."""

from rlm_broker.clients.offline.client import OfflineClient

__all__ = ["OfflineClient"]
