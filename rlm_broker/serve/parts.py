"""Parts of an open server, shared by its routes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from rlm_broker import RLM
from rlm_broker.serve.bodies import parsed
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.files import Files, UploadedFile
from rlm_broker.serve.hosting.owner import Owner, Places, UnknownHandle
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.hosting.runs import HostedRuns
from rlm_broker.serve.questions.request import ServedModels
from rlm_broker.serve.questions.runs import Asking
from rlm_broker.serve.settings import ServeSettings

T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of one open server.

    Attributes:
        settings: Settings of the server.
        rlm: The open `RLM`.
        runs: Runs of all keys.
        repls: Live REPLs of all keys, for example containers.
        files: Uploaded files of all keys.
        places: Places for code in a REPL of its own.
        models: Models that clients may name.
        asking: Begins the runs that requests ask for.
    """

    settings: ServeSettings
    rlm: RLM
    runs: HostedRuns
    repls: HeldRepls
    files: Files
    places: Places
    models: ServedModels
    asking: Asking

    async def parsed(self, request: Request, kind: type[T]) -> tuple[T, bytes]:
        """Return a JSON body as a model, and its bytes; see `bodies.parsed`."""
        return await parsed(request, kind, self.settings.body_bytes, self.settings.stall_s)

    def file(self, owner: Owner, id: str, param: str) -> UploadedFile:
        """Find an uploaded file by its id; `param` is the field of the request that names it.

        Raises:
            ApiError: 404: the owner has no such file.
        """
        try:
            return self.files.get(owner, id)
        except UnknownHandle as error:
            raise ApiError(404, str(error), code="not_found", param=param) from None

    def files_of(self, owner: Owner, ids: Iterable[str], param: str) -> list[UploadedFile]:
        """Return uploaded files by their ids, as `file` does."""
        return [self.file(owner, id, param) for id in ids]
