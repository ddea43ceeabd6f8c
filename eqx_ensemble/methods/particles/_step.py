import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from ..._caller import caller
from ..._check import check_flag, check_function, check_word, type_error
from ..._ensemble import M
from ..._foreign import take_in
from ..._keys import tag
from ..._map import is_per_member, view
from ..._pytree import PyTree
from ...train import Metrics, Status, TrainState
from ...train._blocks import axes_of_inputs
from ...train._member import Task, call, flags_of, gradient_of, trained_of
from ...train._optimiser import Optimiser, update
from ...train._state import pieces_of, weights_of
from ...train._step import keep_if_finite
from ._directions import RBF, Kernel, Method, check_kernel, check_num_rows, check_outputs, directions

# The spaces in which members interact: weights, or outputs.


class Evaluation(NamedTuple):
    """A member as a point, with its loss and the gradient of the loss with respect to the point."""

    value: Float[Array, ""]
    aux: PyTree
    model_state: PyTree
    point: Float[Array, " size"]
    gradient: Float[Array, " size"]


class AbstractSpace(eqx.Module):
    """A space whose points represent members. Methods take the training state of one member."""

    @abc.abstractmethod
    def evaluate(self, state: TrainState[Any], batch: PyTree, key: Key[Array, ""]) -> Evaluation:
        """The member as a point, with the loss and its gradient."""

    @abc.abstractmethod
    def pull_back(
        self, state: TrainState[Any], batch: PyTree, key: Key[Array, ""], gradient: Float[Array, " size"]
    ) -> PyTree:
        """Maps a gradient with respect to the point to one with respect to the weights."""


class WeightSpace(AbstractSpace):
    """The space of weights: points are flattened weights."""

    loss: Callable[..., Any] = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)

    def evaluate(self, state: TrainState[Any], batch: PyTree, key: Key[Array, ""]) -> Evaluation:
        """The weights as a vector, with the gradient of the loss."""
        task, now = Task(self.loss, None, has_aux=self.has_aux), trained_of(state)
        value, (grads, _), model_state, aux, _ = gradient_of(task, now, state, batch, key)
        return Evaluation(value, aux, model_state, ravel(now.own), ravel(grads))

    def pull_back(
        self, state: TrainState[Any], batch: PyTree, key: Key[Array, ""], gradient: Float[Array, " size"]
    ) -> PyTree:
        """The vector as a tree like the weights."""
        del batch, key
        return unravel(gradient, state.params)


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


class InteractingStep(eqx.Module):
    """A compiled training step in which members interact; see [`eqx_ensemble.methods.particles.make_step`][]."""

    space: AbstractSpace
    optimiser: Optimiser = eqx.field(static=True)
    num_rows: Any
    method: Method = eqx.field(static=True)
    kernel: Kernel

    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """Takes one step on one batch, which is shared except for parts marked [`eqx_ensemble.Each`][]."""
        return _one_step(self, state, take_in(batch, "batch"))


def make_step(
    loss: Callable[..., Any],
    optimiser: Optimiser,
    *,
    num_rows: Any,
    method: Method = "svgd",
    kernel: Kernel | None = None,
    has_aux: bool = False,
) -> InteractingStep:
    r"""Makes a compiled step in which members INTERACT in weight space: `state, metrics = step(state, batch)`.

    Members are particles that jointly represent a posterior. The step is called like that of
    [`eqx_ensemble.train.make_step`][], also in [`eqx_ensemble.train.scan_steps`][]; loss and optimiser are those of ONE
    member. With scores $s_i = -N \nabla L_i$ and the directions $\phi_i$ of [`eqx_ensemble.methods.particles.svgd`][]
    or [`eqx_ensemble.methods.particles.wgd`][] between flattened weights, the optimiser receives $-\phi_i / N$.

    Diverged and stopped members no longer affect the others. A step takes time of order `members**2` times the number
    of weights, and memory for three copies of the weights.

    **Arguments:**

    - `loss`: as for [`eqx_ensemble.train.make_step`][]: the negative log-posterior per row, with a prior such as
        [`eqx_ensemble.methods.priors.gaussian_penalty`][]; without one, particles drift apart indefinitely.
    - `optimiser`: that of [`eqx_ensemble.train.init`][]; no line search.
    - `num_rows`: $N$, the number of all training rows, divided by a temperature if any.
    - `method`: `"svgd"`, or `"wgd"` for repulsive ensembles.
    - `kernel`: as for [`eqx_ensemble.methods.particles.svgd`][].
    - `has_aux`: whether the loss returns auxiliary outputs after its other outputs.

    **Returns:** [`eqx_ensemble.methods.particles.InteractingStep`][].

    ```python
    def loss(model, batch, key):
        x, y = batch
        nll = 0.5 * jnp.mean((jax.vmap(model)(x) - y) ** 2)
        return nll + ee.methods.priors.gaussian_penalty(model, num_rows=8)


    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    optimiser = optax.adam(1e-2)
    state = ee.train.init(ensemble, optimiser, key=key)
    step = ee.methods.particles.make_step(loss, optimiser, num_rows=8)
    state, metrics = step(state, (jnp.ones((8, 3)), jnp.zeros((8, 1))))
    ```

    ??? cite
        [Liu and Wang 2016](https://arxiv.org/abs/1608.04471); [D'Angelo and Fortuin
        2021](https://arxiv.org/abs/2106.11642)
    """
    check_function(loss, "loss", example="lambda model, batch, key: ...")
    check_flag(has_aux, "has_aux")
    return interacting_step(WeightSpace(loss, has_aux), optimiser, num_rows, method, kernel)


