import contextlib
from collections.abc import Iterator
from typing import Any

from .._axes._check import check_member_axis
from .._check import (
    MemberMismatchError,
    array_leaves,
)


def check_stacked_leaves(stacked: Any, ids: Any) -> None:
    """Every array leaf of an ensemble has the members axis of its ids."""
    if not array_leaves(stacked):
        return
    found = check_member_axis(stacked, axis=0, name="Ensemble")
    if found != ids.shape[0]:
        raise MemberMismatchError(f"`Ensemble` needs one id per member: {found} members, {ids.shape[0]} ids.")


def check_one_mode(stacked: Any, shared: Any, path: str) -> None:
    """A layer's flag `inference` has one value for all members, in `stacked` and in `shared`."""
    if type(stacked) is bool and type(shared) is bool and stacked is not shared:
        raise ValueError(
            "An `Ensemble` needs one value of each layer's `inference`, which all members share.\n"
            f"  at `{path}`: expected {shared}, as in `shared`, got {stacked} in `stacked`\n"
            "Set both by `equinox.nn.inference_mode(ensemble, value=...)`."
        )


def check_index_of_members(index: Any) -> None:
    """An index of members, not one that reaches into their arrays."""
    if isinstance(index, tuple):
        raise TypeError(
            f"An ensemble is indexed along its members only, got {index!r}.\n"
            "Write `ensemble[[0, 1]]` for two members, `ensemble[0][1]` for a member of a nested ensemble."
        )


def check_one_member(index: Any) -> Any:
    """The index of one member of a tree whose ids were filtered out."""
    if isinstance(index, slice | list | tuple) or getattr(index, "ndim", 0) > 0:
        raise TypeError(
            "This `Ensemble` holds no member ids, as gradients and filtered trees do not: index it with one integer, "
            "or take several members with `tree.take(tree, index)`."
        )
    return index


def check_callable(model: Any) -> None:
    """The members are models that can be called."""
    if not callable(model):
        raise TypeError(f"The members of this ensemble are of type {type(model).__name__} and cannot be called.")


_FUNCTIONS = {
    "fit": "`fit(ensemble, loss, optimiser, data, ...)`",
    "predict": "`predict(ensemble, x)`",
    "save": "`save(path, ensemble)`",
    "load": "`load(path, like)`",
}


def attribute_message(name: str) -> str:
    """An ensemble lacks an attribute that its members may have, or that is a function of the package."""
    if name in _FUNCTIONS:
        return f"An `Ensemble` has no method `{name}`: it is a function of the package, {_FUNCTIONS[name]}."
    return (
        f"An `Ensemble` has no attribute `{name}`. What its members hold is in `ensemble.stacked`, with the leading "
        "members axis, or in a single member, `ensemble[0]`."
    )


@contextlib.contextmanager
def explain_call() -> Iterator[None]:
    """Adds to a member's own errors what an ensemble passes to it: the usual cause is a batch."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not isinstance(error, MemberMismatchError):
            error.add_note(
                "An ensemble calls every member with one example. For a batch pass `Batch(x)`, for one "
                "input per member `Each(x)`."
            )
        raise
