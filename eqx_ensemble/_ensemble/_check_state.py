from typing import Any

import equinox as eqx
import jax

from .._check import MemberMismatchError, array_leaves, kind_text


def check_model_state(state: Any, num_members: int, *, name: str) -> None:
    """Raises unless `state` is the stacked state of `num_members` members, or `None`."""
    if state is None:
        return
    if not isinstance(state, eqx.nn.State):
        raise TypeError(
            f"`{name}` needs `state` to be the stacked `equinox.nn.State` that `build` returned with the ensemble, "
            f"got {kind_text(state)}."
        )
    for path, x in array_leaves(state):
        if x.ndim == 0 or x.shape[0] != num_members:
            raise MemberMismatchError(
                f"`{name}` needs a state with one value per member; at `{path}`: expected ({num_members}, ...), "
                f"got {x.shape}.\nIndex the state as the ensemble: `tree.take(state, index)`."
            )


def check_model_state_given(stacked: Any, state: Any, *, name: str) -> None:
    """Raises if the members are stateful and no state is given."""
    if state is not None:
        return
    indices = [x for x in jax.tree.leaves(stacked, is_leaf=_is_state_index) if _is_state_index(x)]
    if indices:
        raise TypeError(
            f"`{name}`: the members are stateful (for example they contain BatchNorm), but no `state` was given.\n"
            "Build with `ensemble, state = build(eqx.nn.make_with_state(Model), ...)` and pass `state=state`."
        )


def _is_state_index(x: Any) -> bool:
    return isinstance(x, eqx.nn.StateIndex)
