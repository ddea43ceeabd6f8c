"""Steps in which members meet: against the step written out, a Gaussian process, and a single device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import eqx_ensemble as ee
from eqx_ensemble._keys import tag
from eqx_ensemble.methods import particles

from ..collectives import collectives, text_of
from ..factories import CASES, assert_close, assert_same, data, distance, mse

KEY = jax.random.key(5)
SGD = optax.sgd(0.1)
KEYS = ee.member_keys(KEY, 4, purpose="fit")
METHODS = {"svgd": particles.svgd, "wgd": particles.wgd}
BOTH = ["svgd", pytest.param("wgd", marks=pytest.mark.slow)]
X, Y = (np.asarray(x) for x in data())


def make(key):
    return eqx.nn.Linear(25, 2, key=key)


def loss(model, batch, key):
    """With a prior, and noise of the member's own."""
    x, y = batch
    noise = 0.01 * jax.random.normal(key, y.shape)
    prior = (jnp.sum(model.weight**2) + jnp.sum(model.bias**2)) / 40
    return jnp.mean((jax.vmap(model)(x) - y + noise) ** 2) + prior


STEP = particles.make_step(loss, SGD, num_rows=20)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(make, 4, key=KEY)


def steps(ensemble, step=STEP, *, count=2, optimiser=SGD, batch=(X, Y), key=KEY, **options):
    state = ee.train.init(ensemble, optimiser, key=key, **options)
    for _ in range(count):
        state, metrics = step(state, batch)
    return state, metrics


@pytest.mark.parametrize("method", BOTH)
def test_a_step_is_that_of_the_raveled_weights(ensemble, method):
    """Gradients of each member alone, directions of all, an update of each: as a user would write it."""
    step = particles.make_step(loss, SGD, num_rows=20, method=method)
    state, metrics = steps(ensemble, step, count=1)
    loss_key = lambda key: jax.random.fold_in(jax.random.fold_in(key, tag("loss")), 0)
    keys = map(loss_key, KEYS)
    found = [
        eqx.filter_value_and_grad(loss)(model, (X, Y), key) for model, key in zip(ensemble.unstack(), keys, strict=True)
    ]
    np.testing.assert_allclose(metrics.loss, [value for value, _ in found], rtol=1e-5)
    flat = lambda tree: ravel_pytree(eqx.filter(tree, eqx.is_inexact_array))[0]
    points = jnp.stack([flat(model) for model in ensemble.unstack()])
    gradients = jnp.stack([flat(grads) for _, grads in found])
    expected = points + 0.1 * METHODS[method](points, -20 * gradients) / 20
    after = jnp.stack([flat(model) for model in state.ensemble.unstack()])
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)
    without_rows = points + 0.1 * METHODS[method](points, -gradients)
    assert np.abs(after - without_rows).max() > 1e-3


@pytest.mark.parametrize("method", BOTH)
def test_a_single_member_is_trained_as_by_the_plain_step(method):
    one = ee.build(make, 1, key=KEY)
    step = particles.make_step(loss, SGD, num_rows=20, method=method)
    state, metrics = steps(one, step)
    expected, plain = steps(one, ee.train.make_step(loss, SGD))
    assert_close(state.ensemble.stacked, expected.ensemble.stacked, 1e-5)
    np.testing.assert_allclose(metrics.loss, plain.loss, rtol=1e-5)


def test_members_meet(ensemble):
    """Their order has no effect; who else is there has, unlike in a plain step."""
    whole = steps(ensemble)[0].ensemble
    order = np.array([2, 0, 3, 1])
    assert_close(steps(ensemble[order], key=KEYS[order])[0].ensemble.stacked, whole[order].stacked, 1e-5)
    assert distance(steps(ensemble[:3])[0].ensemble.stacked, whole[:3].stacked) > 1e-3
    plain = ee.train.make_step(loss, SGD)
    alone = [steps(part, plain)[0].ensemble for part in (ensemble[:3], ensemble)]
    assert_close(alone[0].stacked, alone[1][:3].stacked, 1e-6)


