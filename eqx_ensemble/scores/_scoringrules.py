"""How scoringrules is imported and called; scores that it computes have the `members` axis in front, as all do."""

import contextlib
from collections.abc import Iterator
from types import ModuleType

import jax

from .._check import missing_extra_message
from .._promotion import standard_promotion


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
