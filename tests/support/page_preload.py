"""Imports what most pages need, in the process that the processes of pages are forked from."""

import rlm_broker.rlm
import rlm_broker.sandbox.sandbox
from rlm_broker.broker.clients.litellm import prefetch

__all__ = ["rlm_broker"]
prefetch().result()
