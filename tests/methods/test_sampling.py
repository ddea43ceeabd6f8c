"""Samplers against the exact stationary law of their discretised chains, and as members of an ensemble."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import priors, sampling, trajectory

from ..factories import assert_close, assert_same

KEY = jax.random.key(0)
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
MEMBERS, ROWS = 3, 50
SAMPLERS = {
    "sgld": lambda rate, rows=ROWS, **options: sampling.sgld(rate, rows, **{"key": KEY} | options),
    "sghmc": lambda rate, rows=ROWS, **options: sampling.sghmc(rate, rows, **{"key": KEY} | options),
    "psgld": lambda rate, rows=ROWS, **options: sampling.psgld(rate, rows, **{"key": KEY} | options),
}
BY_NAME = pytest.mark.parametrize("sampler", ["sgld", slow("sghmc"), slow("psgld")])


# The stationary law of h x^2 / 2 on the scale of the log-posterior, of which the loss is 1 / N

CHAINS, STEPS, BURN_IN = 10_000, 250, 100


@jax.jit(static_argnums=0)
def _simulate(optimiser, curvature, noise):
    """The mean square of independent chains, over chains and steps. Gradients have noise."""
    x = jnp.zeros(CHAINS)

    def one(carry, i):
        x, state = carry
        extra = noise * jax.random.normal(jax.random.fold_in(jax.random.key(5), i), x.shape)
        moves, state = optimiser.update(curvature * x + extra, state, x)
        x = optax.apply_updates(x, moves)
        return (x, state), jnp.where(i >= BURN_IN, jnp.mean(x**2), 0.0)

    (x, _), squares = jax.lax.scan(one, (x, optimiser.init(x)), jnp.arange(STEPS))
    return jnp.sum(squares) / (STEPS - BURN_IN), x


def mean_square(optimiser, h=3.0, s=0.0):
    return float(_simulate(optimiser, h / ROWS, s / ROWS)[0])


def is_variance(found, expected, steps_between):
    """Within 5 standard errors of a Gaussian's variance: false alarms are below 1e-6 for each.

    Samples this many steps apart count as independent, which is on the safe side of the correlations that arise here.
    """
    independent = CHAINS * (STEPS - BURN_IN) / steps_between
    return abs(found / expected - 1) < 5 * np.sqrt(2 / independent)


T, H, E = 0.7, 3.0, 0.2  # temperature, curvature, and step on the log-posterior: the learning rate is E * ROWS
SGLD = SAMPLERS["sgld"](E * ROWS, temperature=T)


def test_stationary_variance_of_sgld():
    found = mean_square(SGLD)
    assert is_variance(found, T / (H * (1 - E * H / 2)), 4)
    for wrong in (
        T / H,  # of the posterior, without the step's own error
        T / (H * (1 - E * H / 4)),  # Welling and Teh's half of the step, in the drift and the noise
        T / (2 * H * (1 - E * H / 2)),  # half of the step in the noise alone
        ROWS * T / (H * (1 - E * H / 2)),  # noise without N
    ):
        assert not is_variance(found, wrong, 4)


def test_stationary_variance_with_noise_in_gradients():
    found = mean_square(SGLD, s=1.5)
    assert is_variance(found, (T + E * 1.5**2 / 2) / (H * (1 - E * H / 2)), 4)
    assert not is_variance(found, T / (H * (1 - E * H / 2)), 4)


@pytest.mark.parametrize(("a", "s"), [(0.3, 1.5), slow(0.3, 0.0), slow(0.1, 0.0), slow(0.7, 1.5)])
def test_stationary_variance_of_sghmc(a, s):
    found = mean_square(SAMPLERS["sghmc"](E * ROWS, friction=a, temperature=T), s=s)
    hot = T + E * s**2 / (2 * a)
    assert is_variance(found, hot / (H * (1 - E * H / (2 * (2 - a)))), 40)
    assert not is_variance(found, hot / (H * (1 - E * H / 2)), 40)
    assert s == 0 or not is_variance(found, (T + E * s**2 / 2) / (H * (1 - E * H / (2 * (2 - a)))), 40)


def test_sghmc_without_momentum_is_sgld():
    rate = optax.linear_schedule(10.0, 1.0, 5)

    def walk(sampler):
        def one(carry, _):
            x, state = carry
            moves, state = sampler.update(H / ROWS * x, state, x)
            return (x + moves, state), x + moves

        x = jnp.ones(20)
        return jax.lax.scan(one, (x, sampler.init(x)), None, length=8)[1]

    first, second = SAMPLERS["sgld"](rate), SAMPLERS["sghmc"](rate, friction=1)
    np.testing.assert_allclose(walk(first), walk(second), atol=1e-5)


def test_a_constant_preconditioner_is_exact():
    """With the gradients 2 while it is adapted, each weight has the step E / (2 + eps)."""
    gain = 1 / 2.5
    sampler = sampling.psgld(E * ROWS / gain, ROWS, decay=0.0, eps=0.5, adapt_steps=1, temperature=T, key=KEY)
    first = lambda params: sampler.update(jnp.full(CHAINS, 2.0), sampler.init(params))[1]
    frozen = optax.GradientTransformation(first, sampler.update)
    found = mean_square(frozen)
    assert is_variance(found, T / (H * (1 - E * H / 2)), 4)
    assert not is_variance(found, gain * T / (H * (1 - E * H / 2)), 4)  # noise with G instead of its root


@pytest.mark.slow
def test_a_moving_preconditioner_is_not():
    """Without the term that the authors leave out, the density of a chain slower than the window has a factor 1 / G.

    That is `|x| + eps` for a window of one step, and the variance close to E |x|^3 / E |x| = 2 instead of 1.
    """
    eps = 0.05
    sampler = sampling.psgld(0.02, ROWS, decay=0.0, eps=eps / ROWS, key=KEY)

    def one(carry, _):
        x, state = carry
        moves, state = sampler.update(x / ROWS, state, x)
        return (optax.apply_updates(x, moves), state), None

    x = jax.random.normal(jax.random.key(1), (CHAINS,))
    (x, _), _ = jax.lax.scan(one, (x, sampler.init(x)), None, length=1000)
    mean = np.sqrt(2 / np.pi)
    np.testing.assert_allclose(jnp.mean(x**2), (2 * mean + eps) / (mean + eps), rtol=0.1)  # steps of finite size


def test_mean_squares_of_gradients():
    """Those of RMSProp, up to the step from which they are constant."""
    sampler, ours = sampling.psgld(0.1, ROWS, temperature=0, eps=1e-3, adapt_steps=3, key=KEY), []
    rms = optax.scale_by_rms(0.99, eps=1e-3, eps_in_sqrt=False)
    weights, theirs = jnp.ones(4), []
    state, other = sampler.init(weights), rms.init(weights)
    for i in range(5):
        grads = jax.random.normal(jax.random.key(i), (4,))
        moves, state = sampler.update(grads, state)
        ours.append(moves)
        if i < 3:
            moves, other = rms.update(grads, other)
            theirs.append(-0.1 * moves)
    np.testing.assert_allclose(ours[:3], theirs, rtol=1e-5)
    np.testing.assert_allclose(state.squares, other.nu, rtol=1e-5)


def test_the_noise_follows_the_learning_rate_of_its_step():
    """Of a schedule, and of the temperature's own."""
    rate, heat = optax.linear_schedule(1.0, 0.25, 3), lambda count: jnp.where(count == 2, 0.0, 4.0)
    sampler = sampling.sgld(rate, 2, temperature=heat, key=KEY)
    zero = jnp.zeros(CHAINS)
    state, stds = sampler.init(zero), []
    for _ in range(4):
        moves, state = sampler.update(zero, state)
        stds.append(np.std(moves))
    expected = np.sqrt(2 * np.array([1.0, 0.75, 0.5, 0.25]) * np.array([4, 4, 0, 4]) / 2)
    np.testing.assert_allclose(stds, expected, rtol=5 / np.sqrt(2 * CHAINS))


