"""Recursive Language Models on untrusted code.

The names in `__all__` are public, with all members that their documentation describes; everything else may change. A
public name is imported when it is first used, and what only some programs need (pydantic, sqlite, litellm) when
they need it.
"""

import importlib

from rlm_broker.version import __version__ as __version__

TYPE_CHECKING = False
"""As in `typing`, whose import would lengthen the moment in which Ctrl+C is a traceback."""

if TYPE_CHECKING:
    from rlm_broker.batch.batch import Batch as Batch
    from rlm_broker.batch.feed import Items as Items
    from rlm_broker.batch.items import BatchItem as BatchItem
    from rlm_broker.batch.items import BatchResult as BatchResult
    from rlm_broker.batch.items import ItemStatus as ItemStatus
    from rlm_broker.batch.items_file import ItemsFile as ItemsFile
    from rlm_broker.batch.progress import BatchProgress as BatchProgress
    from rlm_broker.batch.score import Score as Score
    from rlm_broker.batch.shards import Shard as Shard
    from rlm_broker.broker.cache import Cache as Cache
    from rlm_broker.broker.client_queue import OnRetry as OnRetry
    from rlm_broker.broker.client_queue import Serving as Serving
    from rlm_broker.broker.clients.adapters import AsyncFieldLike as AsyncFieldLike
    from rlm_broker.broker.clients.adapters import FieldLike as FieldLike
    from rlm_broker.broker.clients.adapters import SyncFieldLike as SyncFieldLike
    from rlm_broker.broker.clients.base import BaseClient as BaseClient
    from rlm_broker.broker.clients.base import CallId as CallId
    from rlm_broker.broker.clients.base import Client as Client
    from rlm_broker.broker.clients.base import LMReply as LMReply
    from rlm_broker.broker.clients.base import LMRequest as LMRequest
    from rlm_broker.broker.clients.function import FunctionClient as FunctionClient
    from rlm_broker.broker.clients.litellm import LiteLLMClient as LiteLLMClient
    from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient as OpenAICompatibleClient
    from rlm_broker.broker.clients.script import ScriptedClient as ScriptedClient
    from rlm_broker.broker.models.model import Given as Given
    from rlm_broker.broker.models.model import Model as Model
    from rlm_broker.broker.models.models import FilePath as FilePath
    from rlm_broker.broker.models.models import Models as Models
    from rlm_broker.broker.routing import ModelPolicy as ModelPolicy
    from rlm_broker.broker.routing import Route as Route
    from rlm_broker.broker.transport.connection import QueryHandler as QueryHandler
    from rlm_broker.broker.transport.session import Stdin as Stdin
    from rlm_broker.concurrency.turns import FairSemaphore as FairSemaphore
    from rlm_broker.context.store import Encoded as Encoded
    from rlm_broker.context.store import OpenFile as OpenFile
    from rlm_broker.context.store import Paths as Paths
    from rlm_broker.context.store import store as store
    from rlm_broker.context.store import store_as_it_is as store_as_it_is
    from rlm_broker.context.stored_context import StoredContext as StoredContext
    from rlm_broker.errors import ConfigurationError as ConfigurationError
    from rlm_broker.errors import ContextRefused as ContextRefused
    from rlm_broker.errors import FailureCause as FailureCause
    from rlm_broker.errors import FileRefused as FileRefused
    from rlm_broker.errors import ForkRefused as ForkRefused
    from rlm_broker.errors import IsolationUnavailable as IsolationUnavailable
    from rlm_broker.errors import LimitReached as LimitReached
    from rlm_broker.errors import ModelFailed as ModelFailed
    from rlm_broker.errors import OutputInvalid as OutputInvalid
    from rlm_broker.errors import ProgramNotStarted as ProgramNotStarted
    from rlm_broker.errors import ProtocolViolation as ProtocolViolation
    from rlm_broker.errors import ReplayDiverged as ReplayDiverged
    from rlm_broker.errors import ReplBusy as ReplBusy
    from rlm_broker.errors import ReplClosed as ReplClosed
    from rlm_broker.errors import RlmBrokerError as RlmBrokerError
    from rlm_broker.errors import RunCancelled as RunCancelled
    from rlm_broker.errors import RunFailed as RunFailed
    from rlm_broker.errors import SandboxFailed as SandboxFailed
    from rlm_broker.errors import UnknownModel as UnknownModel
    from rlm_broker.errors import ValueTooLarge as ValueTooLarge
    from rlm_broker.errors import ValueUnavailable as ValueUnavailable
    from rlm_broker.errors import WorkerDied as WorkerDied
    from rlm_broker.events.event import BlockEnded as BlockEnded
    from rlm_broker.events.event import BlockPrinted as BlockPrinted
    from rlm_broker.events.event import BlockStarted as BlockStarted
    from rlm_broker.events.event import CallEnded as CallEnded
    from rlm_broker.events.event import CallRetried as CallRetried
    from rlm_broker.events.event import CallStarted as CallStarted
    from rlm_broker.events.event import CallText as CallText
    from rlm_broker.events.event import Emit as Emit
    from rlm_broker.events.event import Event as Event
    from rlm_broker.events.event import EventOfRun as EventOfRun
    from rlm_broker.events.event import EventsMissed as EventsMissed
    from rlm_broker.events.event import IterationStarted as IterationStarted
    from rlm_broker.events.event import Replied as Replied
    from rlm_broker.events.event import ReplReady as ReplReady
    from rlm_broker.events.event import RunEnded as RunEnded
    from rlm_broker.events.event import RunStarted as RunStarted
    from rlm_broker.events.event import ToolEnded as ToolEnded
    from rlm_broker.events.event import ToolStarted as ToolStarted
    from rlm_broker.events.event import all_of as all_of
    from rlm_broker.events.progress import RunProgress as RunProgress
    from rlm_broker.events.trace import TraceWriter as TraceWriter
    from rlm_broker.events.trace import trace_line as trace_line
    from rlm_broker.limits import BatchLimits as BatchLimits
    from rlm_broker.limits import Limits as Limits
    from rlm_broker.limits import ReplLimits as ReplLimits
    from rlm_broker.limits import RunLimits as RunLimits
    from rlm_broker.nodes.ray_cluster import RayCluster as RayCluster
    from rlm_broker.results import BestOf as BestOf
    from rlm_broker.results import Block as Block
    from rlm_broker.results import BlockStatus as BlockStatus
    from rlm_broker.results import Call as Call
    from rlm_broker.results import ChatMessage as ChatMessage
    from rlm_broker.results import ChildTrace as ChildTrace
    from rlm_broker.results import Completion as Completion
    from rlm_broker.results import ContextInfo as ContextInfo
    from rlm_broker.results import FileEntry as FileEntry
    from rlm_broker.results import Isolation as Isolation
    from rlm_broker.results import Iteration as Iteration
    from rlm_broker.results import PostMortem as PostMortem
    from rlm_broker.results import Role as Role
    from rlm_broker.results import Variable as Variable
    from rlm_broker.rlm import RLM as RLM
    from rlm_broker.run.answers import Budget as Budget
    from rlm_broker.run.answers import ReplAnswers as ReplAnswers
    from rlm_broker.run.branches import Scorer as Scorer
    from rlm_broker.run.lm_handler import LMHandler as LMHandler
    from rlm_broker.run.persistent_repl import PersistentRepl as PersistentRepl
    from rlm_broker.run.prompts.instructions import Instructions as Instructions
    from rlm_broker.run.prompts.instructions import Profile as Profile
    from rlm_broker.run.run import Run as Run
    from rlm_broker.run.tree import QueryHandlerFactory as QueryHandlerFactory
    from rlm_broker.sandbox.blocks.block_result import OnDisplay as OnDisplay
    from rlm_broker.sandbox.blocks.block_result import OnOutput as OnOutput
    from rlm_broker.sandbox.blocks.query_contexts import GivenContext as GivenContext
    from rlm_broker.sandbox.blocks.query_contexts import QueryWithContexts as QueryWithContexts
    from rlm_broker.sandbox.blocks.record import Replayed as Replayed
    from rlm_broker.sandbox.blocks.record import ReplRecord as ReplRecord
    from rlm_broker.sandbox.files import ReplFiles as ReplFiles
    from rlm_broker.sandbox.mcp_tools import McpTools as McpTools
    from rlm_broker.sandbox.programs import ProgramResult as ProgramResult
    from rlm_broker.sandbox.programs import ProgramStatus as ProgramStatus
    from rlm_broker.sandbox.repl import SandboxedRepl as SandboxedRepl
    from rlm_broker.sandbox.sandbox import Sandbox as Sandbox
    from rlm_broker.sandbox.template import Template as Template
    from rlm_broker.sandbox.tools import Tools as Tools
    from rlm_broker.sandbox.workers.levels import IsolationName as IsolationName
    from rlm_broker.sandbox.workers.levels import IsolationWarning as IsolationWarning
    from rlm_broker.serve.app import Service as Service
    from rlm_broker.serve.metrics import Metrics as Metrics
    from rlm_broker.serve.settings import KeySettings as KeySettings
    from rlm_broker.serve.settings import Right as Right
    from rlm_broker.serve.settings import ServeSettings as ServeSettings
    from rlm_broker.usage import Usage as Usage
    from rlm_broker.usage import UsageSummary as UsageSummary
    from rlm_broker.values.display import Display as Display
    from rlm_broker.values.json_schemas import CheckedSchema as CheckedSchema
    from rlm_broker.values.stats import ClientStats as ClientStats
    from rlm_broker.values.stats import HandlerStats as HandlerStats
    from rlm_broker.values.stats import NodeStats as NodeStats
    from rlm_broker.values.stats import SandboxStats as SandboxStats
    from rlm_broker.values.text import jsonable as jsonable
    from rlm_broker.values.text import printable as printable
    from rlm_broker.watch.callbacks import Callbacks as Callbacks
    from rlm_broker.watch.client import MachineRuns as MachineRuns
    from rlm_broker.watch.collector import exported_spans as exported_spans
    from rlm_broker.watch.conventions import continue_trace as continue_trace
    from rlm_broker.watch.messages import ProcessStatus as ProcessStatus
    from rlm_broker.watch.messages import ReplStatus as ReplStatus
    from rlm_broker.watch.messages import RunStatus as RunStatus
    from rlm_broker.watch.messages import StopOutcome as StopOutcome
    from rlm_broker.watch.progress_line import ProgressLine as ProgressLine
    from rlm_broker.watch.server import ControlSocket as ControlSocket
    from rlm_broker.watch.server import OnStop as OnStop
    from rlm_broker.watch.telemetry import OpenTelemetry as OpenTelemetry
    from rlm_broker.watch.terminal import print_events as print_events
    from rlm_broker.watch.trace_tree import Trace as Trace
    from rlm_broker.watch.viewer.live import LiveSource as LiveSource
    from rlm_broker.watch.viewer.live import live_app as live_app
    from sandbox_worker.wire.errors import FileKind as FileKind
    from sandbox_worker.wire.level import LevelName as LevelName
    from sandbox_worker.wire.messages import Query as Query
    from sandbox_worker.wire.messages import Slot as Slot
    from sandbox_worker.wire.messages import Stream as Stream
    from sandbox_worker.wire.messages import Want as Want
    from sandbox_worker.wire.mime import MimeType as MimeType
    from sandbox_worker.wire.prompts import Audio as Audio
    from sandbox_worker.wire.prompts import AudioPart as AudioPart
    from sandbox_worker.wire.prompts import ChildContext as ChildContext
    from sandbox_worker.wire.prompts import ImagePart as ImagePart
    from sandbox_worker.wire.prompts import ImageUrl as ImageUrl
    from sandbox_worker.wire.prompts import MessagePart as MessagePart
    from sandbox_worker.wire.prompts import Prompt as Prompt
    from sandbox_worker.wire.prompts import TextPart as TextPart

