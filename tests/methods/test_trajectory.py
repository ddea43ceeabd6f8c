"""Averages, SWAG and snapshots, against closed forms and a NumPy copy of every weight; statistics of BatchNorm."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import trajectory
from eqx_ensemble.train import Status

from ..factories import assert_close, assert_same, relaxed

KEY = jax.random.key(0)
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
MEMBERS = 3
DRIFT = optax.sgd(1.0)  # whose step is the gradient


class Point(eqx.Module):
    """Weights of two leaves, and an integer that is not trained."""

    a: jax.Array
    b: jax.Array
    number: jax.Array


def point(key):
    return Point(jax.random.normal(key, (2,)), jnp.zeros(()), jax.random.randint(key, (), 0, 100))


def noisy(model, batch, key):
    """Each step moves both leaves at random, and both by a common number."""
    noise = jax.random.normal(key, (3,))
    return -jnp.sum(model.a * (noise[:2] + noise[2])) - model.b * noise[2]


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(point, MEMBERS, key=KEY)


def fitted(ensemble, optimiser, steps=12, loss=noisy, **options):
    options = {"key": KEY, "progress": False} | options
    return ee.fit(ensemble, loss, optimiser, jnp.zeros((4, 1)), steps=steps, **options)


def flat(ensemble):
    return np.column_stack([ensemble.stacked.a, ensemble.stacked.b]).astype(np.float64)


@pytest.fixture(scope="module")
def weights(ensemble):
    """The weights after every step `(steps, members, 3)`, of the optimiser alone, in double precision."""
    state = ee.train.init(ensemble, DRIFT, key=KEY)
    step, found = ee.train.make_step(noisy, DRIFT), []
    for _ in range(12):
        state, _ = step(state, jnp.zeros((4, 1)))
        found.append(flat(state.ensemble))
    return np.array(found)


@pytest.mark.parametrize(("start", "every", "taken"), [slow(0, 1, range(1, 13)), (4, 3, (4, 7, 10))])
def test_snapshots_of_steps(ensemble, weights, start, every, taken):
    taken = weights[np.array(taken) - 1]
    uniform = trajectory.average(fitted(ensemble, trajectory.swa(DRIFT, start=start, every=every)))
    np.testing.assert_allclose(flat(uniform), taken.mean(0), rtol=1e-5, atol=1e-6)
    of_swag = trajectory.average(fitted(ensemble, trajectory.swag(DRIFT, rank=2, start=start, every=every)))
    assert_close(of_swag, uniform, 1e-6)
    assert_same(uniform.stacked.number, ensemble.stacked.number)

    powers = 0.8 ** np.arange(len(taken))[::-1, None, None]
    exponential = trajectory.average(fitted(ensemble, trajectory.ema(DRIFT, 0.8, start=start, every=every)))
    np.testing.assert_allclose(flat(exponential), (powers * taken).sum(0) / powers.sum(), rtol=1e-5, atol=1e-6)

    run = fitted(ensemble, trajectory.snapshots(DRIFT, 2, every=every, start=start))
    found, order = trajectory.snapshot_ensemble(run), lambda taken: taken.transpose(1, 0, 2).reshape(-1, 3)
    # Of all, the last two, the oldest first. Two programs differ by the rounding of numbers of order one.
    np.testing.assert_allclose(flat(found), order(taken[-2:]), rtol=1e-6, atol=1e-6)
    assert trajectory.snapshot_owners(run).tolist() == np.repeat(range(MEMBERS), 2).tolist()
    assert_same(found.stacked.number, jnp.repeat(ensemble.stacked.number, 2))
    run = fitted(ensemble, trajectory.snapshots(DRIFT, 4, start=4, period=5))
    expected = order(weights[np.array([4, 5, 9, 10]) - 1])
    np.testing.assert_allclose(flat(trajectory.snapshot_ensemble(run)), expected, rtol=1e-6, atol=1e-6)


def test_small_variances_of_large_weights():
    """In float32 the mean of squares less the square of the mean is -6e-3, where the variance is 1e-6."""
    values, optimiser = 100 + 1e-3 * jax.random.normal(KEY, (200,)), trajectory.swag(optax.identity(), rank=0)
    one = lambda state, value: (optimiser.update(jnp.zeros(()), state, value)[1], None)
    state, _ = jax.lax.scan(one, optimiser.init(jnp.zeros(())), values)
    np.testing.assert_allclose(state.record.squares / 200, np.var(values, dtype=float), rtol=0.02)


@pytest.mark.parametrize(("rank", "scale"), [(4, None), slow(20, 1.0), slow(0, None)])
def test_covariance_of_draws(ensemble, weights, rank, scale):
    """Against the covariance of the recorded path of 12 snapshots, between leaves too; of 20 columns 8 are empty."""
    run, count = fitted(ensemble, trajectory.swag(DRIFT, rank=rank)), 20_000
    draws = flat(trajectory.sample(run, count, scale=scale, key=KEY)).reshape(MEMBERS, count, 3)
    for i in range(MEMBERS):
        own = weights[:, i]
        means = np.cumsum(own, 0) / np.arange(1, 13)[:, None]
        kept = (own - means)[len(own) - min(rank, 12) :]
        expected = np.diag(own.var(0)) + kept.T @ kept / max(len(kept) - 1, 1)
        expected *= scale or (0.5 if rank else 1.0)
        variances = np.diag(expected)
        error = np.sqrt((expected**2 + np.outer(variances, variances)) / count)  # of a Gaussian's covariance
        assert (np.abs(np.cov(draws[i].T) - expected) < 5.5 * error).all()
        assert (np.abs(draws[i].mean(0) - own.mean(0)) < 5.5 * np.sqrt(variances / count)).all()


def test_draws_follow_from_keys(ensemble):
    run, some = fitted(ensemble, trajectory.swag(DRIFT, rank=3)), np.array([2, 0])
    draws = trajectory.sample(run, 4, key=KEY)
    keys = ee.member_keys(KEY, MEMBERS, purpose="swag")[some]
    assert_same(trajectory.sample(run.train_state[some], 4, key=keys), draws[[8, 9, 10, 11, 0, 1, 2, 3]])
    assert np.unique(flat(draws), axis=0).shape == (12, 3)


# Members


def test_members_alone_and_the_optimiser_alone(ensemble):
    """With hyper-parameters of each member: of optimiser, decay and first snapshot."""
    hyper = {"lr": jnp.array([0.1, 0.2, 0.3]), "decay": jnp.array([0.5, 0.0, 0.9]), "start": jnp.array([0, 3, 6])}
    inner = lambda h: optax.adam(h["lr"])
    wrap = lambda h: trajectory.ema(trajectory.swag(inner(h), rank=3), h["decay"], start=h["start"])
    run, keys = fitted(ensemble, wrap, hyper=hyper), ee.member_keys(KEY, MEMBERS, purpose="fit")
    assert_same(run.ensemble, fitted(ensemble, inner, hyper=hyper).ensemble)
    for i in range(MEMBERS):
        own = jax.tree.map(lambda x, i=i: x[i].item(), hyper)
        alone = fitted(ensemble[[i]], wrap(own), key=keys[i : i + 1]).train_state.opt_state
        assert_close(ee.tree.take(run.train_state.opt_state, [i]), alone, 1e-5)


def test_members_that_stop_or_diverge_keep_their_own_counts(ensemble, weights):
    def loss(model, batch, key, hyper):
        return noisy(model, batch, key) + jnp.where(model.b > hyper, jnp.nan, 0)

    own = weights[:11, 2, 2]
    best = int(np.argmax(own))  # the next step sees it, and diverges
    assert 0 < best < 10
    limit = jnp.full(3, jnp.inf).at[2].set((own[:best].max() + own[best]) / 2)
    optimiser = lambda hyper: trajectory.swag(trajectory.snapshots(DRIFT, 12, every=2), rank=12)
    with pytest.warns(UserWarning, match="diverged"):
        run = fitted(ensemble, optimiser, loss=loss, hyper=limit, stop=ee.train.Stopping(steps=[100, 5, 100]))
    assert run.status.tolist() == [Status.OK, Status.STOPPED, Status.DIVERGED]
    counts = [12, 5, best + 1]
    assert run.train_state.opt_state.count.tolist() == counts
    mean = [weights[:count, i].mean(0) for i, count in enumerate(counts)]
    np.testing.assert_allclose(flat(trajectory.average(run)), mean, rtol=1e-5, atol=1e-6)
    kept = trajectory.snapshot_ensemble(run)
    expected = [(i, n) for i in range(3) for n in range(counts[i] // 2)]
    assert trajectory.snapshot_owners(run).tolist() == [i for i, _ in expected]
    np.testing.assert_allclose(flat(kept), [weights[2 * n + 1, i] for i, n in expected], rtol=1e-6)


def test_few_snapshots(ensemble):
    optimiser = trajectory.swag(trajectory.snapshots(DRIFT, 2, every=5), rank=2, start=6)
    run = fitted(ensemble, optimiser, stop=ee.train.Stopping(steps=[4, 6, 8]), steps=9)
    with pytest.warns(UserWarning, match="members with no snapshot: 0. Their current weights"):
        assert_same(trajectory.average(run)[0], run.ensemble[0])
    with pytest.warns(UserWarning, match="fewer than 2 snapshots: 0, 1. Their draws are all equal"):
        draws = flat(trajectory.sample(run, 3, key=KEY)).reshape(3, 3, 3)
    np.testing.assert_allclose(draws[:2], flat(run.ensemble)[:2, None].repeat(3, 1), rtol=1e-6)
    assert np.ptp(draws[2], axis=0).min() > 0
    with pytest.warns(UserWarning, match="members with no snapshot: 0. They are left out"):
        assert len(trajectory.snapshot_ensemble(run)) == 2
    assert trajectory.snapshot_owners(run).tolist() == [1, 2]


def test_resumed_continued_under_jit_and_on_a_mesh(ensemble, tmp_path):
    optimiser = trajectory.swag(trajectory.snapshots(trajectory.ema(optax.adam(0.1)), 3, every=2), rank=3)
    whole, half = fitted(ensemble, optimiser), fitted(ensemble, optimiser, steps=7, checkpoint=tmp_path / "run")
    assert_close(fitted(half, optimiser, steps=5).train_state.opt_state, whole.train_state.opt_state, 1e-6)
    resumed = fitted(ensemble, optimiser, checkpoint=tmp_path / "run").train_state
    assert_close(resumed.opt_state, whole.train_state.opt_state, 1e-6)
    draw = lambda state: trajectory.sample(state, 2, key=KEY)
    assert_close(eqx.filter_jit(draw)(resumed), draw(whole), 1e-6)
    sharded = fitted(ensemble, optimiser, mesh=ee.make_mesh(3))
    assert sharded.train_state.opt_state.record.mean.a.sharding.num_devices > 1
    assert_close(draw(sharded), draw(whole), 1e-5)


def test_dtypes():
    """Averages are summed in 32 bits or more, and returned in the weights' dtype."""
    model, grow = {"w": jnp.bfloat16(256)}, lambda model, batch, key: -model["w"].astype(jnp.float32)
    run = fitted(ee.stack([model, model]), trajectory.swag(optax.sgd(2.0)), 3, grow)
    mean = trajectory.average(run).stacked["w"]
    assert mean.dtype == trajectory.sample(run, 4, key=KEY).stacked["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(mean).astype(float), 260)


def test_invalid_records(ensemble):
    for optimiser, collect, message in [
        (optax.adam(0.1), trajectory.average, "found 0"),
        (trajectory.ema(trajectory.swa(DRIFT)), trajectory.average, "found 2"),
        (trajectory.snapshots(DRIFT, 2, every=9), trajectory.snapshot_owners, "no member has reached its first"),
    ]:
        with pytest.raises(ValueError, match=message):
            collect(ee.train.init(ensemble, optimiser, key=KEY))


# Statistics of BatchNorm, against those of all rows at once

X = jax.random.normal(KEY, (20, 3)) * jnp.array([[1.0, 3.0, 0.1]]) + jnp.array([[0.0, 5.0, -2.0]])


def normalised(key, mode):
    norm = eqx.nn.BatchNorm(4, "batch", mode=mode, momentum=0.5)
    last = eqx.nn.BatchNorm(4, "batch", mode="ema", inference=True, channelwise_affine=False)
    return eqx.nn.Sequential([eqx.nn.Linear(3, 4, key=key), norm, last])


def norm_loss(model, state, batch, key):
    out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch, state)
    return jnp.mean(out[:, :2] ** 2) + jnp.mean(out[:, 2]), state


