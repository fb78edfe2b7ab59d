"""Public classes and functions show their use in their docstrings, and so do half of the public methods.

A test runs each example, see `tests/support/docstring_code.py`.
"""

import ast
from collections.abc import Iterator

from scripts.lint.project import FUNCTIONS, Finding, Project, Source
from scripts.lint.public_names import definition_of, origin
from scripts.lint.rooms import public_names

SHOWN_BY = {
    "Audio": "AudioPart",
    "BlockStarted": "EventOfRun",
    "CallRetried": "EventOfRun",
    "CallStarted": "EventOfRun",
    "ChildContext": "GivenContext",
    "ContextRefused": "RlmBrokerError",
    "ImageUrl": "ImagePart",
    "IterationStarted": "EventOfRun",
    "NodeStats": "RayCluster",
    "ProcessStatus": "MachineRuns",
    "ProgramNotStarted": "RlmBrokerError",
    "ProtocolViolation": "RlmBrokerError",
    "ReplBusy": "RlmBrokerError",
    "ReplClosed": "RlmBrokerError",
    "ReplReady": "EventOfRun",
    "ReplStatus": "MachineRuns",
    "RunStatus": "LiveSource",
    "SandboxFailed": "RunFailed",
    "StopOutcome": "MachineRuns",
    "TextPart": "ImagePart",
    "ToolEnded": "EventOfRun",
    "ToolStarted": "EventOfRun",
    "UnknownModel": "RlmBrokerError",
    "ValueTooLarge": "RlmBrokerError",
    "ValueUnavailable": "RlmBrokerError",
    "WorkerDied": "RunFailed",
}
"""Name without an example of its own, since it is received or made as in another one's: that one."""
FACE = "rlm_broker/__init__.py"


def rules(project: Project) -> Iterator[Finding]:
    """Yield public names without an example, and say so if fewer than half of the methods have one."""
    public = public_names(project)
    shown: set[str] = set()
    methods: list[bool] = []
    for name, module in public.items():
        source = project.modules.get(module)
        node = definition_of(source, name) if source else None
        if source is None or not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        if _has_example(project, source, node):
            shown.add(name)
        elif name not in SHOWN_BY:
            yield Finding(source.path, node.lineno, f"{name} is public and has no example in its docstring")
        if isinstance(node, ast.ClassDef):
            methods += [_shows(each) for each in _first_called(node)]
    if 2 * sum(methods) < len(methods):
        yield Finding(FACE, 1, f"{sum(methods)} of {len(methods)} public methods have an example, fewer than half")
    if "rlm_broker" in project.modules:
        unused = [name for name, by in SHOWN_BY.items() if name not in public.keys() - shown or by not in shown]
        if unused:
            yield Finding("scripts/lint/examples.py", 1, f"exceptions that do not hold: {', '.join(unused)}")


def _has_example(project: Project, source: Source, node: ast.stmt) -> bool:
    """Return whether a class or function has an example, or takes the docstring with one from its base."""
    if isinstance(node, ast.ClassDef) and "__doc__ = " in ast.unparse(node.body[0]):
        module, name = origin(source, ast.unparse(node.bases[0]))
        home = project.modules.get(module)
        base = definition_of(home, name) if home else None
        return base is not None and _shows(base)
    return _shows(node)


def _shows(node: ast.stmt) -> bool:
    text = ast.get_docstring(node) if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else None
    return text is not None and ("```python" in text or ">>> " in text)


def _first_called(kind: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield public methods that are no properties, and no awaited twin of another one."""
    names = {node.name for node in kind.body if isinstance(node, FUNCTIONS)}
    for node in kind.body:
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
            is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
            if not is_property and not (node.name.startswith("a") and node.name[1:] in names):
                yield node
