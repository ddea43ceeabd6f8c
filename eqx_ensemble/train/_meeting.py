"""Members that meet: losses and optimisers of one member that depend on all, along the mapped axis of the members."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from .._map import is_per_member
from .._mesh import sharding
from .._pytree import PyTree
from ._optimiser import update
from ._state import Status, TrainState, all_finite

MEMBERS = "eqx_ensemble.members"  # the name of the mapped axis


def of_all(tree: PyTree) -> PyTree:
    """A member's arrays as those of all members, `(members, ...)`; its gradients are its own part of theirs.

    Under `vmap` they are not mapped: what is computed from them is computed once, not once a member.
    """
    gather = lambda x: _gather(x) if eqx.is_inexact_array(x) else jax.lax.all_gather(x, MEMBERS)
    return jax.tree.map(lambda x: gather(x) if eqx.is_array(x) else x, tree)


def own_part(x: Array) -> Array:
    """A member's part of an array of all members."""
    return x[jax.lax.axis_index(MEMBERS)]


@jax.custom_vjp
def _gather(x: Array) -> Array:
    return jax.lax.all_gather(x, MEMBERS)


_gather.defvjp(lambda x: (_gather(x), None), lambda _, grads: (own_part(grads),))


@dataclasses.dataclass(frozen=True)
class JointLoss:
    """A loss of the predictions of ALL members, such as the CRPS of an ensemble or the likelihood of its mixture.

    In place of a loss in [`eqx_ensemble.fit`][] and [`eqx_ensemble.train.make_step`][], or of a score in
    [`eqx_ensemble.train.Validation`][]. Each member descends its own part of the gradient, with its own optimiser;
    what [`eqx_ensemble.train.Together`][] shares descends the whole gradient.

    Members are then NOT independent. All see the same batches, in the order of the first one; data and rows cannot be
    marked [`eqx_ensemble.Each`][]. All run at once, whatever the plan. One that has stopped keeps its weights, and its
    predictions stay in the loss. If those of one are not finite, the loss of all is not: all diverge, and get back the
    weights of the epoch's start. A line search cannot be used.

    **Arguments:**

    - `predict`: the predictions of ONE member, called like a loss: `predict(model, batch, key)`; for stateful members
        `predict(model, state, batch, key) -> (predictions, state)`; also with a parameter `hyper`.
    - `loss`: `loss(predictions, batch) -> value` of all members, every array of predictions `(members, batch, ...)`;
        with `has_aux` `(value, aux)`.

    ```python
    def predict(model, batch, key):
        return jax.vmap(model)(batch[0])

    def crps(predictions, batch):
        return ee.scores.crps(predictions, batch[1])

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, "scalar", 8, 1, key=key), 4, key=key)
    data, loss = (jnp.ones((64, 3)), jnp.ones(64)), ee.train.JointLoss(predict, crps)
    run = ee.fit(ensemble, loss, optax.adam(1e-3), data, epochs=2, key=key)
    ```

    ??? cite
        [Liu and Yao 1999](https://doi.org/10.1016/S0893-6080(99)00073-8), negative correlation; [Kellner and Ceriotti
        2024](https://arxiv.org/abs/2402.16621), shallow ensembles
    """

    predict: Callable[..., Any]
    loss: Callable[[Any, Any], Any]
    # On a mesh, which copies of the last member fill.
    _num_members: int | None = dataclasses.field(default=None, repr=False)
    _mesh: Mesh | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__wrapped__", self.predict)  # whose signature it has

    def __call__(self, *args: Any, **hyper: Any) -> Any:
        """The loss of one member, which is that of all, inside their mapped axis."""
        __tracebackhide__ = True
        predictions, batch, state = self.predict(*args, **hyper), args[-2], ()
        if len(args) == 4:
            predictions, *state = predictions
        value = self.loss(jax.tree.map(self._cut, of_all(predictions)), batch)
        value, *aux = value if isinstance(value, tuple) else (value,)
        return (value, *state, *aux) if state or aux else value

    def _cut(self, x: Any) -> Any:
        if self._mesh is None or not eqx.is_array(x):
            return x
        return jax.lax.with_sharding_constraint(x, sharding(self._mesh))[: self._num_members]


def check_alike(inputs: dict[str, PyTree]) -> None:
    """Raises if what a loss of all members reads is marked as that of each."""
    for name, tree in inputs.items():
        if any(map(is_per_member, jax.tree.leaves(tree, is_leaf=is_per_member))):
            raise TypeError(f"All members of a `JointLoss` see the same rows: `{name}` cannot be per member.")


