"""Interatomic potentials: trained together on energies and forces, for molecular dynamics with uncertainties.

Source: github.com/apax-hub/apax at c9dfdbc6, in `apax`: `train/trainer.py` (lines 266 to 292), `train/checkpoints.py`
(18 to 69 and 89 to 107, where members are stacked, and recognised by the sizes of axes) and `md/ase_calc.py` (27 to 36
and 76 to 95). They have 90 lines of code; here 14: `loss` and `ported`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close

MEMBERS, ATOMS, CENTRES, STEPS = 3, 4, jnp.linspace(0.5, 2.5, 6), 4
ADAM = optax.adam(1e-2)
FIRST, SECOND = np.triu_indices(ATOMS, 1)


def features(positions):
    """Of the distances of all pairs of atoms, `(pairs, centres)`."""
    distance = jnp.linalg.norm(positions[FIRST] - positions[SECOND], axis=-1)
    return jnp.exp(-((distance[:, None] - CENTRES) ** 2) / 0.2)


class Potential(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(len(CENTRES), "scalar", 8, 1, jax.nn.silu, key=key)

    def __call__(self, positions):
        energy = lambda positions: jnp.sum(jax.vmap(self.mlp)(features(positions)))
        value, gradient = jax.value_and_grad(energy)(positions)
        return {"energy": value, "forces": -gradient}


def error(predicted, labels):
    return sum(jnp.mean((predicted[name] - labels[name]) ** 2) for name in labels)


def by_hand(params, data, test):
    """Weights of all members in arrays; `(out, in)`, as in Equinox."""

    def predict(params, positions):
        (w, b), (v, c) = params
        energy = lambda x: jnp.sum(jax.nn.silu(features(x) @ w.T + b) @ v.T + c)
        value, gradient = jax.value_and_grad(energy)(positions)
        return {"energy": value, "forces": -gradient}

    def loss(params, batch):
        positions, labels = batch
        predicted = jax.vmap(predict, in_axes=(None, 0))(params, positions)
        return error(predicted, labels), predicted

    def update(params, state, batch):
        (value, predicted), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = ADAM.update(gradient, state)
        return optax.apply_updates(params, updates), state, value, predicted

    @jax.jit
    def update_all(params, state, batch):
        params, state, values, predicted = jax.vmap(update, in_axes=(0, 0, None))(params, state, batch)
        return params, state, jnp.mean(values), jax.tree.map(lambda x: jnp.mean(x, axis=0), predicted)

    state, history = jax.vmap(ADAM.init)(params), []
    for _ in range(STEPS):
        params, state, *means = update_all(params, state, data)
        history.append(means)

    predicted = jax.vmap(predict, in_axes=(0, None))(params, test)
    results = {name: jnp.mean(x, axis=0) for name, x in predicted.items()}
    results |= {f"{name}_uncertainty": jnp.std(x, axis=0) for name, x in predicted.items()}
    ensemble = {"energy_ensemble": predicted["energy"], "forces_ensemble": predicted["forces"].transpose(1, 2, 0)}
    return params, history, results | ensemble


def loss(model, batch, key):
    positions, labels = batch
    predicted = jax.vmap(model)(positions)
    return error(predicted, labels), predicted


def ported(models, data, test):
    state = ee.train.init(ee.stack(models), ADAM, key=jax.random.key(0))
    step, history = ee.train.make_step(loss, ADAM, has_aux=True), []
    for _ in range(STEPS):
        state, metrics = step(state, data)
        history.append(jax.tree.map(lambda x: jnp.mean(x, axis=0), [metrics.loss, metrics.aux]))

    predicted = ee.map_members(lambda model: model(test), out_axis=-1)(state.ensemble)
    results = {name: jnp.mean(x, axis=-1) for name, x in predicted.items()}
    results |= {f"{name}_uncertainty": jnp.std(x, axis=-1) for name, x in predicted.items()}
    return state.ensemble, history, results | {f"{name}_ensemble": x for name, x in predicted.items()}


@pytest.mark.slow
def test_the_same_potentials():
    """To rounding: by hand, the atoms' pairs are one product, in Equinox a product each."""
    rng = np.random.default_rng(0)
    corners = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32)
    positions = corners + 0.1 * rng.normal(size=(6, ATOMS, 3)).astype(np.float32)
    labels = {"energy": rng.normal(size=5), "forces": rng.normal(size=(5, ATOMS, 3))}
    data = positions[:5], jax.tree.map(lambda x: x.astype(np.float32), labels)
    models = [Potential(key) for key in jax.random.split(jax.random.key(0), MEMBERS)]
    layers = [model.mlp.layers for model in models]
    params = [
        tuple(jnp.stack([getattr(layer[i], part) for layer in layers]) for part in ("weight", "bias")) for i in (0, 1)
    ]
    trained, history, results = by_hand(params, data, positions[5])
    ensemble, own_history, own_results = ported(models, data, positions[5])
    assert_close([(layer.weight, layer.bias) for layer in ensemble.stacked.mlp.layers], trained, 1e-4)
    assert_close(own_history, history, 1e-4)
    assert sorted(own_results) == sorted(results)
    assert_close(own_results, results, 1e-4)
