"""Interacting particles: closed forms of their fixed points, double loops, and a step written out."""

import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from scipy.spatial.distance import pdist

import eqx_ensemble as ee
from eqx_ensemble.methods import particles

from ..collectives import collectives, text_of
from ..factories import CASES, assert_close, assert_same, data, distance

METHODS = {"svgd": particles.svgd, "wgd": particles.wgd}
EACH = pytest.mark.parametrize("method", METHODS)
RNG = np.random.default_rng(3)
POINTS, SCORES = RNG.normal(size=(2, 6, 4)).astype(np.float32)


def by_hand(points, scores, method, bandwidth=None):
    """The double loop, with the derivatives of the Gaussian kernel worked out."""
    points, scores = np.asarray(points, np.float64), np.asarray(scores, np.float64)
    if bandwidth is None:  # not of the whole matrix, with zeros on its diagonal, and not over log(n + 1)
        distances = pdist(points)
        bandwidth = np.median(distances) ** 2 / np.log(len(points)) if distances.any() else 1
    moved = []
    for x, s in zip(points, scores, strict=True):
        values = np.array([np.exp(-np.sum((x - other) ** 2) / bandwidth) for other in points])
        pushes = np.array([2 / bandwidth * (x - other) * k for other, k in zip(points, values, strict=True)])
        direction = values @ scores + pushes.sum(0)
        moved.append(direction / len(points) if method == "svgd" else s + pushes.sum(0) / values.sum())
    return np.array(moved)


@EACH
@pytest.mark.parametrize("broken", [np.nan, 3e38])
@pytest.mark.parametrize(("count", "size"), [(6, 4), (5, 1), (2, 3), (1, 4)])
def test_each_direction_is_that_of_a_double_loop(method, count, size, broken):
    """Particles that take no part, whatever they hold, are as if left out."""
    points, scores = POINTS[:count, :size], SCORES[:count, :size]
    expected = by_hand(points, scores, method)
    np.testing.assert_allclose(METHODS[method](points, scores), expected, rtol=2e-5, atol=2e-6)
    insert = lambda x: np.insert(x, 1, broken, axis=0)
    found = METHODS[method](insert(points), insert(scores), active=np.arange(count + 1) != 1)
    np.testing.assert_allclose(np.delete(found, 1, axis=0), expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(found[1], 0)


@EACH
def test_kernels_and_precision(method):
    fn, expected = METHODS[method], by_hand(POINTS, SCORES, method, 3.0)
    kernel = lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2) / 3)
    np.testing.assert_allclose(fn(POINTS, SCORES, kernel=kernel), expected, rtol=1e-5, atol=1e-6)
    half = fn(POINTS.astype(np.float16), SCORES.astype(np.float16), kernel=kernel)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, expected, atol=5e-3)
    together = fn(np.repeat(POINTS[:1], 4, axis=0), np.repeat(SCORES[:1], 4, axis=0))
    np.testing.assert_allclose(together, np.repeat(SCORES[:1], 4, axis=0), rtol=1e-6)
    far = (100 + 1e-3 * POINTS).astype(np.float32)  # the repulsion is of the order 1e3; points at 100 are 4e-6 apart
    np.testing.assert_allclose(fn(far, SCORES), by_hand(far, SCORES, method), rtol=2e-3, atol=1e-2)
    # The bandwidth is a constant in derivatives: a particle's distance to itself, a root of zero, is not seen.
    bandwidth = float(np.median(pdist(POINTS)) ** 2 / np.log(6))
    total = lambda points, kernel: jnp.sum(fn(points, SCORES, kernel=kernel) ** 2)
    slope = jax.grad(total)(jnp.asarray(POINTS), lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2) / bandwidth))
    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(POINTS), None), slope, rtol=1e-4, atol=1e-5)
    # A kernel of directions is not defined at zero: particles that take no part have none.
    norm = lambda x: jnp.sqrt(jnp.sum(x**2))
    cosine = lambda x, y: 2 + jnp.sum(x * y) / (norm(x) * norm(y))
    points = np.where(np.arange(6)[:, None] < 4, POINTS, 0).astype(np.float32)
    found = fn(points, SCORES, kernel=cosine, active=np.arange(6) < 4)
    np.testing.assert_allclose(found[:4], fn(POINTS[:4], SCORES[:4], kernel=cosine), rtol=1e-5, atol=1e-6)


