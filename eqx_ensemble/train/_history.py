from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from .._brief import brief_doc
from .._caller import caller
from .._check import MemberMismatchError
from .._pytree import PyTree


class History(eqx.Module):
    """The curves of a run, on the host.

    **Attributes:**

    - `loss`: `(members, steps)`, the training loss before each step's update; with `fit(history="epochs")` its mean in
        each epoch. NaN after a member stopped or diverged.
    - `aux`: the loss's auxiliary outputs, each `(members, steps, ...)`, NaN (zero for integers) after a member stopped
        or diverged; `None` without `has_aux`.
    - `validation`: `(members, validations)`; `None` without validation data.
    - `step`: `(steps,)`, the steps of the run that are done after each column of `loss`.
    - `validation_step`: `(validations,)`, the same for `validation`.
    """

    loss: Float[np.ndarray, "members steps"]
    aux: PyTree
    validation: Float[np.ndarray, "members validations"] | None
    step: Int[np.ndarray, " steps"]
    validation_step: Int[np.ndarray, " validations"]

    __pdoc__ = brief_doc


def take_curves(history: History, index: Any) -> History:
    """The curves of some members."""
    loss, aux, validation = jax.tree.map(lambda x: x[index], (history.loss, history.aux, history.validation))
    return History(loss, aux, validation, history.step, history.validation_step)


def empty_history(num_members: int, aux: PyTree, *, validates: bool, dtype: Any) -> History:
    """The curves before the first step; `aux` are the shapes of one step's outputs of a member."""
    none = np.zeros(0, np.int64)
    of_aux = jax.tree.map(lambda x: np.zeros((num_members, 0, *x.shape), x.dtype), aux)
    scores = np.zeros((num_members, 0), dtype) if validates else None
    return History(np.zeros((num_members, 0), dtype), of_aux, scores, none, none)


def check_same_aux(parts: list[History]) -> None:
    """Raises unless curves have auxiliary outputs of one structure and shape."""
    kind = lambda part: (jax.tree.structure(part.aux), [x.shape[2:] for x in jax.tree.leaves(part.aux)])
    if any(kind(part) != kind(parts[0]) for part in parts):
        raise MemberMismatchError(
            f"`{caller()}` needs runs whose losses return the same auxiliary outputs.\n"
            "A training state has no curves: pass `run.train_state` instead of `run`."
        )


def join_in_time(parts: list[History]) -> History:
    """The curves of consecutive calls."""
    joined = lambda *xs: np.concatenate(xs, axis=1)
    scores = [part.validation for part in parts if part.validation is not None]
    return History(
        joined(*(part.loss for part in parts)),
        jax.tree.map(joined, *(part.aux for part in parts)),
        joined(*scores) if scores else None,
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.validation_step for part in parts]),
    )


def join_members(parts: list[History]) -> History:
    """The curves of several ensembles, with NaN (zero for integers) in the columns that shorter ones lack."""
    check_same_aux(parts)
    step = max((part.step for part in parts), key=len)
    validation_step = max((part.validation_step for part in parts), key=len)

    def pad(x: np.ndarray, count: int) -> np.ndarray:
        width = [(0, 0), (0, count - x.shape[1]), *((0, 0) for _ in x.shape[2:])]
        return np.pad(x, width, constant_values=np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0)

    joined = lambda *xs: np.concatenate([pad(x, len(step)) for x in xs])
    scores = [part.validation for part in parts if part.validation is not None]
    return History(
        joined(*(part.loss for part in parts)),
        jax.tree.map(joined, *(part.aux for part in parts)),
        np.concatenate([pad(x, len(validation_step)) for x in scores]) if scores else None,
        step,
        validation_step,
    )
