"""Laplace approximations of many members: rows, files, runs, and what is refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import laplace

from ..factories import assert_close, relaxed

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (11, 3))
LABELS = jnp.arange(11) % 3
LAST = lambda model: model.layers[-1]
OPTIONS = {"likelihood": "classification", "where": LAST, "batch_size": 4}
make = lambda key: eqx.nn.MLP(3, 3, 4, 1, key=key)
ENSEMBLE = ee.build(make, 3, key=KEY)


def fit(ensemble=ENSEMBLE, data=(X, LABELS), **options):
    return laplace.fit(ensemble, data, **OPTIONS | options)


def same(first, second, tolerance=1e-4):
    """Posteriors are compared by what they predict: eigenvectors have no signs."""
    assert_close(first.outputs(X), second.outputs(X), tolerance)
    assert_close(first.log_marginal_likelihood(), second.log_marginal_likelihood(), tolerance)


@pytest.fixture(scope="module")
def posterior():
    return fit()


class TestRows:
    def test_batches(self, posterior):
        """Of any size: the last one is filled up with rows that do not count."""
        same(posterior, fit(batch_size=11))

    def test_mask(self):
        """Rows that do not count may hold anything."""
        mask = jnp.arange(11) < 8
        x = jnp.where(mask[:, None], X, jnp.nan)
        same(fit(data=(x, jnp.where(mask, LABELS, -1)), row_weights=mask), fit(data=(X[:8], LABELS[:8])))

    @pytest.mark.slow
    def test_weights(self):
        """A bootstrap: rows that a member has seen twice count twice, of each member its own."""
        rows = ee.resample.bootstrap(11, 3, key=KEY)
        own = fit(row_weights=ee.Each(ee.resample.counts(rows, 11)))
        same(own, fit(data=(ee.Each(X[rows]), ee.Each(LABELS[rows]))))
        assert np.abs(own.log_marginal_likelihood() - fit().log_marginal_likelihood()).min() > 0.01
        halves = fit(row_weights=jnp.full(11, 0.5), prior_precision=0.5)
        assert_close(halves.outputs(X).covariance, 2 * fit().outputs(X).covariance, 1e-4)


class TestMembers:
    def test_alone(self, posterior):
        """A member's posterior, its draws included, does not depend on the others."""
        one = fit(ENSEMBLE[[1]])
        same(one, posterior[[1]])
        for index in (1, np.int64(1), jnp.array(1), slice(1, 2)):
            same(one, posterior[index])
        draws = posterior.sample(3, key=KEY)(X[0])
        np.testing.assert_allclose(posterior.sample(2, key=KEY)(X[0])[2:4], draws[3:5], rtol=1e-5)
        keys = ee.member_keys(KEY, 3, purpose="laplace")
        np.testing.assert_allclose(posterior[1:].sample(3, key=keys[1:])(X[0]), draws[3:], rtol=1e-5)

    def test_replaced(self, posterior):
        """As if it had been fitted so, and all else as before."""
        priors = jnp.array([0.1, 1.0, 10.0])
        replaced = laplace.with_prior(posterior, prior_precision=priors)
        assert_close(replaced, fit(prior_precision=priors), 1e-5)
        same(replaced[[2]], fit(ENSEMBLE[[2]], prior_precision=10.0))
        assert_close(replaced.log_marginal_likelihood(), posterior.log_marginal_likelihood(priors), 1e-5)
        assert np.abs(replaced.predict(X)[2] - posterior.predict(X)[2]).max() > 0.01
        regression = {"likelihood": "regression", "data": (X, X)}
        assert_close(laplace.with_prior(fit(**regression), noise=0.5), fit(noise=0.5, **regression), 1e-6)

    @pytest.mark.slow
    def test_links(self, posterior):
        """Draws are near the probit link; the members' mixture has equal weights."""
        found = jnp.exp(posterior.predict(X, link="mc", num_samples=2_000, key=KEY))
        assert np.abs(found - jnp.exp(posterior.predict(X))).max() < 0.1
        mixture = posterior.predict(X, combine=ee.combine.mixture)
        np.testing.assert_allclose(jnp.exp(mixture), jnp.exp(posterior.predict(X)).mean(0), rtol=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize("structure", ["full", "diag"])
    def test_files(self, structure, tmp_path):
        posterior = fit(structure=structure)
        ee.save(tmp_path / "posterior", posterior)
        like = fit(ee.build(make, 3, key=jax.random.key(1)), (X[:1], LABELS[:1]), structure=structure)
        assert_close(ee.load(tmp_path / "posterior", like), posterior, 0)
        some = ee.load(tmp_path / "posterior", like, members=[2])
        assert_close(some, posterior[[2]], 0)

    @pytest.mark.slow
    def test_inside_jit(self, posterior):
        found = eqx.filter_jit(lambda p, x: (p.predict(x), p.optimise_prior().prior_precision))(posterior, X)
        assert_close(found, (posterior.predict(X), posterior.optimise_prior().prior_precision), 1e-4)
        shapes = eqx.filter_eval_shape(lambda e, x, y: fit(e, (x, y)), ENSEMBLE, X, LABELS)
        assert jax.tree.structure(shapes) == jax.tree.structure(posterior)


def test_a_run():
    """Its best weights; members that diverged are left out, with their hyper-parameters and rows."""

    def loss(model, batch, key, hyper):
        x, y = batch
        logs = jax.nn.log_softmax(jax.vmap(model)(x))
        return hyper["scale"] * -jnp.mean(logs[jnp.arange(len(y)), y])

    hyper = {"scale": jnp.array([1.0, jnp.inf, 1.0])}
    sgd = lambda hyper: optax.sgd(0.1)
    with pytest.warns(UserWarning, match="diverged"):
        run = ee.fit(ENSEMBLE, loss, sgd, (X, LABELS), hyper=hyper, steps=2, key=KEY)
    priors = jnp.array([1.0, 2.0, 3.0])
    weights = jnp.ones((3, 11)).at[2, 0].set(5)
    with pytest.warns(UserWarning, match="Members 1 diverged and are left out"):
        posterior = fit(run, prior_precision=priors, row_weights=ee.Each(weights))
    assert posterior.prior_precision.tolist() == [1, 3]
    same(posterior[[1]], fit(run.ensemble[[2]], prior_precision=3.0, row_weights=weights[2]))
    with pytest.raises(ValueError, match=r"needs finite outputs and derivatives.\n  members 1 have none"):
        fit(eqx.tree_at(lambda e: e.stacked.layers[0].bias, ENSEMBLE, replace_fn=lambda x: x.at[1].set(jnp.nan)))


@pytest.mark.slow
def test_single_precision():
    """Directions that the data say nothing about keep the prior's variance, whatever the largest eigenvalue."""
    x = 100 * jax.random.normal(KEY, (1_000, 2))
    x = jnp.concatenate([x, x.sum(1, keepdims=True)], axis=1)
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, use_bias=False, key=key), 1, key=KEY)
    data = x, jnp.zeros(1_000)
    posterior = laplace.fit(ensemble, data, likelihood="regression", where=lambda m: m, noise=0.1)
    found = posterior.outputs(jnp.array([[1.0, 1.0, -1.0]])).covariance.squeeze()
    assert found == pytest.approx(3, rel=2e-3)  # the squared norm of the row, over a prior precision of 1
    values = np.linalg.eigvalsh(np.asarray(x.T @ x / 0.01))  # in place of the root, as most implementations do
    assert abs(values[0]) > 10  # in place of 0, next to a prior precision of 1


