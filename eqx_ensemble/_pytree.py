from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    PyTree: TypeAlias = Any  # jaxtyping's is unknown to type checkers, and what is annotated with it would be too
else:
    from jaxtyping import PyTree as PyTree
