"""All routes that run code without a model."""

from starlette.routing import Route

from rlm_broker.service.parts import Parts
from rlm_broker.service.sandboxes import container_files, containers, execute, run_code


def routes(parts: Parts) -> list[Route]:
    """Return the routes of one-shot execution, containers and their files, and SandboxFusion."""
    rooms = execute, containers, container_files, run_code
    return [route for room in rooms for route in room.routes(parts)]