@BY_NAME
def test_parts_of_a_transform_have_noise_of_their_own(sampler):
    """Both parts of an `optax.multi_transform` have one key, and a first leaf of one shape."""
    weights = {"a": jnp.zeros(9), "b": jnp.zeros(9)}
    part = SAMPLERS[sampler](1.0)
    both = optax.multi_transform({"a": part, "b": part}, {"a": "a", "b": "b"})
    moves, _ = both.update(weights, both.init(weights), weights)
    assert (moves["a"] != moves["b"]).all()


def test_chains_that_share_noise_contract():
    """What happens where `init` is mapped without keys of members: two chains with one noise approach each other."""
    x = jnp.array([[1.0], [3.0]])
    state = jax.vmap(SGLD.init)(x)
    for _ in range(5):
        moves, state = jax.vmap(SGLD.update)(H / ROWS * x, state, x)
        x = x + moves
    np.testing.assert_allclose(x[1] - x[0], 2 * (1 - E * H) ** 5, rtol=1e-3)


# Members


class Point(eqx.Module):
    a: jax.Array
    b: jax.Array
    number: jax.Array

    def __init__(self, key):
        self.a, self.b = jax.random.normal(key, (2,)), jnp.zeros(())
        self.number = jax.random.randint(key, (), 0, 100)


