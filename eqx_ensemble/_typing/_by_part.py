from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union

T = TypeVar("T")

if TYPE_CHECKING:
    ByPart = Annotated[T, "for each part"]
else:
    # In a signature: of a group, a dict from the names of its parts to such values is accepted, too. Functions handle
    # groups before anything else, so that type checkers need to know one value only.
    ByPart = Union[T, Mapping[str, Any]]  # noqa: UP007
