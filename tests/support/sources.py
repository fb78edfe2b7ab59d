"""The sources of workers that a sandbox or a template has."""

from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.template import Template
from rlm_broker.sandbox.workers.context_cache import ContextCache
from rlm_broker.sandbox.workers.source import WarmPool


def pool_of(opened: Sandbox | Template) -> WarmPool:
    assert opened._workers is not None
    (pool,) = [source for source in opened._workers.sources if isinstance(source, WarmPool)]
    return pool


def cache_of(opened: Sandbox) -> ContextCache:
    assert opened._workers is not None
    (cache,) = [source for source in opened._workers.sources if isinstance(source, ContextCache)]
    return cache