class JointOptimiser(abc.ABC):
    """An optimiser whose step of one member depends on all members.

    **Attributes:**

    - `optimiser`: that of one member, or a function of its hyperparameters that returns one.
    """

    optimiser: Any

    @abc.abstractmethod
    def meet(self, state: TrainState[Any], now: Any, value: Array, grads: PyTree, *, joint: bool) -> tuple[Any, PyTree]:
        """What one member has `now`, changed before its own optimiser's step, and the gradients which that takes.

        `grads` are those by the member's and by the common weights; `joint` says that the loss is that of all members.
        """


def members_meet(*parts: Any) -> bool:
    """Whether members meet in a loss, an optimiser or a score."""
    return any(isinstance(part, JointLoss | JointOptimiser) for part in parts)


def alone(optimiser: Any) -> Any:
    """The optimiser of one member."""
    return optimiser.optimiser if isinstance(optimiser, JointOptimiser) else optimiser


def mean_of_members(tree: PyTree, chosen: Bool[Array, ""]) -> PyTree:
    """The mean over the chosen members, the same for all; zeros if there is none."""
    count = jax.lax.psum(chosen.astype(jnp.int32), MEMBERS)
    mean = lambda x: jax.lax.psum(jnp.where(chosen, x, 0), MEMBERS) / jnp.maximum(count, 1).astype(x.real.dtype)
    return jax.tree.map(mean, tree)


@dataclasses.dataclass(frozen=True)
class Together(JointOptimiser):
    """An optimiser that also trains shared parameters, by the mean of the members' losses.

    In place of an optimiser in [`eqx_ensemble.fit`][], [`eqx_ensemble.train.init`][] and
    [`eqx_ensemble.train.make_step`][]. A step descends each member's own loss over its own parameters, and the mean
    loss of all members over the floating-point arrays that they share, such as a trunk with a head for each member. A
    penalty of shared parameters in the loss counts once.

    Members are then NOT independent: what one of them sees changes the others. A member whose gradient is not finite
    has no part in the mean. Best weights, `patience` and a target follow the mean of the validation scores, so that all
    members stop together. All members run at once, whatever the plan.

    **Arguments:**

    - `optimiser`: the optimiser of each member's own parameters, or a function of its hyperparameters that returns
        one.
    - `shared`: the optax optimiser of the shared parameters. It cannot evaluate the loss, as line searches do.

    **Raises:** where it is used, `ValueError` if the ensemble shares no floating-point array.

    ```python
    class Bounded(eqx.Module):
        mlp: eqx.nn.MLP
        lower: jax.Array

        def __call__(self, x):
            mean, log_var = self.mlp(x)
            return mean, self.lower + jax.nn.softplus(log_var - self.lower)

    def nll(model, batch, key):
        mean, log_var = jax.vmap(model)(batch[0])
        return jnp.mean((mean - batch[1]) ** 2 * jnp.exp(-log_var) + log_var) - 0.01 * model.lower

    make = lambda key: Bounded(eqx.nn.MLP(3, 2, 8, 1, key=key), jnp.array(-5.0))
    ensemble = ee.build(make, 4, shared=lambda model: model.lower, key=key)
    optimiser = ee.train.Together(optax.adam(1e-3), shared=optax.adam(1e-2))
    run = ee.fit(ensemble, nll, optimiser, (jnp.ones((64, 3)), jnp.ones(64)), epochs=2, key=key)
    run.ensemble.stacked.lower.shape  # ()
    ```

    ??? cite

        Chua, Calandra, McAllister and Levine, "Deep Reinforcement Learning in a Handful of Trials using Probabilistic
        Dynamics Models" (NeurIPS 2018), whose bounds of log-variances are trained in this way.
    """

    optimiser: optax.GradientTransformation | optax.MultiSteps | Callable[[Any], optax.GradientTransformation]
    shared: optax.GradientTransformation = dataclasses.field(kw_only=True)

    def meet(self, state: TrainState[Any], now: Any, value: Array, grads: PyTree, *, joint: bool) -> tuple[Any, PyTree]:
        """Changes the shared weights."""
        own, common = grads
        if joint:  # each member has its own part of the gradient
            mean, common = value, jax.tree.map(lambda x: jax.lax.psum(x, MEMBERS), common)
        else:
            mean, common = mean_of_members((value, common), (state.status == Status.OK) & all_finite(common))
        common, common_state = update(self.shared, common, now.common_state, now.common, mean, None, None)
        return now._replace(common=common, common_state=common_state), own


Optimiser = (
    optax.GradientTransformation | optax.MultiSteps | Callable[[Any], optax.GradientTransformation] | JointOptimiser
)
"""An optax optimiser, a function that makes one from a member's hyperparameters, or one whose members meet."""