def quadratic(model, batch, key):
    """Posterior variances of 1 and 4, of `ROWS` rows. Batches have gradients of their own."""
    return (jnp.sum(model.a**2) / 2 + model.b**2 / 8) / ROWS + jnp.mean(batch) * model.b


DATA = jax.random.normal(jax.random.key(2), (10, 1)) / 100


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(Point, MEMBERS, key=KEY)


def fitted(ensemble, optimiser, loss=quadratic, **options):
    options = {"key": KEY, "progress": False, "steps": 12, "batch_size": 5} | options
    return ee.fit(ensemble, loss, optimiser, DATA, **options)


HYPER = {"rate": jnp.array([0.1, 0.5, 1.0]), "rows": jnp.array([50, 100, 200]), "heat": jnp.array([1.0, 0.0, 0.5])}


def of_hyper(sampler):
    return lambda h: SAMPLERS[sampler](h["rate"], h["rows"], temperature=h["heat"])


def flat(ensemble):
    return np.concatenate([np.asarray(ensemble.stacked.a), np.asarray(ensemble.stacked.b)[:, None]], axis=1)


@BY_NAME
@pytest.mark.parametrize("plan", [ee.plan.Vmap(), slow(ee.plan.Blocks(2)), slow(ee.plan.Blocks(1))])
def test_members_alone(ensemble, sampler, plan):
    """A member draws the same noise in any ensemble, in epochs whose last batches are filled up."""
    options, keys = {"plan": plan, "batch_size": 4}, ee.member_keys(KEY, MEMBERS, purpose="fit")

    def part(some):
        hyper = jax.tree.map(lambda x: x[jnp.array(some)], HYPER)
        return fitted(ensemble[some], of_hyper(sampler), hyper=hyper, key=keys[np.array(some)], **options)

    together, some = part([0, 1, 2]), [2, 0]
    alone = part(some)
    same = assert_close if plan == ee.plan.Blocks(2) else lambda got, expected, _: assert_same(got, expected)
    same(alone.ensemble, together.ensemble[some], 1e-5)
    same(alone.train_state.opt_state, ee.tree.take(together.train_state.opt_state, some), 1e-5)
    if sampler != "sgld" or plan != ee.plan.Vmap():
        assert_close(part([1]).ensemble, together.ensemble[[1]], 1e-5)


