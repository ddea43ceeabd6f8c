import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key

from ..._axes import Each, check_some_rows, over_leading_axis, split_members
from ..._caller import caller
from ..._check import check_flag, check_function, check_integers_fit, check_word, is_inside_transformation, type_error
from ..._compiled import filter_jit
from ..._ensemble import M
from ..._foreign import as_hashable, as_hashable_leaf, take_in
from ..._pytree import PyTree
from ..._sharding import Layout, constrain_members, constrain_rows, layout_for
from ...plan import AbstractPlan, AnyPlan, Sequential
from ...plan._engine import as_plan, sharded_plan
from ...train import Metrics, Status, TrainState
from ...train._engine import (
    MemberConstants,
    MemberState,
    Optimiser,
    as_loss,
    check_loss_output,
    check_loss_signature,
    check_optimiser_kind,
    check_state,
    check_train_state,
    explain_loss,
    follow_hyper,
    nan_is_data,
    revert_diverged_one,
    update_member,
)
from ._directions import RBF, Kernel, Method, check_kernel, check_num_rows, check_outputs, directions

# The spaces in which members interact: weights, or outputs.


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

    def evaluate(self, member: Member) -> Evaluation:
        """The weights as a vector, with the gradient of the loss."""
        params, stateful, hyper = member.params, member.model_state is not None, member.fixed.hyper
        loss = as_loss(self.loss, stateful=stateful, has_aux=self.has_aux, hyper=hyper)
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


class InteractingStep(eqx.Module):
    """A compiled training step in which members interact; see [`eqx_ensemble.methods.particles.make_step`][]."""

    space: AbstractSpace
    optimiser: Optimiser = eqx.field(static=True)
    num_rows: Any
    method: Method = eqx.field(static=True)
    kernel: Kernel
    plan: AbstractPlan
    layout: Layout | None = eqx.field(static=True)
    public_name: str = eqx.field(static=True)

    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """Takes one step on one batch, which is shared except for parts marked [`eqx_ensemble.Each`][]."""
        check_train_state(state)
        state = follow_hyper(state, self.optimiser)
        batch = take_in(batch, "batch")
        check_integers_fit(batch, argument="batch")
        layout = self.layout or layout_for(None, state.params)
        step = _one_step if is_inside_transformation() else _compiled_step
        with nan_is_data():
            moving, count, metrics = step(self, layout, state, batch)
        return TrainState(moving, state.fixed, state.shared, state.ids, count), metrics


