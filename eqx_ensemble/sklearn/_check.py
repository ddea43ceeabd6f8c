import inspect
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

from .._caller import caller
from .._check import (
    check_counter,
    check_flag,
    check_function,
    check_number,
    check_positive_int,
    check_sequence,
    check_word,
    kind_text,
)
from .._ensemble import Ensemble
from ._member import ACTIVATIONS, AbstractHead


def check_parameters(estimator: Any) -> None:
    """Raises unless the parameters that both estimators have are valid."""
    check_positive_int(estimator.num_members, "num_members")
    check_positive_int(estimator.batch_size, "batch_size")
    check_counter(estimator.max_iter, "max_iter")
    check_positive_int(estimator.n_iter_no_change, "n_iter_no_change")
    check_number(estimator.tol, "tol", least=0)
    check_number(estimator.learning_rate, "learning_rate", least=0)
    check_number(estimator.weight_decay, "weight_decay", least=0)
    for flag in ("standardise", "early_stopping", "bootstrap", "warm_start"):
        check_flag(getattr(estimator, flag), flag)
    if estimator.make is None:
        check_word(estimator.activation, "activation", tuple(ACTIVATIONS))
        sizes = check_sequence(estimator.hidden_layer_sizes, "hidden_layer_sizes", of="integers")
        for size in sizes:
            check_positive_int(size, "hidden_layer_sizes")
    else:
        check_function(estimator.make, "make", example="partial(eqx.nn.MLP, width_size=32, depth=2)")
        _check_make_signature(estimator.make)
    if not isinstance(estimator.optimiser, optax.GradientTransformation | None):
        check_function(estimator.optimiser, "optimiser", example="optax.adam")


def _check_make_signature(make: Any) -> None:
    try:
        inspect.signature(make).bind(1, 1, key=None)
    except ValueError:  # without a signature
        return
    except TypeError as error:
        raise TypeError(
            f"`{caller()}` calls `make(in_size, out_size, key=key)`, which its signature does not allow: {error}.\n"
            "For example `make=functools.partial(eqx.nn.MLP, width_size=32, depth=2)`."
        ) from None


def check_validation_fraction(fraction: Any, num_rows: int) -> int:
    """Raises unless training and validation have at least one row each. Returns the number of validation rows."""
    check_number(fraction, "validation_fraction", least=0, most=1)
    count = int(np.ceil(fraction * num_rows))
    if not 0 < count < num_rows:
        raise ValueError(
            f"`{caller()}` needs rows to train on and rows to validate on: `validation_fraction={fraction}` of "
            f"{num_rows} sample(s) is {count}.\nPass more rows, another `validation_fraction`, or "
            "`early_stopping=False`."
        )
    return count


def check_outputs(ensemble: Ensemble, head: AbstractHead, x: np.ndarray, state: Any) -> None:
    """Raises unless members return as many outputs as the head reads."""

    def outputs(ensemble: Ensemble, x: Any, state: Any) -> Any:
        if state is None:
            return ensemble.map(lambda model: model.outputs(x))
        return ensemble.map(lambda model, state: model.outputs(x, state)[0], state)

    # In inference mode, networks with dropout need no key.
    inference = eqx.nn.inference_mode(ensemble)
    found = eqx.filter_eval_shape(outputs, inference, jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    wanted = (ensemble.num_members, head.out_size)
    if getattr(found, "shape", None) != wanted:
        text = str(found.shape[1:]) if hasattr(found, "shape") else kind_text(found)
        raise ValueError(
            f"`{caller()}` needs members that return one array of shape {wanted[1:]}: {head.meaning}; got {text}.\n"
            "`make(in_size, out_size, key=key)` makes a member that takes `(in_size,)` and returns `(out_size,)`."
        )


def check_classes(classes: np.ndarray, before: np.ndarray | None) -> None:
    """Raises unless there are two or more classes, and for a warm start those of the previous fit."""
    if len(classes) < 2:
        raise ValueError(f"`{caller()}` needs two or more classes, got one class: {classes.tolist()}.")
    if before is not None and not np.array_equal(classes, before):
        raise ValueError(
            f"`{caller()}` with `warm_start=True` needs the classes of the previous fit, {before.tolist()}; "
            f"got {classes.tolist()}."
        )


def check_sample_weight(weights: np.ndarray | None) -> None:
    """Raises if weights are negative, or all zero."""
    if weights is None:
        return
    if (weights < 0).any():
        raise ValueError(f"`{caller()}` needs `sample_weight` that is not negative, got {weights.min():g}.")
    if not (weights > 0).any():
        raise ValueError(f"`{caller()}` needs a row with a nonzero `sample_weight`; all are zero.")
    if weights.max() > (most := np.finfo(np.float32).max):
        raise ValueError(
            f"`{caller()}` needs `sample_weight` of at most {most:g}, got {weights.max():g}; divide by the mean."
        )