def interacting_step(
    space: AbstractSpace, optimiser: Optimiser, num_rows: Any, method: Method, kernel: Kernel | None
) -> InteractingStep:
    """Checks the options. Returns the step of members that interact in a space."""
    check_num_rows(num_rows)
    check_word(method, "method", ("svgd", "wgd"))
    kernel = RBF() if kernel is None else kernel
    check_kernel(kernel)
    return InteractingStep(space, optimiser, num_rows, method, kernel)


@eqx.filter_jit
def _one_step(step: InteractingStep, state: TrainState[Any], batch: PyTree) -> tuple[TrainState[Any], Metrics]:
    if state.together is not None:
        raise TypeError("Members that interact cannot be those of `train.Together`.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            got = f"got {leaf.dtype} at `{jax.tree_util.keystr(path)}`"
            raise type_error("real weights", got, "Leave it out with `trainable=` of `train.init`.")
    moving, _, rest = pieces_of(state)
    own, axes = eqx.if_array(0), (eqx.if_array(0), axes_of_inputs(batch))

    def member(moving: PyTree, batch: PyTree) -> tuple[TrainState[Any], PyTree, Any]:
        one = eqx.combine(moving, rest)
        batch = jax.tree.map(view, batch, is_leaf=is_per_member)
        return one, batch, jax.random.fold_in(jax.random.fold_in(one.keys, tag("loss")), one.step)

    evaluate = lambda moving, batch: step.space.evaluate(*member(moving, batch))
    found: Evaluation = eqx.filter_vmap(evaluate, in_axes=axes)(moving, batch)
    finite = jnp.isfinite(found.value) & _all_finite(found.point) & _all_finite(found.gradient)
    gradients = _meet(step, found, (state.status == Status.OK) & finite)

    def move(moving: PyTree, batch: PyTree, gradient: Array, found: Evaluation) -> tuple[PyTree, Metrics]:
        one, batch, key = member(moving, batch)
        grads, now = step.space.pull_back(one, batch, key, gradient), trained_of(one)
        params, opt_state = update(step.optimiser, grads, now.opt_state, now.own, found.value, None, one.hyper)
        new = now._replace(own=params, opt_state=opt_state, model_state=found.model_state)
        after, metrics = keep_if_finite(one, new, found.value, found.aux)
        return eqx.filter(after, flags_of(moving)), metrics

    moved = eqx.filter_vmap(move, in_axes=(*axes, 0, own))(moving, batch, gradients, found)
    return eqx.combine(moved[0], rest), moved[1]


def _meet(step: InteractingStep, found: Evaluation, active: Bool[Array, " members"]) -> Float[Array, "members size"]:
    """The gradients that the optimiser receives at each point, after the interaction of members.

    An inactive member keeps its own gradient, from which divergence is detected.
    """
    num_rows = jnp.asarray(step.num_rows, found.point.dtype)
    scores = -num_rows * found.gradient
    moved = directions(step.method, step.kernel, found.point, scores, active)
    return jnp.where(active[:, None], -moved / num_rows, found.gradient)


def _all_finite(points: Float[Array, "members size"]) -> Bool[Array, " members"]:
    return jnp.all(jnp.isfinite(points), axis=1)


class FunctionSpace(AbstractSpace):
    """The space of functions: points are the outputs for the rows of a batch."""

    outputs: Callable[..., Any] = eqx.field(static=True)
    loss: Callable[..., Any] = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)

    def evaluate(self, state: TrainState[Any], batch: PyTree, key: Key[Array, ""]) -> Evaluation:
        """The outputs as a vector, with the gradient of the loss with respect to them."""
        if state.model_state is not None:
            raise NotImplementedError(
                f"`{caller()}` takes members without state.\n"
                "Use `methods.particles.make_step`, or layers without running statistics, such as `eqx.nn.LayerNorm`."
            )
        outputs = call(self.outputs, state.ensemble.stacked, None, batch, key, state.hyper)
        check_outputs(outputs)

        def loss(outputs: PyTree) -> tuple[Array, PyTree]:
            found = call(self.loss, outputs, None, batch, key, state.hyper)
            return found if self.has_aux else (found, None)

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(outputs)
        return Evaluation(value, jax.tree.map(jnp.asarray, aux), None, ravel(outputs), ravel(grads))

    def pull_back(
        self, state: TrainState[Any], batch: PyTree, key: Key[Array, ""], gradient: Float[Array, " size"]
    ) -> PyTree:
        """The product with the transposed Jacobian of the outputs, which are recomputed to save memory."""
        weights = weights_of(state)

        def outputs_of(params: PyTree) -> PyTree:
            return call(self.outputs, eqx.combine(params, weights.fixed), None, batch, key, state.hyper)

        outputs, pull = jax.vjp(outputs_of, weights.own)
        return pull(unravel(gradient, outputs))[0]


