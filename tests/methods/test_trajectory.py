"""Averages, SWAG and snapshots, against closed forms of known paths and against a NumPy copy of every weight."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import trajectory
from eqx_ensemble.train import Status

from ..factories import assert_close, assert_same

KEY = jax.random.key(0)
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
MEMBERS = 3
DRIFT = optax.sgd(1.0)  # whose step is the gradient


class Point(eqx.Module):
    """Weights of two leaves, and an integer that is not trained."""

    a: jax.Array
    b: jax.Array
    number: jax.Array

    def __init__(self, key):
        self.a, self.b = jax.random.normal(key, (2,)), jnp.zeros((), jnp.float32)
        self.number = jax.random.randint(key, (), 0, 100)


def noisy(model, batch, key):
    """Each step moves both leaves at random, and both by a common number."""
    noise = jax.random.normal(key, (3,), model.a.dtype)
    return -jnp.sum(model.a * (noise[:2] + noise[2])) - model.b * noise[2].astype(model.b.dtype)


def drift(model, batch, key):
    """Every weight grows by 1 in each step."""
    return -jnp.sum(model.a) - model.b


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(Point, MEMBERS, key=KEY)


def fitted(ensemble, optimiser, steps=12, loss=noisy, **options):
    options = {"key": KEY, "progress": False} | options
    return ee.fit(ensemble, loss, optimiser, jnp.zeros((4, 1)), steps=steps, **options)


def walk(ensemble, steps=12, loss=noisy):
    """The weights after every step `(steps, members, 3)`, of the optimiser alone, in double precision."""
    state = ee.train.init(ensemble, DRIFT, key=KEY)
    step, found = ee.train.make_step(loss, DRIFT), []
    for _ in range(steps):
        state, _ = step(state, jnp.zeros((4, 1)))
        found.append(flat(state.ensemble))
    return np.array(found)


def flat(ensemble):
    parts = [np.asarray(ensemble.stacked.a), np.asarray(ensemble.stacked.b)[:, None]]
    return np.concatenate([x.astype(np.float64) for x in parts], axis=1)


@pytest.fixture(scope="module")
def weights(ensemble):
    return walk(ensemble)


# Averages


@pytest.mark.parametrize(
    ("start", "every", "taken"), [slow(0, 1, range(1, 13)), slow(0, 5, (5, 10)), (4, 3, (4, 7, 10))]
)
def test_snapshots_of_steps(ensemble, weights, start, every, taken):
    taken = weights[np.array(taken) - 1]
    uniform = trajectory.average(fitted(ensemble, trajectory.swa(DRIFT, start=start, every=every)))
    np.testing.assert_allclose(flat(uniform), taken.mean(0), rtol=1e-5, atol=1e-6)
    assert_same(uniform.stacked.number, ensemble.stacked.number)

    decay, n = 0.8, len(taken)
    powers = decay ** np.arange(n)[::-1, None, None]
    exponential = trajectory.average(fitted(ensemble, trajectory.ema(DRIFT, decay, start=start, every=every)))
    expected = (powers * taken).sum(0) / powers.sum()
    np.testing.assert_allclose(flat(exponential), expected, rtol=1e-5, atol=1e-6)

    run = fitted(ensemble, trajectory.snapshots(DRIFT, n, every=every, start=start))
    kept = trajectory.snapshot_ensemble(run)
    # Sums of gradients of either sign: two programs differ by the rounding of numbers of order one.
    np.testing.assert_allclose(flat(kept), taken.transpose(1, 0, 2).reshape(-1, 3), rtol=1e-6, atol=1e-6)
    assert trajectory.snapshot_owners(run).tolist() == np.repeat(range(MEMBERS), n).tolist()
    assert_same(kept.stacked.number, jnp.repeat(ensemble.stacked.number, n))


def test_the_first_snapshot_counts_once():
    """Snapshots of 1 to 10: a first one that counts twice makes 5.09 of 5.5."""
    optimiser = trajectory.swa(optax.sgd(1.0))
    params = jnp.zeros(())
    state = optimiser.init(params)
    for _ in range(10):
        updates, state = optimiser.update(-jnp.ones(()), state, params)
        params = optax.apply_updates(params, updates)
    assert state.record.mean == 5.5
    assert state.count == 10


@pytest.mark.parametrize("decay", [0.99, jnp.float32(0.99), 0.0])
def test_lag_of_an_exponential_average_behind_a_line(decay):
    optimiser = trajectory.ema(optax.sgd(1.0), decay)

    def one(carry, _):
        params, state = carry
        updates, state = optimiser.update(-jnp.ones(()), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(one, (jnp.zeros(()), optimiser.init(jnp.zeros(()))), None, length=500)
    d, t = float(decay), 500
    lag = t - (t - d * (1 - d**t) / (1 - d)) / (1 - d**t)  # without debiasing 500 - 401.7
    assert lag == pytest.approx(95.693 if d else 0, abs=1e-3)
    np.testing.assert_allclose(params - state.record.mean, lag, rtol=1e-4)


def test_moments_of_a_quadratic_path():
    """Gradient descent on h x^2 / 2 is a geometric series, whose sums are known."""
    h, rate, n = 0.7, 0.1, 200
    r = 1 - rate * h
    with jax.enable_x64(True):
        params, optimiser = jnp.array(3.0), trajectory.swag(optax.sgd(rate), rank=4)

        def one(carry, _):
            params, state = carry
            updates, state = optimiser.update(h * params, state, params)
            return (optax.apply_updates(params, updates), state), None

        (_, state), _ = jax.lax.scan(one, (params, optimiser.init(params)), None, length=n)
        mean, squares, columns = jax.tree.map(np.asarray, state.record)
    first = 3 * r * (1 - r**n) / (1 - r) / n
    second = 9 * r**2 * (1 - r ** (2 * n)) / (1 - r**2) / n
    np.testing.assert_allclose(mean, first, rtol=1e-12)
    np.testing.assert_allclose(squares / n, second - first**2, rtol=1e-12)
    running = lambda i: 3 * r**i - 3 * r * (1 - r**i) / (1 - r) / i
    np.testing.assert_allclose(columns, [running(i) for i in (197, 198, 199, 200)], rtol=1e-12)


def test_small_variances_of_large_weights():
    """In float32 the mean of squares less the square of the mean is -6e-3, where the variance is 1e-6."""
    values = np.float32(100) + 1e-3 * np.random.default_rng(0).standard_normal(200).astype(np.float32)
    optimiser = trajectory.swag(optax.identity(), rank=0)
    one = lambda state, value: (optimiser.update(jnp.zeros(()), state, value)[1], None)
    state, _ = jax.lax.scan(one, optimiser.init(jnp.zeros(())), jnp.asarray(values))
    squares = jnp.mean(jnp.asarray(values) ** 2) - jnp.mean(jnp.asarray(values)) ** 2
    assert abs(squares) > 1e-4
    np.testing.assert_allclose(state.record.squares / 200, values.astype(float).var(), rtol=0.02)


# SWAG


@pytest.mark.parametrize(("rank", "scale"), [(4, None), (20, 1.0), slow(0, None)])
def test_covariance_of_draws(ensemble, weights, rank, scale):
    """Against the covariance of the recorded path, between leaves too; 12 snapshots, so that of 20 columns 8 are empty.

    A divisor of `rank - 1`, columns from the last mean, or own numbers for each leaf, are another covariance.
    """
    run = fitted(ensemble, trajectory.swag(DRIFT, rank=rank))
    count = 20_000
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
        if rank:  # otherwise leaves have no covariance that could be lost
            assert abs(expected[0, 2]) > 20 * error[0, 2]


def test_draws_follow_from_keys(ensemble):
    run = fitted(ensemble, trajectory.swag(DRIFT, rank=3))
    draws = trajectory.sample(run, 4, key=KEY)
    more = flat(trajectory.sample(run, 6, key=KEY)).reshape(MEMBERS, 6, 3)
    np.testing.assert_array_equal(flat(draws).reshape(MEMBERS, 4, 3), more[:, :4])
    some = np.array([2, 0])
    keys = ee.member_keys(KEY, MEMBERS, purpose="swag")[some]
    assert_same(trajectory.sample(run.train_state[some], 4, key=keys), draws[[8, 9, 10, 11, 0, 1, 2, 3]])
    assert np.unique(flat(draws), axis=0).shape == (12, 3)
    assert_same(draws.stacked.number, jnp.repeat(ensemble.stacked.number, 4))


@pytest.mark.slow
def test_the_mean_of_swag_is_that_of_swa(ensemble):
    uniform = trajectory.average(fitted(ensemble, trajectory.swa(DRIFT, start=4, every=2)))
    assert_close(trajectory.average(fitted(ensemble, trajectory.swag(DRIFT, rank=2, start=4, every=2))), uniform, 1e-6)


# Members


def test_the_run_is_that_of_the_optimiser_alone(ensemble):
    plain = fitted(ensemble, optax.adam(0.1))
    for wrap in (
        trajectory.ema,
        trajectory.swa,
        trajectory.swag,
        lambda inner: trajectory.snapshots(inner, 2, every=3),
    ):
        assert_same(fitted(ensemble, wrap(optax.adam(0.1))).ensemble, plain.ensemble)


@pytest.mark.parametrize("plan", [ee.plan.Vmap(), slow(ee.plan.Blocks(2))])
def test_members_alone(ensemble, plan):
    optimiser = trajectory.ema(trajectory.swag(optax.adam(0.1), rank=3, start=2), 0.9)
    together = fitted(ensemble, optimiser, plan=plan).train_state.opt_state
    for i in range(MEMBERS):
        keys = ee.member_keys(KEY, MEMBERS, purpose="fit")[i : i + 1]
        alone = fitted(ensemble[[i]], optimiser, key=keys).train_state.opt_state
        assert_close(ee.tree.take(together, [i]), alone, 1e-6)


def test_members_that_stop_or_diverge_keep_their_own_counts(ensemble, weights):
    """And a member that is alone in stopping changes no other."""

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
    record = run.train_state.opt_state
    assert record.count.tolist() == counts
    mean = flat(trajectory.average(run))
    for i, count in enumerate(counts):
        np.testing.assert_allclose(mean[i], weights[:count, i].mean(0), rtol=1e-5, atol=1e-6)
    kept = trajectory.snapshot_ensemble(run)
    expected = [(i, n) for i in range(3) for n in range(counts[i] // 2)]
    assert trajectory.snapshot_owners(run).tolist() == [i for i, _ in expected]
    np.testing.assert_allclose(flat(kept), [weights[2 * n + 1, i] for i, n in expected], rtol=1e-6)


def test_few_snapshots(ensemble):
    run = fitted(
        ensemble,
        trajectory.swag(trajectory.snapshots(DRIFT, 2, every=4), rank=2, start=6),
        stop=ee.train.Stopping(steps=[4, 6, 8]),
        steps=9,
    )
    with pytest.warns(UserWarning, match="members with no snapshot: 0. Their current weights"):
        averages = trajectory.average(run)
    assert_same(averages[0], run.ensemble[0])
    with pytest.warns(UserWarning, match="fewer than 2 snapshots: 0, 1. Their draws are all equal"):
        draws = flat(trajectory.sample(run, 3, key=KEY)).reshape(3, 3, 3)
    assert np.isfinite(draws).all()
    np.testing.assert_allclose(draws[:2], flat(run.ensemble)[:2, None].repeat(3, 1), rtol=1e-6)
    assert np.ptp(draws[2], axis=0).min() > 0
    assert trajectory.snapshot_owners(run).tolist() == [0, 1, 2, 2]

    early = fitted(ensemble, trajectory.snapshots(DRIFT, 2, every=5), stop=ee.train.Stopping(steps=[4, 9, 9]), steps=9)
    with pytest.warns(UserWarning, match="members with no snapshot: 0. They are left out"):
        assert len(trajectory.snapshot_ensemble(early)) == 2
    assert trajectory.snapshot_owners(early).tolist() == [1, 2]


@pytest.mark.parametrize("make", [slow(None), Point])
def test_a_revived_member(ensemble, make):
    """A clone has its donor's record; a member from a new initialisation begins to count anew."""

    def loss(model, batch, key, hyper):
        return drift(model, batch, key) + jnp.where(model.b > hyper, jnp.nan, 0)

    limits = jnp.array([100.0, 4.5, 100.0])  # the weight is 5 when it is first above, after five steps
    optimiser = lambda hyper: trajectory.swa(DRIFT)
    revive = ee.train.revive(make, optimiser=optimiser, perturb=lambda hyper, key: jnp.full_like(hyper, 100.0))
    run = fitted(ensemble, optimiser, loss=loss, hyper=limits, callbacks=revive)
    counts = run.train_state.opt_state.count.tolist()
    assert counts == [12, 6 if make else 12, 12]
    means, last = flat(trajectory.average(run)), flat(run.ensemble)
    np.testing.assert_allclose(last - means, (np.array(counts)[:, None] - 1) / 2 * np.ones(3), rtol=1e-4)


