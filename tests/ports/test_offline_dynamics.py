"""A dynamics model for offline reinforcement learning: networks with trained bounds in common, and elites among them.

Source: github.com/EmptyJackson/unifloral, `algorithms/dynamics.py` at f2dc127. Its network with the vectorised wrapper,
loss, step and choice of elites (lines 65 to 119, 142 to 147 and 379 to 438, without logging) have 74 lines of code;
here 25: `Dynamics`, `ensemble_loss`, `step`, and two lines in each of `ported` and the test.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close

OBS, ACT, MEMBERS, ELITES, EPOCHS = 3, 2, 5, 3, 2
BOUNDS_WEIGHT, PENALTY = 0.01, 0.5
ADAMW = optax.adamw(1e-2, eps=1e-5, weight_decay=1e-2)
UPPER, LOWER = jnp.full(OBS + 1, 0.5, jnp.float32), jnp.full(OBS + 1, -10, jnp.float32)
KEY = jax.random.key(0)


def transition(predict, x, k, noise):
    """What one of the elites predicts, with a penalty for the largest of their deviations."""
    mean, logvar = predict(x)
    std = jnp.exp(0.5 * logvar)
    drawn = mean[k] + std[k] * noise
    return drawn[:-1], drawn[-1] - PENALTY * jnp.max(jnp.linalg.norm(std, axis=-1))


def by_hand(layers, train, held_out):
    """Weights of all networks in arrays `(members, in, out)`; the bounds without `members`."""

    def forward(params, x):
        def one(layers, x):
            *hidden, (weight, bias) = layers
            for w, b in hidden:
                x = jax.nn.relu(x @ w + b)
            return x @ weight + bias

        mean, logvar = jnp.split(jax.vmap(one, in_axes=(0, None))(params["layers"], x), 2, axis=-1)
        logvar = params["upper"] - jax.nn.softplus(params["upper"] - logvar)
        return mean, params["lower"] + jax.nn.softplus(logvar - params["lower"])

    def loss(params, batch):
        x, y = batch
        mean, logvar = forward(params, x)
        fit = ((mean - y) ** 2 * jnp.exp(-logvar)).sum(0).mean() + logvar.sum(0).mean()
        return fit + BOUNDS_WEIGHT * (params["upper"] - params["lower"]).sum()

    @jax.jit
    def epoch(params, state, batches):
        def step(carry, batch):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, batch)
            updates, state = ADAMW.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, state), batches)

    params = {"layers": layers, "upper": UPPER, "lower": LOWER}
    state, losses = ADAMW.init(params), []
    for _ in range(EPOCHS):
        (params, state), values = epoch(params, state, train)
        losses.append(values)
    error = jnp.mean((forward(params, held_out[0])[0] - held_out[1]) ** 2, axis=(1, 2))
    elites = dict(params, layers=jax.tree.map(lambda w: w[jnp.argsort(error)[:ELITES]], params["layers"]))

    return params, losses, error, lambda x: forward(elites, x)


class Dynamics(eqx.Module):
    """One network, with the bounds that it uses."""

    mlp: eqx.nn.MLP
    upper: jax.Array
    lower: jax.Array

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(OBS + ACT, 2 * (OBS + 1), 8, 1, key=key)
        self.upper, self.lower = UPPER, LOWER

    def __call__(self, x):
        mean, logvar = jnp.split(self.mlp(x), 2)
        logvar = self.upper - jax.nn.softplus(self.upper - logvar)
        return mean, self.lower + jax.nn.softplus(logvar - self.lower)


def ensemble_loss(ensemble, batch):
    x, y = batch
    mean, logvar = ensemble(ee.Batch(x))
    fit = ((mean - y) ** 2 * jnp.exp(-logvar)).sum(0).mean() + logvar.sum(0).mean()
    return fit + BOUNDS_WEIGHT * (ensemble.stacked.upper - ensemble.stacked.lower).sum()


def step(carry, batch):
    ensemble, state = carry
    value, gradient = eqx.filter_value_and_grad(ensemble_loss)(ensemble, batch)
    updates, state = ADAMW.update(gradient, state, eqx.filter(ensemble, eqx.is_inexact_array))
    return (eqx.apply_updates(ensemble, updates), state), value


def ported(ensemble, train, held_out):
    carry, losses = (ensemble, ADAMW.init(eqx.filter(ensemble, eqx.is_inexact_array))), []
    for _ in range(EPOCHS):
        carry, values = ee.train.scan_steps(step, carry, train)
        losses.append(values)
    ensemble = carry[0]
    error = jnp.mean((ensemble(ee.Batch(held_out[0]))[0] - held_out[1]) ** 2, axis=(1, 2))
    elites = ensemble[jnp.argsort(error)[:ELITES]]
    return ensemble, losses, error, elites


@pytest.mark.slow
def test_the_same_model():
    """To rounding: a product with `(in, out)` is another than with the `(out, in)` of Equinox."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, OBS + ACT)).astype(np.float32)
    y = np.concatenate([0.1 * x[:, ACT:], np.sin(x[:, :1])], axis=1) + 0.05 * rng.normal(size=(32, OBS + 1))
    y = y.astype(np.float32)
    train, held_out = (x[:24].reshape(3, 8, -1), y[:24].reshape(3, 8, -1)), (x[24:], y[24:])

    ensemble = ee.build(Dynamics, MEMBERS, shared=lambda model: (model.upper, model.lower), key=KEY)
    layers = [(jnp.swapaxes(layer.weight, 1, 2), layer.bias) for layer in ensemble.stacked.mlp.layers]
    params, losses, error, elites = by_hand(layers, train, held_out)
    ensemble, own_losses, own_error, own_elites = ported(ensemble, train, held_out)

    assert_close(own_losses, losses, 1e-5)
    assert_close(own_error, error, 1e-4)
    stacked = ensemble.stacked
    trained = [(jnp.swapaxes(layer.weight, 1, 2), layer.bias) for layer in stacked.mlp.layers]
    assert_close(trained, params["layers"], 1e-4)
    assert_close((stacked.upper, stacked.lower), (params["upper"], params["lower"]), 1e-6)
    assert np.all(stacked.upper != 0.5)  # trained, by all networks together
    for k in range(ELITES):
        noise = rng.normal(size=OBS + 1).astype(np.float32)
        assert_close(transition(own_elites, x[k], k, noise), transition(elites, x[k], k, noise), 1e-4)
