"""Averages, SWAG, snapshots and samplers, against closed forms and a NumPy copy of every weight."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import sampling, trajectory
from eqx_ensemble.methods.sampling import diagnostics
from eqx_ensemble.train import Status

from ..factories import assert_close, assert_same, relaxed

KEY = jax.random.key(0)
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
MEMBERS = 3
DRIFT = optax.sgd(1.0)  # whose step is the gradient
DATA = jax.random.normal(jax.random.key(2), (10, 1)) / 100


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
    return ee.fit(ensemble, loss, optimiser, DATA, steps=steps, progress=False, **{"key": KEY} | options)


def flat(ensemble):
    return np.column_stack([ensemble.stacked.a, ensemble.stacked.b]).astype(np.float64)


@pytest.fixture(scope="module")
def weights(ensemble):
    """The weights after every step `(steps, members, 3)`, of the optimiser alone, in double precision."""
    state = ee.train.init(ensemble, DRIFT, key=KEY)
    step, found = ee.train.make_step(noisy, DRIFT), []
    for _ in range(12):
        state, _ = step(state, DATA)
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
    run = fitted(ensemble, trajectory.snapshots(DRIFT, 4, start=4, every=1, period=5))
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


@pytest.mark.slow
def test_draws_follow_from_keys(ensemble):
    run, some = fitted(ensemble, trajectory.swag(DRIFT, rank=3)), np.array([2, 0])
    draws = trajectory.sample(run, 4, key=KEY)
    keys = ee.member_keys(KEY, MEMBERS, purpose="swag")[some]
    assert_same(trajectory.sample(run.train_state[some], 4, key=keys), draws[[8, 9, 10, 11, 0, 1, 2, 3]])
    assert np.unique(flat(draws), axis=0).shape == (12, 3)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_few_snapshots(ensemble):
    optimiser = trajectory.swag(trajectory.snapshots(DRIFT, 2, every=5), rank=2, start=6)
    run = fitted(ensemble, optimiser, stop=ee.train.Stopping(steps=[4, 6, 8]), steps=9)
    with pytest.warns(UserWarning, match="members with no snapshot: 0. Their current weights"):
        assert_same(trajectory.average(run)[0], run.ensemble[0])
    with pytest.warns(UserWarning, match="fewer than 2 snapshots: 0, 1. Their draws are all equal"):
        draws = flat(trajectory.sample(run, 3, key=KEY)).reshape(3, 3, 3)
    np.testing.assert_allclose(draws[:2], flat(run.ensemble)[:2, None].repeat(3, 1), rtol=1e-6)
    with pytest.warns(UserWarning, match="members with no snapshot: 0. They are left out"):
        assert len(trajectory.snapshot_ensemble(run)) == 2
    assert trajectory.snapshot_owners(run).tolist() == [1, 2]


@pytest.mark.slow
def test_resumed_continued_and_under_jit(ensemble, tmp_path):
    optimiser = trajectory.swag(trajectory.snapshots(trajectory.ema(optax.adam(0.1)), 3, every=2), rank=3)
    whole, half = fitted(ensemble, optimiser), fitted(ensemble, optimiser, steps=7, checkpoint=tmp_path / "run")
    assert_close(fitted(half, optimiser, steps=5).train_state.opt_state, whole.train_state.opt_state, 1e-6)
    resumed = fitted(ensemble, optimiser, checkpoint=tmp_path / "run").train_state
    assert_close(resumed.opt_state, whole.train_state.opt_state, 1e-6)
    draw = lambda state: trajectory.sample(state, 2, key=KEY)
    assert_close(eqx.filter_jit(draw)(resumed), draw(whole), 1e-6)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "size"), [("batch", 8), ("ema", 3)])
def test_statistics_of_all_rows_after_a_run(mode, size):
    """Whatever the batches: a mean of their variances misses the variance between them, 20 % at three rows."""
    ensemble, state = ee.build(eqx.nn.make_with_state(lambda key: normalised(key, mode)), 2, key=KEY)
    known = 3 * jnp.ones((2, 4)), 4 * jnp.ones((2, 4))
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


# Samplers, against the exact stationary law of their discretised chains; diagnostics against ArviZ

ROWS = 50
sgld = lambda rate, rows=ROWS, **options: sampling.sgld(rate, rows, key=KEY, **options)
sghmc = lambda rate, rows=ROWS, **options: sampling.sghmc(rate, rows, key=KEY, **options)

# The stationary law of h x^2 / 2 on the scale of the log-posterior, of which the loss is 1 / N

CHAINS, STEPS, BURN_IN = 10_000, 250, 100
T, H, E = 0.7, 3.0, 0.2  # temperature, curvature, and step on the log-posterior: the learning rate is E * ROWS


@jax.jit(static_argnums=0)
def _simulate(optimiser, noise):
    """The mean square of independent chains, over chains and steps. Gradients have noise."""
    x = jnp.zeros(CHAINS)

    def one(carry, i):
        x, state = carry
        extra = noise / ROWS * jax.random.normal(jax.random.fold_in(jax.random.key(5), i), x.shape)
        moves, state = optimiser.update(H / ROWS * x + extra, state, x)
        x = optax.apply_updates(x, moves)
        return (x, state), jnp.where(i >= BURN_IN, jnp.mean(x**2), 0.0)

    _, squares = jax.lax.scan(one, (x, optimiser.init(x)), jnp.arange(STEPS))
    return jnp.sum(squares) / (STEPS - BURN_IN)


def assert_variance(found, expected, steps_between):
    """Within 5 standard errors, where samples this many steps apart count as independent, which is on the safe side."""
    independent = CHAINS * (STEPS - BURN_IN) / steps_between
    np.testing.assert_allclose(found, expected, rtol=5 * np.sqrt(2 / independent))


@pytest.mark.parametrize("s", [0.0, 1.5])
def test_stationary_variance_of_sgld(s):
    found = float(_simulate(sgld(E * ROWS, temperature=T), s))
    assert_variance(found, (T + E * s**2 / 2) / (H * (1 - E * H / 2)), 4)


@pytest.mark.parametrize(("a", "s"), [(0.3, 1.5), slow(0.1, 0.0)])
def test_stationary_variance_of_sghmc(a, s):
    found = float(_simulate(sghmc(E * ROWS, friction=a, temperature=T), s))
    assert_variance(found, (T + E * s**2 / (2 * a)) / (H * (1 - E * H / (2 * (2 - a)))), 40)


def test_sghmc_without_noise_is_sgd():
    walk, heavy = np.ones((2, 20), np.float32), (sghmc(2.0, friction=0.3, temperature=0), optax.sgd(2.0, momentum=0.7))
    states = [one.init(x) for one, x in zip(heavy, walk, strict=True)]
    for _ in range(4):
        found = [one.update(H / ROWS * jnp.asarray(x), old) for one, x, old in zip(heavy, walk, states, strict=True)]
        walk, states = walk + np.stack([moves for moves, _ in found]), [new for _, new in found]
    np.testing.assert_allclose(walk[0], walk[1], rtol=1e-5)


def test_the_noise_follows_the_learning_rate_of_its_step():
    """Of a schedule, and of the temperature's own. Parts of an `optax.multi_transform` have noise of their own."""
    rate, heat = optax.linear_schedule(1.0, 0.25, 3), lambda count: jnp.where(count == 2, 0.0, 4.0)
    sampler = sampling.sgld(rate, 2, temperature=heat, key=KEY)
    both = optax.multi_transform({"a": sampler, "b": sampler}, {"a": "a", "b": "b"})
    zero = {"a": jnp.zeros(CHAINS), "b": jnp.zeros(CHAINS)}
    state, found = both.init(zero), []
    for _ in range(4):
        moves, state = both.update(zero, state, zero)
        found.append(np.stack([moves["a"], moves["b"]]))
    expected = np.sqrt(2 * np.array([1.0, 0.75, 0.5, 0.25]) * np.array([4, 4, 0, 4]) / 2)
    np.testing.assert_allclose(np.std(found, axis=-1), expected[:, None] * np.ones(2), rtol=5 / np.sqrt(2 * CHAINS))
    others = np.corrcoef(np.reshape([x for x in found if x.any()], (6, CHAINS)))
    assert np.abs(others - np.eye(6)).max() < 5.5 / np.sqrt(CHAINS)