_MODULES = {
    "batch.batch": "Batch",
    "batch.feed": "Items",
    "batch.items": "BatchItem BatchResult ItemStatus",
    "batch.items_file": "ItemsFile",
    "batch.progress": "BatchProgress",
    "batch.score": "Score",
    "batch.shards": "Shard",
    "broker.cache": "Cache",
    "broker.client_queue": "OnRetry Serving",
    "broker.clients.adapters": "AsyncFieldLike FieldLike SyncFieldLike",
    "broker.clients.base": "BaseClient CallId Client LMReply LMRequest",
    "broker.clients.function": "FunctionClient",
    "broker.clients.litellm": "LiteLLMClient",
    "broker.clients.openai_compatible": "OpenAICompatibleClient",
    "broker.clients.script": "ScriptedClient",
    "broker.models.model": "Given Model",
    "broker.models.models": "FilePath Models",
    "broker.routing": "ModelPolicy Route",
    "broker.transport.connection": "QueryHandler",
    "broker.transport.session": "Stdin",
    "concurrency.turns": "FairSemaphore",
    "context.store": "Encoded OpenFile Paths store store_as_it_is",
    "context.stored_context": "StoredContext",
    "errors": "ConfigurationError ContextRefused FailureCause FileRefused ForkRefused IsolationUnavailable "
    "LimitReached ModelFailed OutputInvalid ProgramNotStarted ProtocolViolation ReplBusy ReplClosed ReplayDiverged "
    "RlmBrokerError RunCancelled RunFailed SandboxFailed UnknownModel ValueTooLarge ValueUnavailable "
    "WorkerDied",
    "events.event": "BlockEnded BlockPrinted BlockStarted CallEnded CallRetried CallStarted CallText Emit Event "
    "EventOfRun EventsMissed IterationStarted ReplReady Replied RunEnded RunStarted ToolEnded ToolStarted all_of",
    "events.progress": "RunProgress",
    "events.trace": "TraceWriter trace_line",
    "limits": "BatchLimits Limits ReplLimits RunLimits",
    "nodes.ray_cluster": "RayCluster",
    "results": "BestOf Block BlockStatus Call ChatMessage ChildTrace Completion ContextInfo FileEntry Isolation "
    "Iteration PostMortem Role Variable",
    "rlm": "RLM",
    "run.answers": "Budget ReplAnswers",
    "run.branches": "Scorer",
    "run.lm_handler": "LMHandler",
    "sandbox.mcp_tools": "McpTools",
    "run.persistent_repl": "PersistentRepl",
    "run.prompts.instructions": "Instructions Profile",
    "run.run": "Run",
    "sandbox.tools": "Tools",
    "run.tree": "QueryHandlerFactory",
    "sandbox.blocks.block_result": "OnDisplay OnOutput",
    "sandbox.blocks.query_contexts": "GivenContext QueryWithContexts",
    "sandbox.blocks.record": "Replayed ReplRecord",
    "sandbox.files": "ReplFiles",
    "sandbox.programs": "ProgramResult ProgramStatus",
    "sandbox.repl": "SandboxedRepl",
    "sandbox.sandbox": "Sandbox",
    "sandbox.template": "Template",
    "sandbox.workers.levels": "IsolationName IsolationWarning",
    "serve.app": "Service",
    "serve.metrics": "Metrics",
    "serve.settings": "KeySettings Right ServeSettings",
    "usage": "Usage UsageSummary",
    "values.display": "Display",
    "values.json_schemas": "CheckedSchema",
    "values.stats": "ClientStats HandlerStats NodeStats SandboxStats",
    "values.text": "jsonable printable",
    "watch.callbacks": "Callbacks",
    "watch.client": "MachineRuns",
    "watch.collector": "exported_spans",
    "watch.conventions": "continue_trace",
    "watch.messages": "ProcessStatus ReplStatus RunStatus StopOutcome",
    "watch.progress_line": "ProgressLine",
    "watch.server": "ControlSocket OnStop",
    "watch.telemetry": "OpenTelemetry",
    "watch.terminal": "print_events",
    "watch.trace_tree": "Trace",
    "watch.viewer.live": "LiveSource live_app",
}
_PUBLIC = {name: f"rlm_broker.{module}" for module, names in _MODULES.items() for name in names.split()}
_PUBLIC |= {
    "FileKind": "sandbox_worker.wire.errors",
    "LevelName": "sandbox_worker.wire.level",
    "Query": "sandbox_worker.wire.messages",
    "Slot": "sandbox_worker.wire.messages",
    "Stream": "sandbox_worker.wire.messages",
    "Want": "sandbox_worker.wire.messages",
    "MimeType": "sandbox_worker.wire.mime",
    "Audio": "sandbox_worker.wire.prompts",
    "AudioPart": "sandbox_worker.wire.prompts",
    "ChildContext": "sandbox_worker.wire.prompts",
    "ImagePart": "sandbox_worker.wire.prompts",
    "ImageUrl": "sandbox_worker.wire.prompts",
    "MessagePart": "sandbox_worker.wire.prompts",
    "Prompt": "sandbox_worker.wire.prompts",
    "TextPart": "sandbox_worker.wire.prompts",
}

_EXTRAS = {
    "LiveSource": "serve",
    "McpTools": "mcp",
    "Metrics": "serve",
    "OpenTelemetry": "otel",
    "Service": "serve",
    "exported_spans": "otel",
    "live_app": "serve",
}
"""Maps a public name that needs further packages to the extra that has them."""

__all__ = sorted(_PUBLIC.keys() - _EXTRAS.keys())  # an import of `*` needs no further packages

if TYPE_CHECKING:
    import typing


def __getattr__(name: str) -> "typing.Any":
    if name in _PUBLIC:
        if name == "Sandbox":  # the board observes its REPLs, and a process may have to start its control socket
            importlib.import_module("rlm_broker.watch.board")
        if name not in _EXTRAS:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        from rlm_broker.values.extras import require_extra

        with require_extra(_EXTRAS[name], name):
            return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_PUBLIC, "__version__"]
