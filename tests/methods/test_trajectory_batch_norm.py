"""Statistics of BatchNorm for averaged weights, against those of all rows at once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import trajectory

from ..factories import assert_close, assert_same, relaxed

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (20, 3)) * jnp.array([[1.0, 3.0, 0.1]]) + jnp.array([[0.0, 5.0, -2.0]])


class Normalised(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key, mode="batch", momentum=0.99):
        self.linear = eqx.nn.Linear(3, 4, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode=mode, momentum=momentum)

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def loss(model, state, batch, key):
    out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch, state)
    return jnp.mean((out - 1) ** 2 * out), state


def built(members=2, **options):
    return ee.build(eqx.nn.make_with_state(lambda key: Normalised(key, **options)), members, key=KEY)


def predict(ensemble, state):
    with relaxed():
        return ee.predict(ensemble, X, state=state)


def normalised_by_all_rows(ensemble, x=X, where=lambda model: model):
    out = np.asarray(ee.map_members(lambda model: jax.vmap(where(model).linear)(x))(ensemble), np.float64)
    out = (out - out.mean(1, keepdims=True)) / np.sqrt(out.var(1, keepdims=True) + 1e-5)
    norm = where(ensemble.stacked).norm
    return out * np.asarray(norm.weight)[:, None] + np.asarray(norm.bias)[:, None]


@pytest.mark.parametrize("mode", ["batch", "ema"])
@pytest.mark.parametrize("batch_size", [20, 8, 3, 50])
def test_statistics_of_all_rows(mode, batch_size):
    """Whatever the batches: a mean of their variances misses the variance between them, 20 % at three rows."""
    ensemble, state = built(mode=mode)
    state = trajectory.update_batch_norm(ensemble, state, loss, X, batch_size=batch_size, key=KEY)
    expected = normalised_by_all_rows(ensemble)
    np.testing.assert_allclose(predict(ensemble, state), expected, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["batch", pytest.param("ema", marks=pytest.mark.slow)])
def test_after_a_run(mode):
    """The state of the run, of other weights, is replaced; more training goes on from the new one."""
    ensemble, state = built(mode=mode, momentum=0.5)
    optimiser = trajectory.swag(trajectory.snapshots(optax.sgd(0.1), 2, every=3), rank=3)
    run = ee.fit(ensemble, loss, optimiser, X, steps=6, batch_size=8, state=state, key=KEY)
    average = trajectory.average(run)
    stale = predict(average, run.state)
    expected = normalised_by_all_rows(average)
    assert np.abs(stale - expected).max() > 0.05
    new = trajectory.update_batch_norm(average, run.state, loss, X, batch_size=6, key=KEY)
    np.testing.assert_allclose(predict(average, new), expected, rtol=2e-4, atol=1e-4)

    assert trajectory.snapshot_owners(run).tolist() == [0, 0, 1, 1]
    for members in (trajectory.sample(run, 2, key=KEY), trajectory.snapshot_ensemble(run)):
        own = ee.tree.take(run.state, np.repeat([0, 1], 2))
        own = trajectory.update_batch_norm(members, own, loss, X, batch_size=6, key=KEY)
        expected = normalised_by_all_rows(members)
        np.testing.assert_allclose(predict(members, own), expected, rtol=2e-4, atol=1e-4)

    again = ee.fit(average, loss, optax.sgd(0.0), X, steps=1, batch_size=20, shuffle=False, state=new, key=KEY)
    np.testing.assert_allclose(predict(average, again.state), normalised_by_all_rows(average), rtol=1e-3)


def test_members_alone_and_their_own_rows():
    ensemble, state = built(3)
    own = jnp.stack([X, X + 1, 2 * X])
    whole = trajectory.update_batch_norm(ensemble, state, loss, ee.Each(own), batch_size=8, key=KEY)
    for i in range(3):
        one, part = ensemble[[i]], ee.tree.take(state, [i])
        alone = trajectory.update_batch_norm(one, part, loss, own[i], batch_size=8, key=KEY)
        assert_close(ee.tree.take(whole, [i]), alone, 1e-5)


def test_layers_in_inference_mode_keep_their_statistics():
    class Two(eqx.Module):
        first: Normalised
        second: eqx.nn.BatchNorm

        def __init__(self, key):
            self.first = Normalised(key)
            self.second = eqx.nn.BatchNorm(4, "batch", mode="ema", inference=True)

        def __call__(self, x, state):
            return self.second(*self.first(x, state))

    ensemble, state = ee.build(eqx.nn.make_with_state(Two), 2, key=KEY)
    kept = (jnp.full((2, 4), 3.0, jnp.float32), jnp.full((2, 4), 4.0, jnp.float32))
    state = state.set(ensemble.stacked.second.ema_state_index, kept)
    new = trajectory.update_batch_norm(ensemble, state, loss, X, key=KEY)
    assert_same(new.get(ensemble.stacked.second.ema_state_index), kept)
    expected = (normalised_by_all_rows(ensemble, where=lambda model: model.first) - 3) / 2
    np.testing.assert_allclose(predict(ensemble, new), expected, rtol=2e-4, atol=1e-4)


@pytest.mark.usefixtures("unhooked")
def test_errors():
    ensemble, state = built()
    frozen = eqx.nn.inference_mode(ensemble)
    options = {"key": KEY}
    with pytest.raises(ValueError, match="layers that are not in inference mode"):
        trajectory.update_batch_norm(frozen, state, loss, X, **options)
    with pytest.raises(TypeError, match="needs `fn\\(model, state, batch, key\\)` to return"):
        trajectory.update_batch_norm(ensemble, state, lambda *args: loss(*args)[0], X, **options)
    with pytest.raises(TypeError, match="`fn` to be a function"):
        trajectory.update_batch_norm(ensemble, state, None, X, **options)
    with pytest.raises(ee.MemberMismatchError, match="one value per member"):
        trajectory.update_batch_norm(ensemble[[0]], state, loss, X, **options)
    with pytest.raises(TypeError, match="no `state` was given"):
        trajectory.update_batch_norm(ensemble, None, loss, X, **options)
    with pytest.raises(ValueError, match="`batch_size` of at least 1"):
        trajectory.update_batch_norm(ensemble, state, loss, X, batch_size=0, **options)
    with pytest.raises(TypeError, match="key"):
        trajectory.update_batch_norm(ensemble, state, loss, X, key=None)