def quadratic(model, batch, key):
    """Posterior variances of 1 and 4, of `ROWS` rows. Batches have gradients of their own."""
    return (jnp.sum(model.a**2) / 2 + model.b**2 / 8) / ROWS + jnp.mean(batch) * model.b


HYPER = {"rate": jnp.array([0.1, 0.5, 1.0]), "rows": jnp.array([50, 100, 200]), "heat": jnp.array([1.0, 0.0, 0.5])}


def sampled(ensemble, optimiser, **options):
    return fitted(ensemble, optimiser, loss=quadratic, batch_size=5, **options)


@pytest.mark.parametrize("sampler", [sgld, slow(sghmc)], ids=["sgld", "sghmc"])
def test_members_alone(ensemble, sampler):
    """A member draws the same noise in any ensemble; its hyper-parameters are those of one member."""
    keys, some = ee.member_keys(KEY, MEMBERS, purpose="fit"), np.array([2, 0])
    of_hyper = lambda h: sampler(h["rate"], h["rows"], temperature=h["heat"])
    together = sampled(ensemble, of_hyper, hyper=HYPER)
    own = jax.tree.map(lambda x: x[some], HYPER)
    alone = sampled(ensemble[some], of_hyper, hyper=own, key=keys[some])
    assert_same(alone.train_state.opt_state, ee.tree.take(together.train_state.opt_state, some))
    one = {name: values[2].item() for name, values in HYPER.items()}
    assert_close(sampled(ensemble[[2]], of_hyper(one), key=keys[2:]).ensemble, together.ensemble[[2]], 1e-5)


