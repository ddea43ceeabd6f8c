from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    PyTree: TypeAlias = Any  # type checkers cannot read jaxtyping's, nor anything annotated with it
else:
    from jaxtyping import PyTree as PyTree