def test_members_have_noise_of_their_own():
    """No two members, leaves or steps share draws: correlations are those of independent numbers."""

    class Wide(eqx.Module):
        a: jax.Array
        b: jax.Array

        def __init__(self, key):
            self.a = self.b = jnp.zeros(2000)

    still = lambda model, batch, key: 0 * jnp.sum(model.a + model.b)
    optimiser = trajectory.snapshots(SAMPLERS["sgld"](ROWS / 2), 2, every=1)  # noise of variance 1
    run = fitted(ee.build(Wide, 2, key=KEY), optimiser, still, steps=2, batch_size=10)
    kept = run.train_state.opt_state.record.weights
    moves = [np.diff(np.asarray(x), axis=1, prepend=0).reshape(-1, 2000) for x in (kept.a, kept.b)]
    found = np.corrcoef(np.concatenate(moves))
    assert found.shape == (8, 8)
    assert np.abs(found - np.eye(8)).max() < 5.5 / np.sqrt(2000)
    np.testing.assert_allclose(np.var(moves), 1, rtol=5.5 * np.sqrt(2 / 16_000))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_hyper_parameters_are_those_of_one_member(ensemble, sampler):
    run, keys = fitted(ensemble, of_hyper(sampler), hyper=HYPER), ee.member_keys(KEY, MEMBERS, purpose="fit")
    own = {name: values[2].item() for name, values in HYPER.items()}
    assert_close(fitted(ensemble[[2]], of_hyper(sampler)(own), key=keys[2:]).ensemble, run.ensemble[[2]], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_resumed_and_continued(ensemble, sampler, tmp_path):
    optimiser = trajectory.snapshots(SAMPLERS[sampler](0.5), 4, every=3)
    whole = fitted(ensemble, optimiser)
    half = fitted(ensemble, optimiser, steps=7)
    assert_same(fitted(half, optimiser, steps=5).train_state.opt_state, whole.train_state.opt_state)
    fitted(ensemble, optimiser, steps=7, checkpoint=tmp_path / "run")
    resumed = fitted(ensemble, optimiser, checkpoint=tmp_path / "run")
    assert_same(resumed.train_state.opt_state, whole.train_state.opt_state)
    assert_same(resumed.ensemble, whole.ensemble)
    ee.save(tmp_path / "state", whole.train_state)
    loaded = ee.load(tmp_path / "state", ee.train.init(ensemble, optimiser, key=KEY))
    assert_same(trajectory.snapshot_ensemble(loaded), trajectory.snapshot_ensemble(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "sizes"),
    [("sgld", {"members": 3}), ("sghmc", {"members": 2}), ("psgld", {"members": 2, "data": 2})],
)
def test_on_a_mesh(sampler, sizes):
    ensemble = ee.build(Point, sizes["members"], key=KEY)
    optimiser = trajectory.snapshots(SAMPLERS[sampler](0.5), 2, every=3)
    plain = fitted(ensemble, optimiser, batch_size=10)
    sharded = fitted(ensemble, optimiser, batch_size=10, mesh=ee.make_mesh(**sizes))
    assert_close(sharded.ensemble, plain.ensemble, 1e-5)
    assert_close(trajectory.snapshot_ensemble(sharded), trajectory.snapshot_ensemble(plain), 1e-5)


@pytest.mark.slow
def test_own_loops_and_other_transforms(ensemble):
    """In `train.make_step`, in a chain, under a mask and with accumulated gradients."""
    sgld = SAMPLERS["sgld"](0.5)
    plain = fitted(ensemble, sgld, steps=4)
    chained = fitted(ensemble, optax.chain(optax.clip(1e6), sgld), steps=4)
    assert_same(chained.ensemble, plain.ensemble)
    only_b = optax.multi_transform({"b": sgld, "a": optax.set_to_zero()}, lambda p: eqx.tree_at(
        lambda p: (p.a, p.b), p, ("a", "b")))  # fmt: skip
    masked = fitted(ensemble, only_b, steps=4).ensemble
    assert_same(masked.stacked.a, ensemble.stacked.a)
    assert (masked.stacked.b != ensemble.stacked.b).all()
    accumulated = fitted(ensemble, optax.MultiSteps(sgld, 2).gradient_transformation(), steps=4)
    assert accumulated.train_state.opt_state.inner_opt_state.count.tolist() == [2] * 3
    state, step = ee.train.init(ensemble, sgld, key=KEY), ee.train.make_step(quadratic, sgld)
    for _ in range(3):
        state, _ = step(state, DATA)
    assert_close(state.ensemble, fitted(ensemble, sgld, steps=3, batch_size=10).ensemble, 1e-5)


@pytest.mark.slow
def test_members_that_diverge(ensemble):
    """The others never notice; a clone has noise of its own."""

    def loss(model, batch, key, hyper):
        return quadratic(model, batch, key) + jnp.where(model.b > hyper, jnp.nan, 0)

    limits = jnp.array([jnp.inf, -10.0, jnp.inf])
    make = lambda hyper: trajectory.snapshots(SAMPLERS["sgld"](5.0), 3, every=4)
    with pytest.warns(UserWarning, match="diverged"):
        run = fitted(ensemble, make, loss, hyper=limits)
    plain = fitted(ensemble, make, loss, hyper=jnp.full(3, jnp.inf))
    assert_same(run.ensemble[[0, 2]], plain.ensemble[[0, 2]])
    with pytest.warns(UserWarning, match="members with no snapshot: 1"):
        assert len(trajectory.snapshot_ensemble(run)) == 6
    assert trajectory.snapshot_owners(run).tolist() == [0, 0, 0, 2, 2, 2]
    how = ee.train.revive(perturb=lambda hyper, key: jnp.full_like(hyper, jnp.inf))
    revived = fitted(ensemble, make, loss, hyper=limits, callbacks=how).ensemble
    assert len(np.unique(flat(revived), axis=0)) == 3


@pytest.mark.slow
def test_best_weights_are_no_sample(ensemble):
    """Snapshots are those of the chain, whatever a validation score prefers."""
    optimiser = trajectory.snapshots(SAMPLERS["sgld"](5.0), 3, every=4)
    validated = fitted(ensemble, optimiser, validation=DATA, batch_size=10)
    plain = fitted(ensemble, optimiser, batch_size=10)
    assert not np.allclose(flat(validated.ensemble), flat(plain.ensemble))
    assert_same(trajectory.snapshot_ensemble(validated), trajectory.snapshot_ensemble(plain))
    assert_same(validated.train_state.ensemble, plain.ensemble)


@pytest.mark.slow
def test_double_precision():
    with jax.enable_x64(True):
        ensemble = ee.build(lambda key: eqx.tree_at(lambda m: m.b, Point(key), jnp.float32(0)), 2, key=KEY)
        loss = lambda model, batch, key: jnp.sum(model.a**2) + model.b.astype(jnp.float64) ** 2
        for make in SAMPLERS.values():
            found = fitted(ensemble, make(optax.constant_schedule(0.5)), loss).ensemble.stacked
            assert (found.a.dtype, found.b.dtype) == (jnp.float64, jnp.float32)


# A posterior that is known


def test_posterior_of_a_linear_model():
    """32 chains on all rows; the law of the discretised chain differs from the posterior by less than the error."""
    rows, noise, prior = 40, 0.5, 0.2
    x = jax.random.normal(jax.random.key(3), (rows, 2)) @ jnp.array([[1.0, 0.5], [0.0, 1.0]])
    y = x @ jnp.array([1.0, -1.0]) + noise * jax.random.normal(jax.random.key(4), (rows,))

    def loss(model, batch, key):
        x, y = batch
        nll = jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2) / (2 * noise**2)
        return nll + priors.gaussian_penalty(model, prior, num_rows=rows)

    design, targets = np.asarray(x, float), np.asarray(y, float)
    precision = design.T @ design / noise**2 + np.eye(2) / prior**2
    covariance = np.linalg.inv(precision)
    mean = covariance @ design.T @ targets / noise**2
    e = 0.2 / np.linalg.eigvalsh(precision)[-1]  # on the log-posterior
    chain = np.linalg.inv(precision @ (np.eye(2) - e / 2 * precision))
    slow = 1 - e * np.linalg.eigvalsh(precision)[0]

    members, size, every = 32, 40, 10
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, use_bias=False, key=key), members, key=KEY)
    optimiser = trajectory.snapshots(sampling.sgld(e * rows, rows, key=KEY), size, every=every, start=200)
    run = ee.fit(
        ensemble, loss, optimiser, (x, y), batch_size=rows, steps=200 + (size - 1) * every, key=KEY, progress=False
    )
    samples = trajectory.snapshot_ensemble(run)
    assert len(samples) == members * size
    assert (np.bincount(trajectory.snapshot_owners(run)) == size).all()
    draws = np.asarray(samples.stacked.weight)[:, 0]
    independent = len(draws) * (1 - slow**every) / (1 + slow**every)  # autoregressive chains, at their slowest
    root = np.sqrt(np.diag(chain))
    assert (np.abs(draws.mean(0) - mean) < 5.5 * root / np.sqrt(independent)).all()
    error = 5.5 * np.sqrt((chain**2 + np.outer(root, root) ** 2) / independent)
    assert (np.abs(np.cov(draws.T) - chain) < error).all()
    assert (np.abs(chain - covariance) < error).all()
    # the usual faults: a prior that counts N times too much, and noise of half the variance
    wrong = np.linalg.inv(precision + (rows - 1) * np.eye(2) / prior**2)
    assert (np.abs(np.cov(draws.T) - wrong) > error).any()
    assert (np.abs(np.cov(draws.T) - chain / 2) > error).any()