def make_step(
    loss: Callable[..., Any],
    optimiser: Optimiser,
    *,
    num_rows: Any,
    method: Method = "svgd",
    kernel: Kernel | None = None,
    has_aux: bool = False,
    plan: AnyPlan = None,
    mesh: Mesh | None = None,
) -> InteractingStep:
    r"""Makes a compiled step in which members INTERACT in weight space: `state, metrics = step(state, batch)`.

    Members are particles that jointly represent a posterior. The step is called like that of
    [`eqx_ensemble.train.make_step`][], also in [`eqx_ensemble.train.scan_steps`][]; loss and optimiser are those of ONE
    member. With scores $s_i = -N \nabla L_i$ and the directions $\phi_i$ of [`eqx_ensemble.methods.particles.svgd`][]
    or [`eqx_ensemble.methods.particles.wgd`][] between flattened weights, the optimiser receives $-\phi_i / N$.

    Diverged and stopped members no longer affect the others. A step takes time of order `members**2` times the number
    of weights, and memory for three copies of the weights; on a mesh, every device holds two copies of all members.

    **Arguments:**

    - `loss`: as for [`eqx_ensemble.train.make_step`][]: the negative log-posterior per row, with a prior such as
        [`eqx_ensemble.methods.priors.gaussian_penalty`][]; without one, particles drift apart indefinitely.
    - `optimiser`: that of [`eqx_ensemble.train.init`][]; no line search.
    - `num_rows`: $N$, the number of all training rows, divided by a temperature if any.
    - `method`: `"svgd"`, or `"wgd"` for repulsive ensembles.
    - `kernel`: as for [`eqx_ensemble.methods.particles.svgd`][].
    - `has_aux`: whether the loss returns auxiliary outputs after its other outputs.
    - `plan`: for gradients and updates, by default [`eqx_ensemble.plan.Vmap`][].
    - `mesh`: that of [`eqx_ensemble.train.init`][].

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
    space = WeightSpace(as_hashable(loss), has_aux)
    return interacting_step(space, optimiser, num_rows, method, kernel, plan, mesh, name="methods.particles.make_step")


def interacting_step(
    space: AbstractSpace,
    optimiser: Optimiser,
    num_rows: Any,
    method: Method,
    kernel: Kernel | None,
    plan: AnyPlan,
    mesh: Mesh | None,
    *,
    name: str,
) -> InteractingStep:
    """Checks the options. Returns the step of members that interact in a space."""
    check_optimiser_kind(optimiser)
    check_num_rows(num_rows)
    check_word(method, "method", ("svgd", "wgd"))
    kernel = RBF() if kernel is None else kernel
    check_kernel(kernel)
    own = as_hashable(optimiser), num_rows, method, as_hashable_leaf(kernel)
    return InteractingStep(space, *own, as_plan(plan), layout_for(mesh), name)


def _one_step(
    step: InteractingStep, layout: Layout | None, state: TrainState, batch: PyTree
) -> tuple[MemberState, Int[Array, ""], Metrics]:
    check_state(state, step.optimiser, hyper_of="train.init")
    split_members((Each(state.ids), batch))  # raises for another number of members
    check_some_rows(batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            got = f"got {leaf.dtype} at `{jax.tree_util.keystr(path)}`"
            raise type_error("real weights", got, "Leave it out with `trainable=` of `train.init`.")
    own, view, _ = split_members((Each(state.fixed.key), batch))
    run = sharded_plan(step.plan, layout).run

    def member(part: PyTree) -> Member:
        moving, fixed, own = part
        key, batch = view(own)
        batch = batch if layout is None else constrain_rows(batch, layout)
        key = jax.random.fold_in(key, state.step)
        return Member(moving.params, moving.model_state, fixed, state.shared, batch, key)

    parts = (state.moving, state.fixed, own)
    found: Evaluation = over_leading_axis(run, lambda part: step.space.evaluate(member(part)), parts)
    finite = jnp.isfinite(found.value) & _all_finite(found.point) & _all_finite(found.gradient)
    gradients = _meet(step, layout, found, (state.status == Status.OK) & finite)

    def update(part: PyTree) -> MemberState:
        whole, gradient, value, model_state = part
        one, moving = member(whole), whole[0]
        grads = step.space.pull_back(one, gradient)
        refuse = lambda _: _no_values()
        hyper = one.fixed.hyper
        params, opt_state = update_member(step.optimiser, one.params, moving.opt_state, grads, value, refuse, hyper)
        return MemberState(params, opt_state, model_state, moving.status, moving.stopped_at, moving.fault)

    after = over_leading_axis(run, update, (parts, gradients, found.value, found.model_state))
    moving, (value, aux) = revert_diverged_one(state.moving, after, (found.value, found.aux), state.step)
    if layout is not None and state.num_members % layout.members == 0:
        moving = constrain_members(moving, layout, None)
    return moving, state.step + 1, Metrics(value, aux, moving.status)


_compiled_step = filter_jit(_one_step)


def _meet(
    step: InteractingStep, layout: Layout | None, found: Evaluation, active: Bool[Array, " members"]
) -> Float[Array, "members size"]:
    """The gradients that the optimiser receives at each point, after the interaction of members.

    An inactive member keeps its own gradient, from which divergence is detected.
    """
    num_rows = jnp.asarray(step.num_rows, found.point.dtype)
    scores = -num_rows * found.gradient
    run = sharded_plan(Sequential(), layout).run
    gather = lambda x: x if layout is None else jax.lax.with_sharding_constraint(x, layout.sharding())
    moved = directions(step.method, step.kernel, found.point, scores, active, run=run, gather=gather)
    return jnp.where(active[:, None], -moved / num_rows, found.gradient)


def _all_finite(points: Float[Array, "members size"]) -> Bool[Array, " members"]:
    return jnp.all(jnp.isfinite(points), axis=1)


def _no_values() -> Float[Array, ""]:
    raise TypeError(
        f"`{caller()}` moves members along a direction that is not the gradient of their loss; this optimiser "
        "evaluates the loss again.\nUse one without a line search, such as `optax.adam`."
    )


class FunctionSpace(AbstractSpace):
    """The space of functions: points are the outputs for the rows of a batch."""

    outputs: Callable[..., Any] = eqx.field(static=True)
    loss: Callable[..., Any] = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)

    def evaluate(self, member: Member) -> Evaluation:
        """The outputs as a vector, with the gradient of the loss with respect to them."""
        if member.model_state is not None:
            raise NotImplementedError(
                f"`{caller()}` takes members without state.\n"
                "Use `methods.particles.make_step`, or layers without running statistics, such as `eqx.nn.LayerNorm`."
            )
        outputs = self._outputs(member, member.params)
        check_outputs(outputs)

        def loss(outputs: PyTree) -> tuple[Array, PyTree]:
            found = self._call(self.loss, outputs, member)
            check_loss_output(found, stateful=False, has_aux=self.has_aux)
            return found if self.has_aux else (found, None)

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(outputs)
        return Evaluation(value, jax.tree.map(jnp.asarray, aux), None, ravel(outputs), ravel(grads))

    def pull_back(self, member: Member, gradient: Float[Array, " size"]) -> PyTree:
        """The product with the transposed Jacobian of the outputs, which are recomputed to save memory."""
        outputs, pull = jax.vjp(lambda params: self._outputs(member, params), member.params)
        (grads,) = pull(unravel(gradient, outputs))
        return grads

    def _outputs(self, member: Member, params: PyTree) -> PyTree:
        return self._call(self.outputs, eqx.combine(params, member.fixed.frozen, member.shared), member)

    def _call(self, fn: Callable[..., Any], first: PyTree, member: Member) -> Any:
        hyper = member.fixed.hyper
        named = {"hyper": hyper} if check_loss_signature(fn, stateful=False, hyper=hyper) else {}
        arguments = (first, member.batch, member.key)
        with explain_loss(fn, arguments, named.get("hyper"), purpose="in training"):
            return fn(*arguments, **named)


def make_function_space_step(
    outputs: Callable[..., Any],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    *,
    num_rows: Any,
    method: Method = "wgd",
    kernel: Kernel | None = None,
    has_aux: bool = False,
    plan: AnyPlan = None,
    mesh: Mesh | None = None,
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
    - `optimiser`, `num_rows`, `method`, `kernel`, `has_aux`, `plan`, `mesh`: as for
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
    return interacting_step(
        space, optimiser, num_rows, method, kernel, plan, mesh, name="methods.particles.make_function_space_step"
    )