def test_the_last_snapshots_are_kept(ensemble, weights):
    """Of six, the last four, the oldest first."""
    kept = trajectory.snapshot_ensemble(fitted(ensemble, trajectory.snapshots(DRIFT, 4, every=2)))
    expected = weights[[5, 7, 9, 11]].transpose(1, 0, 2).reshape(-1, 3)
    np.testing.assert_allclose(flat(kept), expected, rtol=1e-6)


def test_resumed_and_continued(ensemble, tmp_path):
    optimiser = trajectory.swag(trajectory.snapshots(trajectory.ema(optax.adam(0.1)), 3, every=2), rank=3)
    whole = fitted(ensemble, optimiser)
    half = fitted(ensemble, optimiser, steps=7)
    assert_close(fitted(half, optimiser, steps=5).train_state.opt_state, whole.train_state.opt_state, 1e-6)
    fitted(ensemble, optimiser, steps=7, checkpoint=tmp_path / "run")
    resumed = fitted(ensemble, optimiser, checkpoint=tmp_path / "run")
    assert_close(resumed.train_state.opt_state, whole.train_state.opt_state, 1e-6)
    ee.save(tmp_path / "state", whole.train_state)
    loaded = ee.load(tmp_path / "state", ee.train.init(ensemble, optimiser, key=KEY))
    assert_same(trajectory.sample(loaded, 2, key=KEY), trajectory.sample(whole, 2, key=KEY))