def test_on_a_mesh(ensemble):
    """Devices with members of their own exchange them, which a plain step does not."""
    alone, metrics = steps(ensemble)
    state = ee.train.init(ee.build(make, 4, mesh=ee.make_mesh(), key=KEY), SGD, key=KEY)
    assert collectives(text_of(STEP, state, (X, Y)))
    assert not collectives(text_of(ee.train.make_step(loss, SGD), state, (X, Y)))
    for _ in range(2):
        state, found = STEP(state, (X, Y))
    assert len(state.ensemble.stacked.weight.sharding.device_set) == 4
    assert_close(state.ensemble.stacked, alone.ensemble.stacked, 1e-5)
    np.testing.assert_allclose(found.loss, metrics.loss, rtol=1e-5)


def broken(ensemble, member):
    spoil = lambda w: w.at[member].set(jnp.nan)
    return eqx.tree_at(lambda e: e.stacked.weight, ensemble, replace_fn=spoil)


def test_a_member_that_diverged_is_as_if_left_out(ensemble):
    state, metrics = steps(broken(ensemble, 1))
    kept = np.array([0, 2, 3])
    expected, _ = steps(ensemble[kept], key=KEYS[kept])
    assert_close(state.ensemble[kept].stacked, expected.ensemble.stacked, 1e-5)
    assert metrics.status.tolist() == [0, 2, 0, 0]
    assert np.isnan(metrics.loss[1])
    assert np.isfinite(np.asarray(metrics.loss)[kept]).all()


@pytest.mark.slow
def test_a_member_that_diverges_by_its_own_data(ensemble):
    """In the second step: it keeps the weights of the first."""
    first, _ = steps(ensemble, count=1, batch=(ee.Each(np.stack([X] * 4)), Y))
    bad = np.stack([X] * 4)
    bad[2] = np.inf
    state, metrics = STEP(first, (ee.Each(bad), Y))
    assert metrics.status.tolist() == [0, 0, 2, 0]
    assert_same(state.ensemble[2], first.ensemble[2])
    kept = [0, 1, 3]
    expected, _ = steps(ensemble, count=1)
    params = lambda state: state.ensemble[kept].stacked
    assert distance(params(state), params(expected)) > 1e-3
    again, metrics = STEP(state, (X, Y))  # still absent
    assert metrics.status.tolist() == [0, 0, 2, 0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(again.params))


class Mixed(eqx.Module):
    """Frozen and shared parts, half precision, integers."""

    trunk: ee.train.Frozen
    head: eqx.nn.Linear
    half: jax.Array
    table: jax.Array
    scale: jax.Array

    def __init__(self, scale, key):
        keys = jax.random.split(key, 3)
        self.trunk = ee.train.Frozen(eqx.nn.Linear(25, 3, key=keys[0]))
        self.head = eqx.nn.Linear(3, 2, key=keys[1])
        self.half = jax.random.normal(keys[2], (2,), jnp.float16)
        self.table = jnp.array([1, 0])
        self.scale = scale

    def __call__(self, x):
        return self.scale * self.head(jax.nn.relu(self.trunk(x))) + self.half[self.table].astype(x.dtype)


@pytest.mark.slow
def test_frozen_and_shared_parts_and_half_precision():
    scale = jnp.asarray(2.0)
    ensemble = ee.build(lambda key: Mixed(scale, key), 3, shared=lambda m: m.scale, key=KEY)
    step = particles.make_step(mse, SGD, num_rows=20)
    state, metrics = steps(ensemble, step)
    assert state.ensemble.stacked.scale == scale
    assert_same(state.ensemble.stacked.trunk, ensemble.stacked.trunk)
    assert state.params.half.dtype == jnp.float16
    assert metrics.status.tolist() == [0, 0, 0]
    assert distance(state.params.half, ensemble.stacked.half) > 1e-3


