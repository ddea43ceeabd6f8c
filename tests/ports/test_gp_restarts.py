"""Gaussian processes of Bayesian optimisation: hyper-parameters of many restarts, the best of which are mixed.

Source: github.com/google/vizier at b065186, in `vizier/_src`: `jax/optimizers/optax_wrappers.py` (lines 83 to 138,
without logging), `jax/optimizers/core.py` (120 to 132), `algorithms/designers/gp/gp_models.py` (200 to 222), and
`UniformEnsemblePredictive` of `jax/stochastic_process_model.py`. They have 88 lines of code; here 13: `Process`,
`loss` and `ported`. Kernel, likelihood and posterior are those of one process.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close

RESTARTS, BEST, EPOCHS, DIM = 5, 3, 12, 2
ADAM = optax.adam(0.1)


def kernel(raw, x, z):
    amplitude, scales = jax.nn.softplus(raw[0]), jax.nn.softplus(raw[2:])
    distance = jnp.sum(((x[:, None] - z[None]) / scales) ** 2, axis=-1)
    return amplitude**2 * jnp.exp(-distance / 2)


def factor(raw, x):
    return jnp.linalg.cholesky(kernel(raw, x, x) + (jax.nn.softplus(raw[1]) + 1e-3) * jnp.eye(len(x)))


def nll(raw, x, y):
    """Of the observations, one each, with a prior that keeps hyper-parameters near 1."""
    lower = factor(raw, x)
    white = jax.scipy.linalg.solve_triangular(lower, y, lower=True)
    log_likelihood = -jnp.sum(white**2) / 2 - jnp.sum(jnp.log(jnp.diag(lower)))
    return -log_likelihood / len(y) + jnp.mean(raw**2) / 20


def posterior(raw, x, y, z):
    lower = factor(raw, x)
    between = jax.scipy.linalg.solve_triangular(lower, kernel(raw, x, z), lower=True)
    mean = between.T @ jax.scipy.linalg.solve_triangular(lower, y, lower=True)
    return mean, jax.nn.softplus(raw[0]) ** 2 - jnp.sum(between**2, axis=0)


def by_hand(raw, x, y, z):
    def step(raw, state):
        value, gradient = jax.value_and_grad(nll)(raw, x, y)
        updates, state = ADAM.update(gradient, state, raw)
        return optax.apply_updates(raw, updates), state, value

    all_steps, state, losses = jax.jit(jax.vmap(step)), jax.vmap(ADAM.init)(raw), []
    for _ in range(EPOCHS):
        raw, state, values = all_steps(raw, state)
        losses.append(values)
    best = jnp.argsort(losses[-1])[:BEST]
    means, variances = jax.jit(jax.vmap(posterior, in_axes=(0, None, None, None)))(raw[best], x, y, z)
    mean = jnp.mean(means, axis=0)
    return raw, jnp.stack(losses), best, (mean, jnp.mean(variances + means**2, axis=0) - mean**2)


class Process(eqx.Module):
    raw: jax.Array

    def __call__(self, x, y, z):
        return posterior(self.raw, x, y, z)


def loss(process, batch, key):
    return nll(process.raw, *batch)


def ported(raw, x, y, z):
    state = ee.train.init(ee.from_stacked(Process(raw)), ADAM, key=jax.random.key(0))
    step = ee.train.make_step(loss, ADAM)
    state, metrics = ee.train.scan_steps(lambda state, _: step(state, (x, y)), state, length=EPOCHS)
    best = jnp.argsort(metrics.loss[-1])[:BEST]
    mixture = ee.combine.gaussian(*eqx.filter_jit(state.ensemble[best])(x, y, z))
    return state, metrics.loss, best, mixture


@pytest.mark.slow
def test_the_same_mixture():
    """To rounding: a loop is compiled otherwise than its steps, and moments are summed otherwise."""
    rng = np.random.default_rng(5)
    x, z = (rng.uniform(-1, 1, size=(n, DIM)).astype(np.float32) for n in (8, 4))
    y = np.sin(3 * x[:, 0]) + x[:, 1]
    raw = jnp.asarray(rng.normal(size=(RESTARTS, 2 + DIM)).astype(np.float32)).at[2].set(1e30)  # too large: NaN
    trained, losses, best, mixture = by_hand(raw, x, y, z)
    state, own_losses, own_best, own_mixture = ported(raw, x, y, z)
    healthy = np.array([0, 1, 3, 4])
    assert own_best.tolist() == best.tolist() != jnp.argsort(losses[0])[:BEST].tolist()
    assert_close(own_losses[:, healthy], losses[:, healthy], 1e-4)
    assert_close(state.ensemble.stacked.raw[healthy], trained[healthy], 1e-4)
    assert_close(tuple(own_mixture), mixture, 1e-4)
    assert not np.isfinite([losses[:, 2], own_losses[:, 2]]).any()
    assert state.status.tolist() == [ee.train.Status.DIVERGED if i == 2 else ee.train.Status.OK for i in range(5)]
    assert state.ensemble.stacked.raw[2].tolist() == raw[2].tolist()  # as it was, not NaN
