from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from ..._check import check_flag, check_function
from ..._pytree import PyTree
from ...plan import AnyPlan
from ...train.compiled._check import check_loss_output, check_loss_signature, explain_loss
from ...train.compiled._optimiser import Optimiser
from ._check import check_outputs, check_stateless
from ._directions import Kernel, Method
from ._step import AbstractSpace, Evaluation, InteractingStep, Member, interacting_step, ravel, unravel


class FunctionSpace(AbstractSpace):
    """The space of functions: points are the outputs for the rows of a batch."""

    outputs: Callable[..., Any] = eqx.field(static=True)
    loss: Callable[..., Any] = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    name: str = eqx.field(static=True)

    def evaluate(self, member: Member) -> Evaluation:
        """The outputs as a vector, with the gradient of the loss with respect to them."""
        check_stateless(self.name, member.model_state)
        outputs = self._outputs(member, member.params)
        check_outputs(self.name, outputs)

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
        named = {"hyper": hyper} if check_loss_signature(fn, stateful=False, hyper=hyper, name=self.name) else {}
        arguments = (first, member.batch, member.key)
        with explain_loss(fn, arguments, named.get("hyper"), name=self.name, purpose="in training"):
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

    Networks with different weights may be the same function. Here the points that repel each other are the members'
    outputs $f_i$ for the rows of a batch. With losses $L_i$ of the outputs as means over $N$ rows, the scores are
    $s_i = -N \partial L_i / \partial f_i$; the optimiser receives $-J_i^\top \phi_i / N$ as the gradient, with the
    directions $\phi_i$ of [`eqx_ensemble.methods.particles.wgd`][] or [`eqx_ensemble.methods.particles.svgd`][] between
    outputs, and the Jacobian $J_i$ of the member's outputs with respect to its weights. Otherwise it is as
    [`eqx_ensemble.methods.particles.make_step`][].

    The rows of a batch must be the same for all members, because outputs are compared position by position. A batch may
    include rows without targets that the loss ignores, such as points between the training rows, at which members repel
    each other too. Outputs are computed twice per step.

    **Arguments:**

    - `outputs`: `outputs(model, batch, key)` of one member: the array or tree of arrays to compare members by, such as
        logits or probabilities.
    - `loss`: `loss(outputs, batch, key) -> value`: the negative log-posterior per row of these outputs,
        $-\frac1B \sum \log p(y|f) - \frac1N \log p(f)$. It includes a prior over functions: for a Gaussian process with
        covariance matrix $K$ at the rows of the batch, $f^\top K^{-1} f / 2N$. If only the score of the prior is known,
        add `-jnp.sum(jax.lax.stop_gradient(score) * outputs) / num_rows`. Without a prior, nothing limits the distance
        between members away from the data.
    - `optimiser`, `num_rows`, `method`, `kernel`, `has_aux`, `plan`, `mesh`: as for
        [`eqx_ensemble.methods.particles.make_step`][], with a kernel between vectors of outputs. With minibatches, the
        likelihood of a batch is scaled to all rows, but the kernel depends on the rows of the batch only.

    Either function may have a parameter `hyper` for the member's hyper-parameters.

    **Returns:** [`eqx_ensemble.methods.particles.InteractingStep`][], a function of a training state and a batch.

    **Raises:** as [`eqx_ensemble.methods.particles.make_step`][]; `NotImplementedError` for stateful members.

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

        [Repulsive Deep Ensembles are Bayesian](https://arxiv.org/abs/2106.11642), D'Angelo and Fortuin, 2021;
        [Function Space Particle Optimization for Bayesian Neural Networks](https://arxiv.org/abs/1902.09754), Wang,
        Ren, Zhu and Zhang, 2019.
    """
    name = "methods.particles.make_function_space_step"
    check_function(outputs, "outputs", name=name, example="lambda model, batch, key: jax.vmap(model)(batch[0])")
    check_function(loss, "loss", name=name, example="lambda outputs, batch, key: ...")
    check_flag(has_aux, "has_aux", name=name)
    space = FunctionSpace(outputs, loss, has_aux, name)
    return interacting_step(space, optimiser, num_rows, method, kernel, plan, mesh, name=name)
