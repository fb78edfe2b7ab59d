"""Stand-in for smolagents: the contract between an agent and its executor, in our own words."""

from .local_python_executor import PythonExecutor as PythonExecutor
