"""Imports and calls scoringrules. Its scores take the `members` axis first, as all scores do."""

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
    """Imports the optional package for a function; raises an `ImportError` with the install command."""
    try:
        import scoringrules
    except ImportError as error:
        raise ImportError(missing_extra_message(name, "scoringrules", "scores")) from error
    return scoringrules


@contextlib.contextmanager
def scoringrules_config() -> Iterator[None]:
    """Allows scoringrules to promote dtypes and ranks, and to read levels and weights while predictions are traced."""
    with standard_promotion(), jax.ensure_compile_time_eval():
        yield


def without_gradient(name: str, score: Callable[..., Array]) -> Callable[..., Array]:
    """The score, which raises when differentiated: scoringrules has a NaN gradient where members coincide."""
    function = jax.custom_jvp(score)

    @function.defjvp
    def refuse(primals: tuple, tangents: tuple) -> NoReturn:
        raise NotImplementedError(no_gradient_message(name))

    return function
