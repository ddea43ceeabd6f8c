from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union

T = TypeVar("T")

if TYPE_CHECKING:
    ByPart = Annotated[T, "for each part"]
else:
    # In a signature: for a group, a dict of values by part is also accepted. Functions handle groups first, so type
    # checkers need to know single values only.
    ByPart = Union[T, Mapping[str, Any]]  # noqa: UP007