@pytest.mark.slow
def test_on_a_mesh(ensemble):
    optimiser = trajectory.swag(trajectory.snapshots(optax.adam(0.1), 2, every=3), rank=3)
    plain, sharded = fitted(ensemble[:2], optimiser), fitted(ensemble[:2], optimiser, mesh=ee.make_mesh(2))
    assert sharded.train_state.opt_state.record.mean.a.sharding.num_devices > 1
    assert_close(trajectory.average(sharded), trajectory.average(plain), 1e-5)
    assert_close(trajectory.sample(sharded, 3, key=KEY), trajectory.sample(plain, 3, key=KEY), 1e-5)
    assert_close(trajectory.snapshot_ensemble(sharded), trajectory.snapshot_ensemble(plain), 1e-5)


def test_hyper_parameters_of_each_member(ensemble, weights):
    hyper = {"decay": jnp.array([0.0, 0.5, 0.9]), "start": jnp.array([0, 3, 6])}
    run = fitted(ensemble, lambda hyper: trajectory.ema(DRIFT, hyper["decay"], start=hyper["start"]), hyper=hyper)
    assert run.train_state.opt_state.count.tolist() == [12, 10, 7]
    means = flat(trajectory.average(run))
    np.testing.assert_allclose(means[0], weights[-1, 0], rtol=1e-5)
    powers = 0.9 ** np.arange(7)[::-1, None]
    np.testing.assert_allclose(means[2], (powers * weights[5:, 2]).sum(0) / powers.sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_own_loops_under_jit(ensemble):
    optimiser = trajectory.swag(DRIFT, rank=2)
    step = ee.train.make_step(noisy, optimiser)
    state = ee.train.init(ensemble, optimiser, key=KEY)
    for _ in range(3):
        state, _ = step(state, jnp.zeros((4, 1)))
    assert_close(eqx.filter_jit(trajectory.average)(state), trajectory.average(state), 1e-6)
    draw = eqx.filter_jit(lambda state: trajectory.sample(state, 2, key=KEY))
    assert_close(draw(state), trajectory.sample(state, 2, key=KEY), 1e-6)


@pytest.mark.slow
def test_in_a_callback(ensemble):
    seen = []
    record = lambda state: seen.append(trajectory.average(state))
    run = fitted(ensemble, trajectory.swa(DRIFT), callbacks=ee.train.every(6, record))
    assert_same(seen[-1], trajectory.average(run))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16), slow(jnp.float64), slow(jnp.complex64)])
