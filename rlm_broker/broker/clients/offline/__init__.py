"""The default model, which needs no key and no network. It searches, quotes and counts, and does not reason."""

from rlm_broker.broker.clients.offline.client import OfflineClient

__all__ = ["OfflineClient"]
