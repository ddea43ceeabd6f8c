from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

from .._caller import caller
from .._check import array_leaves, check_counter, check_positive_int, check_word, is_inside_transformation, kind_text
from .._leaf_text import leaf_text
from ..plan import Vmap
from ._status import may_be_idle
from ._together import Together

MULTI_STEPS = "Pass `optax.MultiSteps(...).gradient_transformation()`."


def check_no_transformation() -> None:
    """Raises inside a transformation, where training cannot make decisions by concrete values."""
    if is_inside_transformation():
        raise TypeError(
            f"`{caller()}` cannot run inside `jax.jit`, `jax.vmap`, `jax.grad` or another transformation: it makes "
            "decisions on the host. There, use `train.make_step` with `train.scan_steps`, or write the whole training "
            "of one member as a function for `map_members`."
        )


def check_length(epochs: Any, steps: Any) -> None:
    """Raises unless exactly one of `epochs` and `steps` is given, as a count."""
    if (epochs is None) == (steps is None):
        got = "neither" if epochs is None else "both"
        raise TypeError(f"`{caller()}` needs either `epochs` or `steps`, got {got}.")
    if steps is None:
        check_counter(epochs, "epochs")
    else:
        check_counter(steps, "steps")


def check_mode(value: Any) -> None:
    """Raises unless `value` is `"min"` or `"max"`."""
    check_word(value, "mode", ("min", "max"))


def check_one_pass(data: Any, epochs: Any) -> None:
    """Raises for several epochs of data that can be iterated only once.

    An iterator with an `__iter__` of its own may restart there, and is accepted.
    """
    code = getattr(type(data).__iter__, "__code__", None)
    if epochs is None or epochs == 1 or not isinstance(data, Iterator) or (code is not None and code.co_names):
        return
    raise ValueError(
        f"`fit` iterates an iterable of batches once an epoch; with `epochs={epochs}` got {kind_text(data)}, which "
        "gives its batches only once.\nPass an object that restarts each time (a list, a loader); or make it "
        "endless and give `steps`."
    )


def check_no_array_options(*, batch_size: Any, rows: Any, shuffle: Any, scan: Any) -> None:
    """Raises if an option for data in arrays comes with an iterable of batches."""
    used = {"batch_size": batch_size is not None, "rows": rows is not None, "shuffle": shuffle is not True}
    used["scan"] = scan is not None
    given = [f"`{word}`" for word, is_used in used.items() if is_used]
    if given:
        raise TypeError(
            f"`{caller()}` takes {', '.join(given)} only for data in arrays, not for an iterable of batches."
        )


def check_same_structure(validation: Any, data: Any) -> None:
    """Raises unless validation data have the structure of the training data."""
    expected, got = jax.tree.structure(data), jax.tree.structure(validation)
    if expected != got:
        raise TypeError(
            f"`{caller()}` needs `validation` with the structure of `data`, because the loss takes both; expected "
            f"{expected}, got {got}.\nPass both as `(x, y)`; or give a `score` of its own."
        )


def check_hyper_used(optimiser: Any, *, wants_hyper: bool) -> None:
    """Raises unless the optimiser or the loss uses the hyper-parameters."""
    own = optimiser.optimiser if isinstance(optimiser, Together) else optimiser
    if isinstance(own, optax.GradientTransformation) and not wants_hyper:
        raise TypeError(
            f"`{caller()}` got `hyper`, but nothing uses it.\n"
            "Pass the optimiser as a function, `lambda h: optax.adam(h['lr'])`, or name a loss parameter `hyper`."
        )


def check_inner_optimiser(value: Any) -> None:
    """Raises unless `value` is an optax optimiser itself, not a function that returns one."""
    check_optimiser_kind(value)
    if not isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"`{caller()}` needs an optax optimiser, got {kind_text(value)}.\nWrap the optimiser inside of the "
            f"function: `lambda hyper: {caller()}(optax.adam(hyper['lr']), ...)`."
        )


def check_plan_together(optimiser: Any, plan: Any) -> None:
    """Raises unless members that are trained together run at once."""
    if isinstance(optimiser, Together) and type(plan) is not Vmap:
        raise ValueError(
            f"`{caller()}` needs the plan `Vmap()` for the members of `train.Together`, which all take a step at once; "
            f"got {plan!r}."
        )


def check_some_training(training: np.ndarray, *, ids: np.ndarray) -> None:
    """Raises if no member is training."""
    if not training.any() and not may_be_idle():
        raise ValueError(
            f"`fit` has no member left to train: all {len(ids)} members have stopped or diverged.\n"
            "To train their weights again, pass the ensemble: `fit(run.ensemble, ...)`."
        )


def check_optimiser_kind(value: Any, *, together: bool = False) -> None:
    """Raises unless `value` is an optax optimiser or a function; or, if members may depend on others, a `Together`."""
    if isinstance(value, optax.GradientTransformation):
        return
    if isinstance(value, Together):
        if not together:
            raise TypeError(
                f"`{caller()}` needs members that are trained independently of each other; those of `train.Together` "
                "are not."
            )
        check_optimiser_kind(value.optimiser)
        if not isinstance(value.shared, optax.GradientTransformation):
            raise TypeError(
                f"`train.Together` needs `shared` to be an optax optimiser, got {kind_text(value.shared)}.\n"
                "Hyper-parameters are those of members; shared parameters have none."
            )
        return
    if isinstance(value, optax.MultiSteps):
        raise TypeError(f"`{caller()}` needs an optax optimiser, got a MultiSteps.\n{MULTI_STEPS}")
    if not callable(value):
        arrays = len(array_leaves(value))
        if arrays:
            raise TypeError(
                f"`{caller()}` needs an optax optimiser, got {kind_text(value)} of {arrays} arrays: an optimiser's "
                "state?\nPass the optimiser itself, such as `optax.adam(1e-3)`; its state is made for every member."
            )
        raise TypeError(f"`{caller()}` needs an optax optimiser, got {leaf_text(value)}.")


def check_optimiser(value: Any, *, hyper: Any, hyper_of: str | None = None, together: bool = False) -> None:
    """Raises unless `value` is an optax optimiser, or with `hyper` (of `hyper_of`) a function that makes one."""
    check_optimiser_kind(value, together=together)
    value = value.optimiser if isinstance(value, Together) else value
    if isinstance(value, optax.GradientTransformation):
        return
    if hyper is None:
        named = getattr(value, "__name__", type(value).__name__)
        raise TypeError(
            f"`{caller()}` needs an optax optimiser, got the function `{named}`.\n"
            f"Call it first, for example `optax.adam(1e-3)`; or pass `hyper=`{f' to `{hyper_of}`' if hyper_of else ''} "
            f"if `{named}` makes an optimiser from each member's hyper-parameters."
        )


def check_revive(make: Any, perturb: Any, most: Any) -> None:
    """Raises for invalid arguments of `Revive`."""
    for argument, value in (("make", make), ("perturb", perturb)):
        if value is not None and not callable(value):
            raise TypeError(f"`train.Revive` needs `{argument}` to be a function, got {value!r}.")
    check_positive_int(most, "most")