def test_dtypes(dtype):
    """Averages are summed in 32 bits or more, and returned in the weights' dtype."""
    with jax.enable_x64(dtype == jnp.float64):
        model = eqx.nn.Lambda(lambda x: x), jnp.asarray(256.0, dtype)
        members = ee.stack([model, model])
        real = lambda model, batch, key: -jnp.real(model[1]).astype(jnp.float32)
        options = {"steps": 3, "loss": real}
        mean = trajectory.average(fitted(members, trajectory.swa(optax.sgd(2.0)), **options))
        assert mean.stacked[1].dtype == dtype
        np.testing.assert_array_equal(np.asarray(mean.stacked[1]).astype(complex), 260)
        if dtype == jnp.complex64:
            with pytest.raises(TypeError, match="needs real weights, got complex64"):
                fitted(members, trajectory.swag(optax.sgd(2.0)), **options)
        else:
            draws = trajectory.sample(fitted(members, trajectory.swag(optax.sgd(2.0)), **options), 4, key=KEY)
            assert draws.stacked[1].dtype == dtype


@pytest.mark.slow
def test_with_wrappers_of_optax(ensemble, weights):
    """Accumulation of gradients: inside of it, snapshots count updates; outside, steps."""
    constant = {"loss": drift, "steps": 8}
    inside = optax.MultiSteps(trajectory.swa(DRIFT), 2).gradient_transformation()
    run = fitted(ensemble, inside, **constant)
    np.testing.assert_allclose(flat(trajectory.average(run)) - flat(ensemble), 2.5, rtol=1e-5)
    outside = trajectory.swa(optax.MultiSteps(DRIFT, 2).gradient_transformation(), every=2)
    np.testing.assert_allclose(
        flat(trajectory.average(fitted(ensemble, outside, **constant))) - flat(ensemble), 2.5, rtol=1e-5
    )
    last = optax.chain(optax.clip(0.5), trajectory.swa(DRIFT))
    np.testing.assert_allclose(
        flat(trajectory.average(fitted(ensemble, last, **constant))) - flat(ensemble), 2.25, rtol=1e-5
    )
    sam = optax.contrib.sam(DRIFT, optax.sgd(1e-3), sync_period=2, opaque_mode=False)
    assert trajectory.average(fitted(ensemble, trajectory.swa(sam), **constant)).num_members == 3
    assert trajectory.average(fitted(ensemble, trajectory.swa(optax.lbfgs()), loss=quadratic, steps=3)).num_members == 3


