from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np

from .._caller import caller
from .._check import (
    MemberMismatchError,
    array_leaves,
    check_integer_ids,
    is_key,
    is_member_array,
    is_traced,
    kind_text,
    path_text,
)
from ._ensemble import Ensemble


def check_model_state(state: Any, num_members: int) -> None:
    """Raises unless `state` is the stacked state of `num_members` members, or `None`."""
    if state is None:
        return
    if not isinstance(state, eqx.nn.State):
        raise TypeError(
            f"`{caller()}` needs `state` to be the stacked `equinox.nn.State` that `build` returned with the ensemble, "
            f"got {kind_text(state)}."
        )
    for path, x in array_leaves(state):
        if x.ndim == 0 or x.shape[0] != num_members:
            raise MemberMismatchError(
                f"`{caller()}` needs a state with one value per member; at `{path}`: expected ({num_members}, ...), "
                f"got {x.shape}.\nIndex the state as the ensemble: `tree.take(state, index)`."
            )


def check_model_state_given(stacked: Any, state: Any) -> None:
    """Raises if the members are stateful and no state is given."""
    if state is not None:
        return
    indices = [x for x in jax.tree.leaves(stacked, is_leaf=_is_state_index) if _is_state_index(x)]
    if indices:
        raise TypeError(
            f"`{caller()}`: the members are stateful (for example they contain BatchNorm), but no `state` was given.\n"
            "Build with `ensemble, state = build(eqx.nn.make_with_state(Model), ...)` and pass `state=state`."
        )


def _is_state_index(x: Any) -> bool:
    return isinstance(x, eqx.nn.StateIndex)


T = TypeVar("T")


def check_no_text_arrays(tree: Any) -> None:
    """Raises for NumPy leaves that JAX cannot hold, which would otherwise fail at the first compilation."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, np.ndarray) and not is_member_array(leaf):
            raise TypeError(
                f"`{caller()}` makes ensembles of models whose arrays jax can hold; at `{path_text(path)}`: a NumPy "
                f"array of dtype {leaf.dtype}, shape {leaf.shape}.\nStore it as a tuple in a field of "
                "`equinox.field(static=True)`, which jax ignores."
            )


def check_selection(select: Callable[[Any], T], tree: Any) -> T:
    """Applies a `shared=` selection. Raises `ValueError` if it fails."""
    try:
        return select(tree)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            "`shared` must select nodes of one member as `equinox.tree_at` does, for example "
            f"`lambda model: model.trunk`; it raised {type(error).__name__}: {error}"
        ) from error


def check_equal_members(tree: Any) -> None:
    """Raises unless arrays that cannot be averaged are equal in all members."""
    for path, x in array_leaves(tree):
        if is_traced(x):
            continue
        raw = np.asarray(jax.random.key_data(x) if is_key(x) else x)
        if (raw != raw[:1]).any():
            raise MemberMismatchError(
                f"`{caller()}` averages floating-point arrays; the {x.dtype} array at `{path}` differs between members "
                "and has no mean of its dtype.\nReplace it first, or average with `tree.weighted_mean`."
            )


def check_ensemble(value: Any) -> None:
    """Raises unless `value` is an `Ensemble`."""
    if isinstance(value, Ensemble):
        check_integer_ids(value.ids)
        return
    if isinstance(value, list | tuple):
        raise TypeError(
            f"`{caller()}` needs an `Ensemble`, got {kind_text(value)}.\n"
            "If it holds models, make an ensemble of them first: `stack(models)`."
        )
    if isinstance(getattr(value, "ensemble", None), Ensemble):
        raise TypeError(f"`{caller()}` needs an `Ensemble`, got a run: pass `run.ensemble`, or call `run.predict(x)`.")
    raise TypeError(
        f"`{caller()}` needs an `Ensemble`, got {kind_text(value)}.\n"
        "`stack([model, ...])` makes one of models, `from_stacked(model)` of a model that is stacked already."
    )
