from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._pytree import PyTree
from .._warnings import ignore_warnings
from ._run import Run
from ._state import TrainState
from .compiled._loss import Loss
from .data._data import member_shapes


def check_same_aux(begun: Any, loss: Loss, first: TrainState, batch: Callable[[], PyTree] | None) -> None:
    """Raises if a run continues without the auxiliary outputs that its history has, or with the first ones.

    `batch` returns the shapes of one member's batch; without it, new outputs are refused after the first steps.
    """
    if not isinstance(begun, Run) or (begun.history.aux is not None) == loss.has_aux:
        return
    if loss.has_aux and (batch is None or not _returns_arrays(loss, first, batch())):
        return
    before, now = (f"`has_aux={has_aux}`" for has_aux in (not loss.has_aux, loss.has_aux))
    raise TypeError(
        f"`fit` continues a run whose history was recorded with {before}; got {now}.\n"
        "Keep `has_aux`, which the history needs; or continue from `run.train_state`, with a history of its own."
    )


def _returns_arrays(loss: Loss, state: TrainState, batch: PyTree) -> bool:
    """Whether the loss's auxiliary outputs hold any array; a loss that fails is called again by the first step."""
    moving, fixed = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, (state.moving, state.fixed))
    call = lambda *args: loss(*args)[1][1]
    try:
        with ignore_warnings():
            aux = eqx.filter_eval_shape(
                call, moving.params, moving.model_state, fixed, member_shapes(state.shared), batch, fixed.key
            )
    except Exception:
        return False
    return bool(jax.tree.leaves(aux))
