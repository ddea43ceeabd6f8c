from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..._check import is_member_array
from ..._foreign import as_hashable
from ..._jaxpr import warn_of_two_batch_axes
from ..._pytree import PyTree
from .._state import MemberConstants, TrainState
from ._check import check_loss_output, check_loss_signature, explain_loss


class Loss(eqx.Module):
    """A user's loss or score of one member, behind one signature for all kinds."""

    fn: Callable[..., Any] = eqx.field(static=True)
    stateful: bool = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    wants_hyper: bool = eqx.field(static=True)
    purpose: Literal["in training", "in validation"] = eqx.field(static=True)

    def __call__(
        self, params: PyTree, state: PyTree, fixed: MemberConstants, shared: PyTree, batch: PyTree, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], tuple[PyTree, PyTree]]:
        """The loss's value, the new state of the model (`None` if it has none) and the auxiliary outputs.

        In validation the model is in inference mode.
        """
        model = eqx.combine(params, fixed.frozen, shared)
        if self.purpose == "in validation":
            model = eqx.nn.inference_mode(model)
        arguments = (model, state, batch, key) if self.stateful else (model, batch, key)
        # A `State` can be updated only once, and a line search would update this one again: each call gets a copy.
        own = (model, jax.tree.map(lambda x: x, state), batch, key) if self.stateful else arguments
        named = {"hyper": fixed.hyper} if self.wants_hyper else {}
        shapes = jax.tree.map(_shape, (arguments, named))  # taken now, because a state can be used only once
        with explain_loss(self.fn, arguments, named.get("hyper"), purpose=self.purpose):
            out = self.fn(*own, **named)
            check_loss_output(out, stateful=self.stateful, has_aux=self.has_aux)
        warn_of_two_batch_axes(self.fn, *shapes)
        if not (self.stateful or self.has_aux):
            return out, (None, None)
        value, *more = out
        state = more[0] if self.stateful else None
        aux = jax.tree.map(jnp.asarray, more[-1]) if self.has_aux else None
        return value, (state, aux)


def _shape(x: Any) -> Any:
    if not is_member_array(x):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=isinstance(x, jax.Array) and x.weak_type)


def as_loss(
    fn: Callable[..., Any],
    *,
    stateful: bool,
    has_aux: bool,
    hyper: PyTree,
    purpose: Literal["in training", "in validation"] = "in training",
) -> Loss:
    """The loss as the step calls it, its signature checked."""
    fn = as_hashable(fn)
    wants_hyper = check_loss_signature(fn, stateful=stateful, hyper=hyper)
    return Loss(fn, stateful, has_aux, wants_hyper, purpose)


def make_losses(
    first: TrainState,
    loss: Callable[..., Any],
    score: Callable[..., Any] | None,
    *,
    has_aux: bool,
    has_validation: bool,
) -> tuple[Loss, Loss | None]:
    """The loss, and the score if there are validation data."""
    options = {"stateful": first.model_state is not None, "hyper": first.fixed.hyper}
    loss_of_one = as_loss(loss, has_aux=has_aux, **options)
    if not has_validation:
        return loss_of_one, None
    return loss_of_one, as_loss(score or loss, has_aux=has_aux and score is None, purpose="in validation", **options)