# Cycles


def test_cycles_of_the_authors():
    """Cycles of 50 epochs from 0.5: noise in epochs 46 to 50, samples after 48, 49 and 50."""
    batches, epochs, cycles = 3, 50, 4
    period = batches * epochs
    schedule, heat = trajectory.snapshot_schedule(0.5, period), sampling.cyclical_temperature(period, temperature=0.1)
    step = np.arange(cycles * period)
    rcounter = step  # the names of the authors' code
    expected = 0.5 * (np.cos(np.pi * (rcounter % period) / period) + 1) * 0.5
    np.testing.assert_allclose(jax.vmap(schedule)(step), expected, rtol=1e-4, atol=1e-6)
    with_noise = (step // batches % epochs) + 1 > 45
    np.testing.assert_allclose(jax.vmap(heat)(step), np.where(with_noise, 0.1, 0), rtol=1e-6)

    counter = trajectory.snapshots(optax.sgd(1.0), 12, start=48 * batches, every=batches, period=period)

    def one(carry, _):
        x, state = carry
        moves, state = counter.update(-jnp.ones(()), state, x)
        return (x + moves, state), None

    x = jnp.zeros(())
    (_, state), _ = jax.lax.scan(one, (x, counter.init(x)), None, length=len(step))
    after = [cycle * epochs + epoch for cycle in range(cycles) for epoch in (48, 49, 50)]
    np.testing.assert_array_equal(state.record.weights, np.array(after) * batches)


@pytest.mark.slow
def test_a_cyclical_chain_visits_several_modes():
    """Two wells at -1 and 1, between which a chain with small steps does not move."""

    class Point(eqx.Module):
        x: jax.Array

        def __init__(self, key):
            self.x = jnp.ones(())

    def loss(model, batch, key):
        wells = -jnp.logaddexp(-2 * (model.x - 1) ** 2, -2 * (model.x + 1) ** 2) / 4
        return wells + jax.random.normal(key) * model.x

    period, cycles, members = 100, 5, 16
    ensemble = ee.build(Point, members, key=KEY)

    def share_on_both_sides(rate, heat):
        kept = trajectory.snapshots(sampling.sgld(rate, 1e4, temperature=heat, key=KEY), cycles, every=period)
        run = fitted(ensemble, kept, loss, steps=period * cycles, batch_size=10)
        found = np.asarray(trajectory.snapshot_ensemble(run).stacked.x).reshape(members, cycles)
        return np.mean(np.ptp(np.sign(found), axis=1) > 0)

    assert share_on_both_sides(trajectory.snapshot_schedule(0.5, period), sampling.cyclical_temperature(period)) > 0.5
    assert share_on_both_sides(0.001, 1.0) < 0.1


# Errors


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sampling.sgld(-0.1, 5, key=KEY), ValueError, "`learning_rate` to be at least 0, got -0.1"),
        (lambda: sampling.sgld(np.ones(3), 5, key=KEY), TypeError, "`learning_rate` to be a number"),
        (lambda: sampling.sgld(0.1, 0, key=KEY), ValueError, "`num_rows` to be above 0, got 0.0"),
        (lambda: sampling.sgld(0.1, np.nan, key=KEY), ValueError, "`num_rows` to be finite"),
        (lambda: sampling.sgld(0.1, lambda count: 5, key=KEY), TypeError, "`num_rows` to be a number"),
        (lambda: sampling.sgld(0.1, 5, temperature=-1, key=KEY), ValueError, "`temperature` to be at least 0"),
        (lambda: sampling.sgld(0.1, 5, key=0), TypeError, "methods.sampling.sgld.*key"),
        (lambda: sampling.sgld(0.1, 5, key=jax.random.split(KEY, 3)), TypeError, "key"),
        (lambda: sampling.sghmc(0.1, 5, friction=0, key=KEY), ValueError, "above 0 and at most 1, got 0"),
        (lambda: sampling.sghmc(0.1, 5, friction=1.5, key=KEY), ValueError, "`friction`"),
        (lambda: sampling.psgld(0.1, 5, decay=1, key=KEY), ValueError, "at least 0 and below 1, got 1"),
        (lambda: sampling.psgld(0.1, 5, eps=0, key=KEY), ValueError, "`eps` to be above 0"),
        (lambda: sampling.psgld(0.1, 5, adapt_steps=1.5, key=KEY), TypeError, "integer `adapt_steps`"),
        (lambda: sampling.cyclical_temperature(0), ValueError, "`period` of at least 1"),
        (lambda: sampling.cyclical_temperature(10, explore=1), ValueError, "`explore` below 1"),
        (lambda: sampling.cyclical_temperature(10, temperature=-1), ValueError, "`temperature`"),
        (lambda: trajectory.snapshots(optax.sgd(1), 2, every=20, period=10), ValueError, "takes no snapshot"),
        (lambda: trajectory.snapshots(optax.sgd(1), 2, every=2, period=0), ValueError, "`period` of at least 1"),
    ],
)
def test_invalid_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("dtype", "why"), [(jnp.bfloat16, "rounded away"), (jnp.complex64, "complex Gaussian")])
def test_weights_of_other_dtypes(sampler, dtype, why):
    with pytest.raises(TypeError, match=rf"`methods.sampling.{sampler}` needs weights in .* at `\['w'\]`: .*{why}"):
        SAMPLERS[sampler](0.1).init({"w": jnp.ones(2, dtype)})


@pytest.mark.usefixtures("unhooked")
def test_numbers_of_several_members(ensemble):
    with pytest.raises(TypeError, match="one number `learning_rate` per member"):
        fitted(ensemble, lambda hyper: SAMPLERS["sgld"](hyper), hyper=jnp.ones((3, 2)))
