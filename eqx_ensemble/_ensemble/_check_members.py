import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._axes._check import check_member_axis
from .._check import (
    MemberMismatchError,
    array_leaves,
)


def check_stacked_leaves(stacked: Any, ids: Any) -> None:
    """Raises unless all array leaves have one value per id along the members axis."""
    if not array_leaves(stacked):
        return
    found = check_member_axis(stacked, axis=0, name="Ensemble")
    if found != ids.shape[0]:
        raise MemberMismatchError(f"`Ensemble` needs one id per member: {found} members, {ids.shape[0]} ids.")


def check_one_mode(stacked: Any, shared: Any, path: str) -> None:
    """Raises if a layer's `inference` flag differs between `stacked` and `shared`."""
    if type(stacked) is bool and type(shared) is bool and stacked is not shared:
        raise ValueError(
            "An `Ensemble` needs one value of each layer's `inference`, which all members share.\n"
            f"  at `{path}`: expected {shared}, as in `shared`, got {stacked} in `stacked`\n"
            "Set both by `equinox.nn.inference_mode(ensemble, value=...)`."
        )


def check_index_of_members(index: Any) -> None:
    """Raises for a tuple, which would index into the members' arrays."""
    if isinstance(index, tuple):
        raise TypeError(
            f"An ensemble is indexed along its members only, got {index!r}.\n"
            "Write `ensemble[[0, 1]]` for two members, `ensemble[0][1]` for a member of a nested ensemble."
        )


def check_one_member(index: Any) -> Any:
    """Raises unless `index` selects one member, for a tree whose ids were filtered out. Returns it."""
    if isinstance(index, slice | list | tuple) or getattr(index, "ndim", 0) > 0:
        raise TypeError(
            "This `Ensemble` holds no member ids, as gradients and filtered trees do not: index it with one integer, "
            "or take several members with `tree.take(tree, index)`."
        )
    return index


def check_callable(model: Any) -> None:
    """Raises unless the members can be called."""
    if not callable(model):
        raise TypeError(f"The members of this ensemble are of type {type(model).__name__} and cannot be called.")


_FUNCTIONS = {
    "fit": "`fit(ensemble, loss, optimiser, data, ...)`",
    "predict": "`predict(ensemble, x)`",
    "save": "`save(path, ensemble)`",
    "load": "`load(path, like)`",
}


def attribute_message(name: str, members: Any) -> str:
    """The message for a missing attribute, which may be one of the members or a function of the package."""
    if name in _FUNCTIONS:
        return f"An `Ensemble` has no method `{name}`: it is a function of the package, {_FUNCTIONS[name]}."
    if callable(getattr(type(members), name, None)):
        return (
            f"An `Ensemble` has no method `{name}`. To call that of every member: "
            f"`ensemble.map(lambda model, x: model.{name}(x), x)`; of one: `ensemble[0].{name}(x)`."
        )
    return (
        f"An `Ensemble` has no attribute `{name}`. What its members hold is in `ensemble.stacked`, with the leading "
        "members axis, or in a single member, `ensemble[0]`."
    )


@contextlib.contextmanager
def explain_call(inputs: Any) -> Iterator[None]:
    """Adds a note about the inputs of a member to its errors: the usual cause is an unmarked batch."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not isinstance(error, MemberMismatchError):
            if isinstance(error, TypeError) and any(isinstance(x, np.ndarray) for x in jax.tree.leaves(inputs)):
                error.add_note(
                    "NumPy arrays are passed on as they are: where a member's annotations need JAX arrays, call it "
                    "with `jnp.asarray(x)`."
                )
            error.add_note(
                "An ensemble calls every member with one example. For a batch pass `Batch(x)`, for one "
                "input per member `Each(x)`."
            )
        raise