def make_function_space_step(
    outputs: Callable[..., Any],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    *,
    num_rows: Any,
    method: Method = "wgd",
    kernel: Kernel | None = None,
    has_aux: bool = False,
) -> InteractingStep:
    r"""Makes a compiled step in which members INTERACT in function space: their predictions repel each other.

    The points are the members' outputs $f_i$ for the rows of a batch. With scores $s_i = -N \partial L_i / \partial
    f_i$ and directions $\phi_i$ between outputs, the optimiser receives $-J_i^\top \phi_i / N$. Otherwise it is
    [`eqx_ensemble.methods.particles.make_step`][].

    All members need the same rows, some of which the loss may ignore, such as points between the training rows. Outputs
    are computed twice per step.

    **Arguments:**

    - `outputs`: `outputs(model, batch, key)` of one member: arrays to compare members by, such as logits.
    - `loss`: `loss(outputs, batch, key) -> value`: the negative log-posterior per row of these outputs, with a prior
        over functions, such as $f^\top K^{-1} f / 2N$ for a Gaussian process.
    - `optimiser`, `num_rows`, `method`, `kernel`, `has_aux`: as for
        [`eqx_ensemble.methods.particles.make_step`][], with a kernel between vectors of outputs.

    Either function may have a parameter `hyper`.

    **Returns:** [`eqx_ensemble.methods.particles.InteractingStep`][].

    **Raises:** `NotImplementedError` for stateful members.

    ```python
    def outputs(model, batch, key):
        x, y = batch
        return jax.vmap(model)(x)


    def loss(outputs, batch, key):
        x, y = batch
        prior = 0.5 * jnp.sum(outputs**2)  # independent outputs
        return 0.5 * jnp.mean((outputs - y) ** 2) + prior / 8


    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    optimiser = optax.adam(1e-2)
    state = ee.train.init(ensemble, optimiser, key=key)
    step = ee.methods.particles.make_function_space_step(
        outputs, loss, optimiser, num_rows=8
    )
    state, metrics = step(state, (jnp.ones((8, 3)), jnp.zeros((8, 1))))
    ```

    ??? cite
        [D'Angelo and Fortuin 2021](https://arxiv.org/abs/2106.11642); [Wang et al.
        2019](https://arxiv.org/abs/1902.09754)
    """
    check_function(outputs, "outputs", example="lambda model, batch, key: jax.vmap(model)(batch[0])")
    check_function(loss, "loss", example="lambda outputs, batch, key: ...")
    check_flag(has_aux, "has_aux")
    space = FunctionSpace(outputs, loss, has_aux)
    return interacting_step(space, optimiser, num_rows, method, kernel)