def test_each_member_has_its_own_optimiser_and_loss():
    ensemble = ee.build(make, 3, key=KEY)
    rates, coefficients = jnp.array([0.1, 0.2, 0.0]), jnp.array([1.0, 2.0, 1.0])
    own = lambda model, batch, key, hyper: (hyper["c"] * loss(model, batch, key), hyper["c"])
    by_hyper = lambda hyper: optax.sgd(hyper["lr"])
    step = particles.make_step(own, by_hyper, num_rows=20, has_aux=True)
    options = dict(optimiser=by_hyper, hyper={"lr": rates, "c": coefficients}, count=1)
    state, metrics = steps(ensemble, step, **options)
    np.testing.assert_array_equal(metrics.aux, coefficients)
    assert_same(state.ensemble[2], ensemble[2])
    assert distance(state.ensemble[1], ensemble[1]) > 1e-3


@pytest.mark.slow
def test_in_a_compiled_loop_and_on_the_state_of_a_run(ensemble, tmp_path):
    run = ee.fit(ensemble, loss, SGD, (X, Y), steps=2, key=KEY)
    batches = np.stack([X] * 3), np.stack([Y] * 3)
    looped, metrics = ee.train.scan_steps(STEP, run.train_state, batches)
    assert metrics.loss.shape == (3, 4)
    state = run.train_state
    for _ in range(3):
        state, last = STEP(state, (X, Y))
    assert_close(looped.ensemble.stacked, state.ensemble.stacked, 1e-5)
    assert looped.step.tolist() == state.step.tolist() == [5] * 4
    again = ee.fit(looped, loss, SGD, (X, Y), steps=1, key=KEY)
    assert again.train_state.step.tolist() == [6] * 4
    ee.save(tmp_path / "e", looped.ensemble)
    loaded = ee.load(tmp_path / "e", make)
    assert_same(loaded.stacked, looped.ensemble.stacked)


@pytest.mark.slow
def test_members_with_state():
    case = CASES["conv and batch norm"]
    ensemble, state = ee.build(case.make, 3, key=KEY)
    step = particles.make_step(case.loss, SGD, num_rows=20)
    after, metrics = steps(ensemble, step, state=state)
    plain, _ = steps(ensemble, ee.train.make_step(case.loss, SGD), state=state)
    assert_close(after.model_state, plain.model_state, 0.2)
    assert metrics.status.tolist() == [0, 0, 0]
    outputs = lambda model, batch, key: jax.vmap(model)(batch[0])
    step = particles.make_function_space_step(outputs, lambda f, batch, key: jnp.mean(f), SGD, num_rows=20)
    with pytest.raises(NotImplementedError, match="takes members without state"):
        steps(ensemble, step, state=state)


def outputs(model, batch, key):
    return jax.vmap(model)(batch[0])


def test_in_function_space_members_are_a_gaussian_process_posterior():
    """Linear functions of full rank, a linear kernel, more members than rows: exact mean and covariance."""
    rng = np.random.default_rng(2)
    x, y, noise = np.eye(3) + 0.2 * rng.normal(size=(3, 3)), rng.normal(size=(3, 1)), 0.5
    gram = np.exp(-0.5 * np.sum((x[:, None] - x[None]) ** 2, axis=-1))
    gain = gram @ np.linalg.inv(gram + noise**2 * np.eye(3))

    def posterior(f, batch, key, *, prior=1.0):
        fit = jnp.sum((f - batch[1]) ** 2) / (2 * noise**2)
        return (fit + prior * jnp.sum(f * (np.linalg.inv(gram) @ f)) / 2) / 3

    def sampled(loss):
        step = particles.make_function_space_step(
            outputs, loss, sgd, num_rows=3, method="svgd", kernel=lambda x, y: x @ y + 1
        )
        state = ee.train.init(ensemble, sgd, key=KEY)
        state, _ = ee.train.scan_steps(lambda state, _: step(state, (x, y)), state, length=4000)
        return np.asarray(jax.vmap(lambda model: jax.vmap(model)(x)[:, 0])(state.ensemble.stacked))

    with jax.enable_x64(True):
        sgd = optax.sgd(0.1)
        start = jnp.asarray(rng.normal(size=(5, 1, 3)))
        like = eqx.nn.Linear(3, 1, use_bias=False, key=KEY)
        ensemble = ee.stack([eqx.tree_at(lambda m: m.weight, like, w) for w in start])
        found = sampled(posterior)
        other = sampled(lambda f, batch, key: posterior(f, batch, key, prior=0.0))
    np.testing.assert_allclose(found.mean(axis=0), (gain @ y)[:, 0], rtol=1e-7)
    np.testing.assert_allclose(np.cov(found.T, bias=True), gram - gain @ gram, rtol=1e-6)
    assert np.abs(np.cov(other.T, bias=True) - (gram - gain @ gram)).max() > 1e-2