def test_a_kernel_that_depends_on_more_than_differences():
    """The derivative is that of the first argument, at the other particle."""
    x, s = np.asarray(POINTS, np.float64), np.asarray(SCORES, np.float64)
    inner = 1 + x @ x.T
    expected = (inner**2 @ s + 2 * inner @ np.ones((6, 1)) * x) / 6
    found = particles.svgd(POINTS, SCORES, kernel=lambda x, y: (1 + x @ y) ** 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_no_array_of_all_pairs_and_weights():
    shape = jax.ShapeDtypeStruct((32, 2000), jnp.float32)
    for fn in METHODS.values():
        analysis = jax.jit(fn).lower(shape, shape).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < 12 * 32 * 2000 * 4  # of all pairs it would be 32 of them


def test_bad_particles(unhooked):
    with pytest.raises(ValueError, match="particles.svgd` needs `scores` for the rows of `points`"):
        particles.svgd(POINTS, SCORES[:, :3])
    with pytest.raises(TypeError, match="must be an optax optimiser"):  # of one member
        ee.train.init(ee.build(make, 4, key=KEY), particles.Interacting(MEETING, num_rows=5), key=KEY)


# Steps in which members meet

KEY = jax.random.key(5)
SGD = optax.sgd(0.1)
KEYS = ee.member_keys(KEY, 4, purpose="fit")
X, Y = (np.asarray(x) for x in data())


def make(key):
    return eqx.nn.Linear(25, 2, key=key)


def loss(model, batch, key):
    """With a prior, and noise of the member's own."""
    x, y = batch
    noise = 0.01 * jax.random.normal(key, y.shape)
    prior = (jnp.sum(model.weight**2) + jnp.sum(model.bias**2)) / 40
    return jnp.mean((jax.vmap(model)(x) - y + noise) ** 2) + prior


MEETING = particles.Interacting(SGD, num_rows=20)
STEP, PLAIN = ee.train.make_step(loss, MEETING), ee.train.make_step(loss, SGD)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(make, 4, key=KEY)


def steps(ensemble, step=STEP, *, count=2, optimiser=SGD, batch=(X, Y), key=KEY, **options):
    state = ee.train.init(ensemble, optimiser, key=key, **options)
    for _ in range(count):
        state, metrics = step(state, batch)
    return state, metrics


@pytest.mark.slow
@EACH
def test_a_step_is_that_of_the_raveled_weights(ensemble, method):
    """Gradients of each member alone, directions of all, an update of each: as a user would write it."""
    meeting = particles.Interacting(SGD, num_rows=20, directions=METHODS[method])
    step = ee.train.make_step(loss, meeting, plan=ee.plan.Blocks(2))
    state, metrics = steps(ensemble, step, count=1)
    keys = [jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(b"loss")), 0) for key in KEYS]
    both = eqx.filter_value_and_grad(loss)
    found = [both(model, (X, Y), key) for model, key in zip(ensemble.unstack(), keys, strict=True)]
    np.testing.assert_allclose(metrics.loss, [value for value, _ in found], rtol=1e-5)
    flat = lambda trees: jnp.stack([ravel_pytree(eqx.filter(tree, eqx.is_inexact_array))[0] for tree in trees])
    points, gradients = flat(ensemble.unstack()), flat(grads for _, grads in found)
    expected = points + 0.1 * METHODS[method](points, -20 * gradients) / 20
    after = flat(state.ensemble.unstack())
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(after - points - 0.1 * METHODS[method](points, -gradients)).max() > 1e-3, "no number of rows"
    one = ee.build(make, 1, key=KEY)
    assert_close(steps(one, step)[0].ensemble.stacked, steps(one, PLAIN)[0].ensemble.stacked, 1e-5)
    run = ee.fit(ensemble, loss, meeting, (X, Y), steps=1, shuffle=False, key=KEY)
    np.testing.assert_allclose(flat(run.ensemble.unstack()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_members_meet(ensemble):
    """Their order has no effect; who else is there has. Devices with members of their own exchange them."""
    whole, order = steps(ensemble)[0].ensemble, np.array([2, 0, 3, 1])
    assert_close(steps(ensemble[order], key=KEYS[order])[0].ensemble.stacked, whole[order].stacked, 1e-5)
    assert distance(steps(ensemble[:3])[0].ensemble.stacked, whole[:3].stacked) > 1e-3
    sharded = ee.build(make, 4, mesh=ee.make_mesh(), key=KEY)
    assert collectives(text_of(jax.jit(STEP), ee.train.init(sharded, SGD, key=KEY), (X, Y)))
    assert_close(steps(sharded)[0].ensemble.stacked, whole.stacked, 1e-5)


@pytest.mark.slow
def test_members_that_diverge_are_as_if_left_out(ensemble):
    """From the first step on, or by data of their own in the second, when they keep the weights of the first."""
    broken = eqx.tree_at(lambda e: e.stacked.weight, ensemble, replace_fn=lambda w: w.at[1].set(jnp.nan))
    state, metrics = steps(broken)
    kept = np.array([0, 2, 3])
    assert_close(state.ensemble[kept].stacked, steps(ensemble[kept], key=KEYS[kept])[0].ensemble.stacked, 1e-5)
    assert metrics.status.tolist() == [0, 2, 0, 0]

    bad = np.stack([X] * 4)
    first, _ = steps(ensemble, count=1, batch=(ee.Each(bad), Y))
    bad[2] = np.inf
    state, metrics = STEP(first, (ee.Each(bad), Y))
    assert metrics.status.tolist() == [0, 0, 2, 0]
    assert_same(state.ensemble[2], first.ensemble[2])
    again, _ = STEP(state, (X, Y))  # still absent
    assert_same(again.ensemble[2], first.ensemble[2])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(again.params))


def test_a_fit_is_a_loop_of_steps(tmp_path):
    """With copies that fill a mesh; a member that has stopped is as if left out; and a run that goes on."""
    batches = [(X[:10], Y[:10]), (X[10:], Y[10:])] * 2
    members = ee.build(make, 5, key=KEY)
    stop, kept = ee.train.Stopping(steps=[99, 99, 2, 99, 99]), np.array([0, 1, 3, 4])
    fit = lambda epochs, **options: ee.fit(
        members, loss, MEETING, (X, Y), batch_size=10, epochs=epochs, shuffle=False, stop=stop, key=KEY, **options
    )
    state = ee.train.init(members, MEETING, key=KEY)
    for i, batch in enumerate(batches):
        state, _ = STEP(state.stop([2]) if i == 2 else state, batch)
    run = fit(2)
    assert_close(run.ensemble.stacked, state.ensemble.stacked, 1e-5)
    assert_close(fit(2, mesh=ee.make_mesh(4)).ensemble.stacked, run.ensemble.stacked, 1e-5)
    fit(1, checkpoint=tmp_path / "run.eqx")
    assert_same(fit(2, checkpoint=tmp_path / "run.eqx").train_state, run.train_state)
    alone = run.train_state[kept]
    two, _ = STEP(run.train_state, batches[0])
    assert_close(two.ensemble[kept].stacked, STEP(alone, batches[0])[0].ensemble.stacked, 1e-5)


@pytest.mark.slow
def test_states():
    case = CASES["conv and batch norm"]
    ensemble, before = ee.build(case.make, 3, key=KEY)
    after, _ = steps(ensemble, ee.train.make_step(case.loss, MEETING), state=before)
    plain, _ = steps(ensemble, ee.train.make_step(case.loss, SGD), state=before)
    assert_close(after.model_state, plain.model_state, 0.2)


@pytest.mark.slow
def test_each_member_has_its_own_optimiser_and_loss():
    ensemble = ee.build(make, 3, key=KEY)
    hyper = {"lr": jnp.array([0.1, 0.2, 0.0]), "c": jnp.array([1.0, 2.0, 1.0])}
    own = lambda model, batch, key, hyper: (hyper["c"] * loss(model, batch, key), hyper["c"])
    by_hyper = lambda hyper: optax.sgd(hyper["lr"])
    meeting = particles.Interacting(by_hyper, num_rows=20)
    step = ee.train.make_step(own, meeting, has_aux=True)
    state, metrics = steps(ensemble, step, count=3, optimiser=meeting, hyper=hyper)
    np.testing.assert_array_equal(metrics.aux, hyper["c"])
    assert_same(state.ensemble[2], ensemble[2])