def quadratic(model, batch, key):
    return jnp.sum(model.a**2) + model.b**2


# Schedules


def test_schedule_of_snapshots():
    schedule = trajectory.snapshot_schedule(0.1, 20)
    t = np.arange(1, 101)
    expected = 0.1 / 2 * (np.cos(np.pi * ((t - 1) % 20) / 20) + 1)
    np.testing.assert_allclose([schedule(i) for i in range(100)], expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(schedule))(jnp.arange(100)), expected, rtol=1e-5)
    np.testing.assert_allclose([expected[0], expected[19], expected[20]], [0.1, 6.2e-4, 0.1], rtol=0.01)


def test_fast_geometric_schedule():
    schedule, c = trajectory.fast_geometric_schedule(0.05, 0.0005, 8), 8
    expected = []
    for i in range(1, 33):
        u = ((i - 1) % c + 1) / c
        low, high = 0.0005, 0.05
        expected.append((1 - 2 * u) * high + 2 * u * low if u <= 0.5 else (2 - 2 * u) * low + (2 * u - 1) * high)
    np.testing.assert_allclose([schedule(i) for i in range(32)], expected, rtol=1e-5)
    assert np.argmin(expected) + 1 == 4  # after `period // 2` steps, as snapshots are taken


# Errors


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: trajectory.ema(optax.adam),
            TypeError,
            "Wrap the optimiser inside of the function: `lambda hyper: methods",
        ),
        (lambda: trajectory.swa(3), TypeError, "needs an optax optimiser, got an int"),
        (lambda: trajectory.ema(DRIFT, 1.0), ValueError, "`decay` below 1"),
        (lambda: trajectory.ema(DRIFT, jnp.float32(1.0)), ValueError, "`decay` below 1"),
        (lambda: trajectory.ema(DRIFT, -0.1), ValueError, "`decay` to be between 0 and 1"),
        (lambda: trajectory.ema(DRIFT, "0.9"), TypeError, "`decay` to be a number"),
        (lambda: trajectory.ema(DRIFT, jnp.ones(2)), TypeError, "`decay`"),
        (lambda: trajectory.swa(DRIFT, start=-1), ValueError, "`start` of at least 0"),
        (lambda: trajectory.swa(DRIFT, start=1.5), TypeError, "integer `start`"),
        (lambda: trajectory.swa(DRIFT, every=0), ValueError, "`every` of at least 1"),
        (lambda: trajectory.swag(DRIFT, rank=1), ValueError, "`rank` to be 0"),
        (lambda: trajectory.swag(DRIFT, rank=-1), ValueError, "`rank` of at least 0"),
        (lambda: trajectory.snapshots(DRIFT, 0, every=1), ValueError, "`size` of at least 1"),
        (lambda: trajectory.snapshots(DRIFT, 2, every=2**31), ValueError, "`every` of at most"),
        (lambda: trajectory.snapshot_schedule(-0.1, 20), ValueError, "`init_value`"),
        (lambda: trajectory.snapshot_schedule(0.1, 0), ValueError, "`period`"),
        (lambda: trajectory.fast_geometric_schedule(0.1, 0.01, 5), ValueError, "even `period`, got 5"),
        (lambda: trajectory.swa(DRIFT).update(1.0, trajectory.swa(DRIFT).init(1.0)), ValueError, "with the weights"),
    ],
)
def test_invalid_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("optimiser", "collect", "message"),
    [
        (
            optax.adam(0.1),
            trajectory.average,
            "no record in the optimiser state: train with an optimiser in a wrapper, `ema`",
        ),
        (
            trajectory.swa(DRIFT),
            trajectory.snapshot_ensemble,
            r"`snapshots` of .* as in `methods.trajectory.snapshots\(",
        ),
        (trajectory.ema(DRIFT), lambda run: trajectory.sample(run, 2, key=KEY), "in a wrapper, `swag`"),
        (trajectory.ema(trajectory.swa(DRIFT)), trajectory.average, "found 2 records"),
        (
            optax.chain(trajectory.swa(DRIFT), optax.scale(0.5)),
            trajectory.average,
            "not the last part of `optax.chain`",
        ),
        (
            optax.chain(trajectory.snapshots(DRIFT, 2, every=100), optax.scale(0.5)),
            trajectory.snapshot_ensemble,
            r"Wrap the whole chain: `methods.trajectory.snapshots\(optax.chain",
        ),
        (
            optax.masked(trajectory.swa(DRIFT), lambda params: jax.tree.map(lambda x: x.ndim == 0, params)),
            trajectory.average,
            "only a part of the trained weights",
        ),
        (
            trajectory.snapshots(DRIFT, 2, every=100),
            trajectory.snapshot_ensemble,
            "no member has reached its first snapshot",
        ),
    ],
)
def test_invalid_records(ensemble, optimiser, collect, message):
    state = ee.train.init(ensemble, optimiser, key=KEY)
    with pytest.raises(ValueError, match=message):
        collect(state)


@pytest.mark.usefixtures("unhooked")
def test_invalid_sources(ensemble):
    with pytest.raises(TypeError, match="needs the run that `fit` returned, or a training state; got an Ensemble"):
        trajectory.average(ensemble)
    state = ee.train.init(ensemble, trajectory.swag(DRIFT), key=KEY)
    with pytest.raises(ValueError, match="`num_samples` of at least 1"):
        trajectory.sample(state, 0, key=KEY)
    with pytest.raises(ValueError, match="`scale`"):
        trajectory.sample(state, 2, scale=-1, key=KEY)
    with pytest.raises(TypeError, match="key"):
        trajectory.sample(state, 2, key=0)
    kept = ee.train.init(ensemble, trajectory.snapshots(DRIFT, 2, every=1), key=KEY)
    with pytest.raises(TypeError, match="cannot be called inside `jax.jit`"):
        eqx.filter_jit(trajectory.snapshot_ensemble)(kept)