@pytest.mark.slow
def test_resumed_and_continued(ensemble, tmp_path):
    optimiser = trajectory.snapshots(sghmc(0.5), 4, every=3)
    whole, half = sampled(ensemble, optimiser), sampled(ensemble, optimiser, steps=7, checkpoint=tmp_path / "run")
    assert_same(sampled(half, optimiser, steps=5).train_state.opt_state, whole.train_state.opt_state)
    resumed = sampled(ensemble, optimiser, checkpoint=tmp_path / "run")
    assert_same(resumed.train_state.opt_state, whole.train_state.opt_state)


def test_diagnostics():
    pytest.importorskip("arviz_stats", reason="needs the extra `sampling`")
    steps = np.random.default_rng(0).standard_normal((4, 250))
    paths = [steps[:, 0]]  # four autoregressive chains of unit variance as members, and the chain of each
    for t in range(1, 250):
        paths.append(0.8 * paths[-1] + 0.6 * steps[:, t])
    values, chains = np.stack(paths, axis=1).reshape(-1), np.repeat(np.arange(4), 250)
    moved = np.where(chains == 0, values + 0.5, values)
    plain = diagnostics(moved, chains)
    # arviz-stats 0.8.0, `array_stats.rhat` and `.ess(method="bulk" | "tail", prob=(0.05, 0.95))`
    np.testing.assert_allclose(plain, [1.0882397736993554, 42.04310784912898, 211.12358055657114], rtol=1e-6)
    order = np.argsort(np.tile(np.arange(250), 4), kind="stable")  # interleaved chains, of any numbers
    np.testing.assert_allclose(diagnostics(moved[order], np.array([7, 3, 11, 5])[chains[order]]), plain, rtol=1e-5)
    several = np.stack([moved, np.where(np.arange(1000) == 7, np.nan, values)], axis=1)
    found = np.asarray(diagnostics(several, chains))
    np.testing.assert_allclose(found[:, 0], plain)
    assert np.isnan(found).tolist() == [[False, True]] * 3


@pytest.mark.usefixtures("unhooked")
def test_invalid_chains(monkeypatch):
    with pytest.raises(ValueError, match="a chain for each of 9 samples, and chains of one length; got 0: 5, 1: 4"):
        diagnostics(np.ones(9), np.arange(9) // 5)
    monkeypatch.setitem(sys.modules, "arviz_stats.base.array", None)
    with pytest.raises(ImportError, match=r"`methods.sampling.diagnostics` needs ArviZ"):
        diagnostics(np.ones(8), np.arange(8) // 4)