@pytest.mark.parametrize("method", ["wgd", pytest.param("svgd", marks=pytest.mark.slow)])
def test_a_step_in_function_space_is_the_pull_back_of_its_direction(ensemble, method):
    def posterior(f, batch, key):
        return jnp.mean((f[:, :2] - batch[1]) ** 2) + jnp.mean(f**2) / 10

    step = particles.make_function_space_step(outputs, posterior, SGD, num_rows=20, method=method)
    state, _ = steps(ensemble, step, count=1)
    found = np.asarray(jax.vmap(lambda model: jax.vmap(model)(X))(ensemble.stacked))  # (members, rows, 2)
    gradients = jax.vmap(jax.grad(lambda f: posterior(f, (X, Y), KEY)))(found)
    flat = lambda x: np.reshape(x, (4, -1))
    moved = METHODS[method](flat(found), -20 * flat(gradients)).reshape(found.shape) / 20
    expected = ensemble.stacked.weight + 0.1 * np.einsum("mro,ri->moi", moved, X)
    np.testing.assert_allclose(state.params.weight, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.params.bias, ensemble.stacked.bias + 0.1 * moved.sum(axis=1), rtol=1e-5, atol=1e-5)


def complex_weights():
    ensemble = ee.stack([eqx.tree_at(lambda m: m.weight, make(KEY), replace_fn=lambda w: w.astype(complex))] * 2)
    return STEP(ee.train.init(ensemble, SGD, key=KEY), (X, Y))


def state_of():
    return ee.train.init(ee.build(make, 2, key=KEY), SGD, key=KEY)


FUNCTION = particles.make_function_space_step


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: particles.make_step(3, SGD, num_rows=5), "needs `loss` to be a function"),
        (lambda: particles.make_step(loss, SGD, num_rows=0), "needs a finite `num_rows` above zero"),
        (lambda: particles.make_step(loss, SGD, num_rows=[5, 5]), "needs one number as `num_rows`"),
        (lambda: particles.make_step(loss, SGD, num_rows=5, method="stein"), "`method` to be one of 'svgd', 'wgd'"),
        (lambda: particles.make_step(loss, SGD, num_rows=5, kernel="rbf"), "needs `kernel` to be a function"),
        (lambda: FUNCTION(None, loss, SGD, num_rows=5), "needs `outputs` to be a function"),
        (lambda: FUNCTION(lambda m, b, k: jnp.arange(3), loss, SGD, num_rows=5)(state_of(), (X, Y)),
         r"floating-point arrays from `outputs`\.\n  got int"),
        (lambda: FUNCTION(lambda m, b, k: None, loss, SGD, num_rows=5)(state_of(), (X, Y)), "an array from `outputs`"),
        (complex_weights, r"needs real weights\.\n  got complex[0-9]+ at `\.weight`"),
    ],
)  # fmt: skip
def test_bad_steps(unhooked, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
