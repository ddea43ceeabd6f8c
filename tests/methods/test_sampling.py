"""Samplers against the exact stationary law of their discretised chains; diagnostics against ArviZ."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import sampling, trajectory
from eqx_ensemble.methods.sampling import diagnostics

from ..factories import assert_close, assert_same

KEY = jax.random.key(0)
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
MEMBERS, ROWS = 3, 50
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


def test_sghmc_without_momentum_is_sgld_and_without_noise_sgd():
    rate = optax.linear_schedule(10.0, 1.0, 5)

    def walk(sampler):
        def one(carry, _):
            x, state = carry
            moves, state = sampler.update(H / ROWS * x, state, x)
            return (x + moves, state), x + moves

        x = jnp.ones(20)
        return jax.lax.scan(one, (x, sampler.init(x)), None, length=8)[1]

    np.testing.assert_allclose(walk(sgld(rate)), walk(sghmc(rate, friction=1)), atol=1e-5)
    cold = sghmc(2.0, friction=0.3, temperature=0)
    np.testing.assert_allclose(walk(cold), walk(optax.sgd(2.0, momentum=0.7)), rtol=1e-5)


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


# Members


def point(key):
    return {"a": jax.random.normal(key, (2,)), "b": jnp.zeros(()), "number": jax.random.randint(key, (), 0, 100)}


def quadratic(model, batch, key):
    """Posterior variances of 1 and 4, of `ROWS` rows. Batches have gradients of their own."""
    return (jnp.sum(model["a"] ** 2) / 2 + model["b"] ** 2 / 8) / ROWS + jnp.mean(batch) * model["b"]


DATA = jax.random.normal(jax.random.key(2), (10, 1)) / 100
HYPER = {"rate": jnp.array([0.1, 0.5, 1.0]), "rows": jnp.array([50, 100, 200]), "heat": jnp.array([1.0, 0.0, 0.5])}


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(point, MEMBERS, key=KEY)


def fitted(ensemble, optimiser, loss=quadratic, **options):
    options = {"key": KEY, "progress": False, "steps": 12, "batch_size": 5} | options
    return ee.fit(ensemble, loss, optimiser, DATA, **options)


@pytest.mark.parametrize("sampler", [sgld, slow(sghmc)], ids=["sgld", "sghmc"])
def test_members_alone(ensemble, sampler):
    """A member draws the same noise in any ensemble; its hyper-parameters are those of one member."""
    keys, some = ee.member_keys(KEY, MEMBERS, purpose="fit"), np.array([2, 0])
    of_hyper = lambda h: sampler(h["rate"], h["rows"], temperature=h["heat"])
    together = fitted(ensemble, of_hyper, hyper=HYPER)
    own = jax.tree.map(lambda x: x[some], HYPER)
    alone = fitted(ensemble[some], of_hyper, hyper=own, key=keys[some])
    assert_same(alone.train_state.opt_state, ee.tree.take(together.train_state.opt_state, some))
    one = {name: values[2].item() for name, values in HYPER.items()}
    assert_close(fitted(ensemble[[2]], of_hyper(one), key=keys[2:]).ensemble, together.ensemble[[2]], 1e-5)


@pytest.mark.slow
def test_resumed_and_continued(ensemble, tmp_path):
    optimiser = trajectory.snapshots(sghmc(0.5), 4, every=3)
    whole, half = fitted(ensemble, optimiser), fitted(ensemble, optimiser, steps=7, checkpoint=tmp_path / "run")
    assert_same(fitted(half, optimiser, steps=5).train_state.opt_state, whole.train_state.opt_state)
    resumed = fitted(ensemble, optimiser, checkpoint=tmp_path / "run")
    assert_same(resumed.train_state.opt_state, whole.train_state.opt_state)


# Diagnostics


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
    with pytest.raises(ValueError, match="a chain for each of 9 samples, all as long; got 0: 5, 1: 4"):
        diagnostics(np.ones(9), np.arange(9) // 5)
    monkeypatch.setitem(sys.modules, "arviz_stats.base.array", None)
    with pytest.raises(ImportError, match=r"`methods.sampling.diagnostics` needs ArviZ"):
        diagnostics(np.ones(8), np.arange(8) // 4)
