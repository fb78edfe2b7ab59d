"""Lists in pages, as OpenAI's clients ask for them."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from rlm_broker.serve.bodies import validated
from rlm_broker.serve.errors import ApiError

T = TypeVar("T")


class Page(BaseModel):
    """Query of a list.

    Attributes:
        after: Id of the last item of the page before.
        limit: Items of the page.
        order: "asc" begins with the oldest, "desc" with the newest.
    """

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


P = TypeVar("P", bound=Page)


def page_of(request: Request, kind: type[P]) -> P:
    """Return the query of a request.

    Raises:
        ApiError: 400: a parameter is unknown or wrong.
    """
    return validated(dict(request.query_params), kind)


def listed(items: Sequence[T], page: Page, shape: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
    """Return one page of items.

    Args:
        items: All items, the oldest first.
        page: Which page.
        shape: Makes the JSON form of an item, which has an "id".

    Raises:
        ApiError: 404: there is no item `after`.
    """
    shapes = [shape(item) for item in items]
    if page.order == "desc":
        shapes.reverse()
    if page.after is not None:
        places = [place for place, each in enumerate(shapes) if each["id"] == page.after]
        if not places:
            raise ApiError(404, f"there is no {page.after[:200]!r} in this list", code="not_found", param="after")
        shapes = shapes[places[0] + 1 :]
    data = shapes[: page.limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(shapes) > len(data)}
