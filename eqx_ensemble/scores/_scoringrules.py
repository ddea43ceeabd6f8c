"""How scoringrules is imported and called; scores that it computes have the `members` axis in front, as all do."""

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NoReturn

import jax
from jaxtyping import Array

from .._check import missing_extra_message
from .._promotion import standard_promotion
from ._check import no_gradient_message


def import_scoringrules(name: str) -> ModuleType:
    """The optional package, for the function of this name."""
    try:
        import scoringrules
    except ImportError as error:
        raise ImportError(missing_extra_message(name, "scoringrules", "scores")) from error
    return scoringrules


@contextlib.contextmanager
def scoringrules_config() -> Iterator[None]:
    """Scoringrules promotes dtypes and ranks, and reads levels and weights while predictions are traced."""
    with standard_promotion(), jax.ensure_compile_time_eval():
        yield


def without_gradient(name: str, score: Callable[..., Array]) -> Callable[..., Array]:
    """The score, which raises when differentiated: where members coincide, scoringrules has a NaN gradient."""
    function = jax.custom_jvp(score)

    @function.defjvp
    def refuse(primals: tuple, tangents: tuple) -> NoReturn:
        raise NotImplementedError(no_gradient_message(name))

    return function
