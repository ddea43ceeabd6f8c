"""The spaces in which members interact: weights, or outputs."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..._pytree import PyTree
from ...train._state import MemberConstants
from ...train.compiled._loss import as_loss


class Member(NamedTuple):
    """The arguments of the evaluation of one member in a step."""

    params: PyTree
    model_state: PyTree
    fixed: MemberConstants
    shared: PyTree
    batch: PyTree
    key: Key[Array, ""]


class Evaluation(NamedTuple):
    """A member as a point, with its loss and the gradient of the loss with respect to the point."""

    value: Float[Array, ""]
    aux: PyTree
    model_state: PyTree
    point: Float[Array, " size"]
    gradient: Float[Array, " size"]


class AbstractSpace(eqx.Module):
    """A space whose points represent members. Methods take one member."""

    @abc.abstractmethod
    def evaluate(self, member: Member) -> Evaluation:
        """The member as a point, with the loss and its gradient."""

    @abc.abstractmethod
    def pull_back(self, member: Member, gradient: Float[Array, " size"]) -> PyTree:
        """Maps a gradient with respect to the point to one with respect to the weights."""


class WeightSpace(AbstractSpace):
    """The space of weights: points are flattened weights."""

    loss: Callable[..., Any] = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    name: str = eqx.field(static=True)

    def evaluate(self, member: Member) -> Evaluation:
        """The weights as a vector, with the gradient of the loss."""
        params, stateful, hyper = member.params, member.model_state is not None, member.fixed.hyper
        loss = as_loss(self.loss, stateful=stateful, has_aux=self.has_aux, hyper=hyper, name=self.name)
        rest = (member.model_state, member.fixed, member.shared, member.batch, member.key)
        (value, (state, aux)), grads = jax.value_and_grad(loss, has_aux=True)(params, *rest)
        return Evaluation(value, aux, state, ravel(params), ravel(grads))

    def pull_back(self, member: Member, gradient: Float[Array, " size"]) -> PyTree:
        """The vector as a tree like the weights."""
        return unravel(gradient, member.params)


def ravel(tree: PyTree) -> Float[Array, " size"]:
    """Flattens all arrays to one vector, at least float32."""
    leaves = jax.tree.leaves(tree)
    dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in leaves) else jnp.float32
    return jnp.concatenate([x.astype(dtype).reshape(-1) for x in leaves])


def unravel(vector: Float[Array, " size"], like: PyTree) -> PyTree:
    """The inverse of `ravel`, in the shapes and dtypes of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    ends = [0]
    for x in leaves:
        ends.append(ends[-1] + x.size)
    parts = [
        vector[start:end].reshape(x.shape).astype(x.dtype)
        for x, start, end in zip(leaves, ends[:-1], ends[1:], strict=True)
    ]
    return jax.tree.unflatten(treedef, parts)
