import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ._heads import AbstractHead, Scaler

MakeNetwork = Callable[..., Any]
"""`make(in_size, out_size, key=key)` returns a Module, or a Module and its `equinox.nn.State`."""


class Scaling(eqx.Module):
    """The standardisation of features and targets, shared by all members."""

    inputs: Scaler
    targets: Scaler | None


@final
class Member(eqx.Module):
    """One member of a fitted estimator: a network with the standardisation of its inputs and outputs.

    Called with the features of one row `(features,)`, it returns a prediction: `(mean, variance)` for Gaussian heads,
    each of the shape of one target; the target for point heads; logits `(classes,)` for classifiers.
    """

    network: Any
    scaling: Scaling
    head: AbstractHead
    takes_key: bool = eqx.field(static=True)

    def outputs(self, x: Float[Array, "..."], *state: eqx.nn.State, key: Key[Array, ""] | None = None) -> Any:
        """The network's outputs for standardised features."""
        return self.network(x, *state, **({"key": key} if self.takes_key else {}))

    def __call__(self, x: Float[Array, "..."], *state: eqx.nn.State, key: Key[Array, ""] | None = None) -> Any:
        out = self.outputs(self.scaling.inputs.standardise(x), *state, key=key)
        outputs, *state_after = out if state else (out,)
        prediction = self.head.restore(self.head.read(outputs), self.scaling.targets)
        return (prediction, *state_after) if state else prediction


@final
@dataclasses.dataclass(frozen=True)
class MemberMaker:
    """The constructor of one member from one key, for `build`; it is pickled to make the members again."""

    make: MakeNetwork
    in_size: int
    head: AbstractHead
    scaling: Scaling

    def __call__(self, key: Key[Array, ""]) -> Any:
        made = self.make(self.in_size, self.head.out_size, key=key)
        network, *state = made if isinstance(made, tuple) else (made,)
        member = Member(network, self.scaling, self.head, _takes_key(network))
        return (member, *state) if state else member


def _takes_key(network: Any) -> bool:
    """Whether the call of a network takes a key, as with dropout."""
    parameters = inspect.signature(network).parameters.values()
    return any(p.name == "key" or p.kind is p.VAR_KEYWORD for p in parameters)


def loss(model: Member, batch: tuple[Array, Array, Array], key: Key[Array, ""]) -> Float[Array, ""]:
    """The weighted loss of a batch; weights have mean one over all training rows."""
    x, y, weights = batch
    outputs = jax.vmap(lambda x, key: model.outputs(x, key=key), axis_name="batch")(x, _keys(model, key, x))
    return jnp.mean(weights * jax.vmap(model.head.loss)(outputs, y))


def stateful_loss(
    model: Member, state: eqx.nn.State, batch: tuple[Array, Array, Array], key: Key[Array, ""]
) -> tuple[Float[Array, ""], eqx.nn.State]:
    """The same for networks with a state, such as batch normalisation over the axis `"batch"`."""
    x, y, weights = batch
    one = lambda x, state, key: model.outputs(x, state, key=key)
    over_batch = jax.vmap(one, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    outputs, state = over_batch(x, state, _keys(model, key, x))
    return jnp.mean(weights * jax.vmap(model.head.loss)(outputs, y)), state


def _keys(model: Member, key: Key[Array, ""], x: Array) -> Key[Array, " batch"] | None:
    return jax.random.split(key, len(x)) if model.takes_key else None


def call_network(model: Member, x: Float[Array, "..."], *state: eqx.nn.State) -> Any:
    """The prediction of standardised targets from standardised features, as `predict` calls it."""
    out = model.outputs(x, *state)
    return model.head.read(out[0] if state else out)
