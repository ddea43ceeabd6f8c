import functools
from collections.abc import Callable, Mapping
from typing import Any

import optax

Hyper = Mapping[str, Any]


def default_optimiser(hyper: Hyper) -> optax.GradientTransformation:
    """AdamW, whose hyper-parameters are traced: a grid of them shares one compiled program."""
    return optax.adamw(hyper["learning_rate"], weight_decay=hyper["weight_decay"])


def optimiser_of_rate(make: Callable[..., optax.GradientTransformation]) -> Callable[[Hyper], Any]:
    """The optimiser as a function of hyper-parameters: one object for equal functions, hence one compiled program.

    `sklearn.base.clone` copies a `functools.partial`, and copies do not compare equal: their parts are compared.
    """
    if isinstance(make, functools.partial):
        try:
            return _of_partial(make.func, make.args, tuple(sorted(make.keywords.items())))
        except TypeError:  # arguments without a hash: one program each
            pass
    return _of_function(make)


@functools.lru_cache(maxsize=64)
def _of_partial(function: Any, args: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]) -> Callable[[Hyper], Any]:
    make = functools.partial(function, *args, **dict(keywords))
    return lambda hyper: make(hyper["learning_rate"])


@functools.lru_cache(maxsize=64)
def _of_function(make: Any) -> Callable[[Hyper], Any]:
    return lambda hyper: make(hyper["learning_rate"])
