from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ..._pytree import PyTree
from ...train import Frozen
from ._check import check_outputs, check_prior, check_scale

M = TypeVar("M")


class RandomisedPrior(eqx.Module, Generic[M]):
    r"""A member with a randomised prior function: a trained network plus a fixed random network.

    The output is $f(x) + \beta p(x)$, in training and in prediction, with the network $f$, the prior $p$ and its scale
    $\beta$. Near the data, $f$ learns to compensate for $p$; far from the data, members differ like their priors. Prior
    and scale are [`eqx_ensemble.train.Frozen`][]: they have no gradient and no weight decay. Each member of
    [`eqx_ensemble.build`][] draws its own prior from its key.

    A linear $f$ with a penalty towards zero is equivalent to an anchored member (see
    [`eqx_ensemble.methods.priors.Anchor`][]) with the anchor $\beta p$. Without weight decay or early stopping, the
    prior has little effect near the data.

    **Arguments:**

    - `network`: the trained network.
    - `prior`: a network whose outputs have the shapes of those of `network`, often the same architecture with another
        key. It is called in inference mode with the positional inputs of `network`, without its keyword arguments (such
        as dropout keys) and its `equinox.nn.State`.
    - `scale`: $\beta$, one number. `build(zip={"scale": ...})` gives each member its own.

    **Raises:** `TypeError` for networks that are not callable and for a scale that is not one number; when called,
    `ValueError` if the outputs of network and prior differ in structure or shape.

    ```python
    def make(key):
        network, prior = (
            eqx.nn.MLP(3, 1, 16, 2, key=key) for key in jax.random.split(key)
        )
        return ee.methods.priors.RandomisedPrior(network, prior, scale=3.0)


    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    ensemble = ee.build(make, 4, key=key)
    data = (jnp.ones((100, 3)), jnp.zeros((100, 1)))
    run = ee.fit(ensemble, loss, optax.adamw(1e-3), data, epochs=2, key=key)
    jnp.array_equal(
        run.ensemble[0].prior.value.layers[0].weight,
        ensemble[0].prior.value.layers[0].weight,
    )  # True
    ```

    ??? cite

        Osband, Aslanides and Cassirer, *Randomized Prior Functions for Deep Reinforcement Learning*, NeurIPS 2018,
        arXiv:1806.03335.
    """

    network: M
    prior: Frozen[Any]
    scale: Frozen[Any]

    def __init__(self, network: M, prior: Any, *, scale: Any = 1.0) -> None:
        check_prior(network, prior)
        self.network = network
        self.prior = prior if isinstance(prior, Frozen) else Frozen(prior)
        self.scale = Frozen(check_scale(scale))

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """The network's output plus the scaled prior; if a state is among the inputs, also the new state."""
        is_state = lambda x: isinstance(x, eqx.nn.State)
        out = self.network(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        out, *state = out if any(map(is_state, args)) else (out,)
        prior = eqx.nn.inference_mode(self.prior)(*(x for x in args if not is_state(x)))
        check_outputs(out, prior)
        scale = jax.lax.stop_gradient(self.scale.value)
        add = lambda f, p: f + (jnp.asarray(scale, p.dtype) * p).astype(f.dtype)
        total = jax.tree.map(add, out, prior)
        return (total, *state) if state else total