class Normalised(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        self.linear, self.head = eqx.nn.Linear(3, 4, key=key), eqx.nn.Linear(4, 3, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        return self.head(jax.nn.relu(x)), state


@pytest.mark.slow
def test_state():
    """Features in inference mode: those of one row do not depend on the other rows."""
    ensemble, state = ee.build(eqx.nn.make_with_state(Normalised), 2, key=KEY)
    with relaxed():
        posterior = fit(ensemble, where=lambda m: m.head, state=state)
        features = ee.predict(ensemble, X, state=state, fn=lambda m, x, s: jax.nn.relu(m.norm(m.linear(x), s)[0]))
        heads = ee.map_members(lambda m: m.head)(ensemble)
        plain = fit(heads, (ee.Each(features), LABELS), where=lambda head: head)
        assert_close(posterior.predict(X), plain.predict(ee.Each(features)), 1e-4)
        assert_close(posterior.log_marginal_likelihood(), plain.log_marginal_likelihood(), 1e-4)
        assert posterior[[1]].predict(X).shape == (1, 11, 3)
    with pytest.raises(TypeError, match="no `state` was given"):
        fit(ensemble, where=lambda m: m.head)


@pytest.mark.slow
def test_half_precision_and_shared_arrays():
    """Labels may be booleans or small integers, too."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, ENSEMBLE)
    posterior = fit(half, (X.astype(jnp.bfloat16), LABELS))
    assert posterior.prior_precision.dtype == jnp.float32
    two = {"fn": lambda m, x: m(x)[:2]}
    same(fit(data=(X, LABELS > 0), **two), fit(data=(X, (LABELS > 0).astype(jnp.uint8)), **two))
    assert posterior.sample(2, key=KEY).stacked.layers[0].weight.dtype == jnp.bfloat16
    shared = ee.build(make, 2, shared=lambda m: m.layers[0], key=KEY)
    assert fit(shared, where=lambda m: m).members.stacked.values.shape[-1] == 15
    with pytest.raises(ValueError, match="at least one real floating-point array of each member"):
        fit(shared, where=lambda m: m.layers[0])


BAD = {
    "no arrays": ({"where": lambda m: m.activation}, ValueError, "at least one real floating-point array"),
    "likelihood": ({"likelihood": "poisson"}, ValueError, "one of 'regression', 'binary', 'classification'"),
    "structure": ({"structure": "low-rank"}, ValueError, "one of 'full', 'diag'"),
    "noise of classes": ({"noise": 0.1}, TypeError, "`methods.laplace.fit` takes `noise` for regression only"),
    "prior of zero": ({"prior_precision": 0.0}, ValueError, "`methods.laplace.fit` needs a finite `prior_precision`"),
    "priors of others": ({"prior_precision": jnp.ones(2)}, ValueError, "broadcast"),
    "weights": ({"row_weights": jnp.ones((3, 11))}, ValueError, "one of `row_weights` per row"),
    "no row": ({"row_weights": jnp.zeros(11)}, ValueError, "not all zero"),
    "negative": ({"row_weights": ee.Each(-jnp.ones((3, 11)))}, ValueError, "zero or more"),
    "NaN in a row that counts": (
        {"data": (X.at[3].set(jnp.nan), LABELS), "row_weights": jnp.arange(11) < 8}, ValueError, "finite outputs",
    ),
    "labels": ({"data": (X, LABELS + 1)}, ValueError, "0, 1, 2 have none\nNaN or other labels"),
    "labels between classes": ({"data": (X, 0.5 * jnp.ones(11))}, ValueError, "NaN or other labels"),
    "one-hot labels": ({"data": (X, jax.nn.one_hot(LABELS, 3))}, ValueError, "one label per row"),
    "labels of two signs": (
        {"likelihood": "binary", "fn": lambda m, x: m(x)[:1], "data": (X, LABELS % 2 * 2 - 1)},
        ValueError, "finite outputs",
    ),
    "binary of three": ({"likelihood": "binary"}, ValueError, "of the shape for `likelihood='binary'`"),
    "one class": ({"fn": lambda m, x: m(x)[:1]}, ValueError, "of the shape for `likelihood='classification'`"),
    "targets": ({"likelihood": "regression", "data": (X, X[:, 0])}, ValueError, "one target per output"),
    "a pair of outputs": ({"fn": lambda m, x: (m(x), m(x))}, ValueError, "one array of outputs"),
    "a model": ({"ensemble": make(KEY)}, TypeError, "`Ensemble` is needed"),
}  # fmt: skip


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("case", BAD)
def test_errors_of_a_fit(case):
    options, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        fit(**options)


@pytest.mark.slow
@pytest.mark.usefixtures("unhooked")
def test_errors_of_a_posterior(posterior):
    with pytest.raises(ValueError, match="one of 'probit', 'mc'"):
        posterior.predict(X, link="softmax")
    with pytest.raises(TypeError, match="needs `key`"):
        posterior.predict(X, link="mc")
    with pytest.raises(TypeError, match="`methods.laplace.Laplace.log_marginal_likelihood` takes `noise` for"):
        posterior.log_marginal_likelihood(noise=0.1)
    with pytest.raises(ValueError, match="`methods.laplace.with_prior` needs a finite `prior_precision` above zero"):
        laplace.with_prior(posterior, prior_precision=-jnp.ones(3))
    zero = eqx.tree_at(lambda e: e.stacked.layers[-1], ENSEMBLE, replace_fn=lambda x: jax.tree.map(jnp.zeros_like, x))
    with pytest.raises(ValueError, match=r"needs a maximum of the marginal likelihood.\n  members 0, 1, 2 have none"):
        fit(zero).optimise_prior()
