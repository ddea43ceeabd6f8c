from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx

from ._axes import program_key

# JAX finds a compiled program by what is constant in the arguments, compared by `==`. That is too coarse for what users
# pass: a function that was edited in a notebook is still the same object, and 1, 1.0 and True are equal. The call would
# run the old code, or calculate with the other number's type, without an error. The key that distinguishes them is read
# from the arguments before they are traced, at each call, and travels in the first argument, which is not donated.


def filter_jit(fn: Callable[..., Any], *, donate: Literal["all-except-first", "none"] = "none") -> Callable[..., Any]:
    """`equinox.filter_jit` for a function that calls the user's functions and models, or holds numbers as constants.

    A program is used again only for the same code, and for numbers of the same types; see `_axes.program_key`.
    """
    run = lambda read, *args, **options: fn(read[0], *args, **options)
    run.__name__ = run.__qualname__ = fn.__name__
    compiled = eqx.filter_jit(run, donate=donate)

    def call(first: Any, *args: Any, **options: Any) -> Any:
        return compiled((first, program_key((first, args, options))), *args, **options)

    return call