def check_statistics(ensemble, state, x):
    """The layer in inference mode keeps a mean of 3 and a variance of 4."""
    with relaxed():
        found = ee.predict(ensemble, ee.Each(x), state=state)
    out = np.asarray(ee.map_members(lambda model, x: jax.vmap(model.layers[0])(x))(ensemble, ee.Each(x)), np.float64)
    out = (out - out.mean(1, keepdims=True)) / np.sqrt(out.var(1, keepdims=True) + 1e-5)
    norm = ensemble.stacked.layers[1]
    out = out * np.asarray(norm.weight)[:, None] + np.asarray(norm.bias)[:, None]
    return np.abs(found - (out - 3) / 2).max()


@pytest.mark.parametrize(("mode", "size"), [("batch", 8), ("ema", 3)])
def test_statistics_of_all_rows_after_a_run(mode, size):
    """Whatever the batches: a mean of their variances misses the variance between them, 20 % at three rows."""
    ensemble, state = ee.build(eqx.nn.make_with_state(lambda key: normalised(key, mode)), 2, key=KEY)
    known = jnp.full((2, 4), 3.0), jnp.full((2, 4), 4.0)
    state = state.set(ensemble.stacked.layers[2].ema_state_index, known)
    optimiser = trajectory.swag(trajectory.snapshots(optax.sgd(0.1), 2, every=3), rank=3)
    run = ee.fit(ensemble, norm_loss, optimiser, X, steps=6, batch_size=8, state=state, key=KEY)
    options = dict(batch_size=size, key=KEY)
    update = lambda members, state, x: trajectory.update_batch_norm(members, state, norm_loss, x, **options)
    average, own = trajectory.average(run), jnp.stack([X, 2 * X + 1])
    assert check_statistics(average, run.state, own) > 0.02
    whole = update(average, run.state, ee.Each(own))
    assert check_statistics(average, whole, own) < 1e-3
    alone = update(average[[1]], ee.tree.take(run.state, [1]), own[1])
    assert_close(ee.tree.take(whole, [1]), alone, 1e-5)
    of_members = ee.tree.take(run.state, np.repeat([0, 1], 2))
    for members in (trajectory.sample(run, 2, key=KEY), trajectory.snapshot_ensemble(run)):
        assert check_statistics(members, update(members, of_members, X), jnp.stack([X] * 4)) < 1e-3
