"""Heads and their losses against SciPy's distributions, closed forms and integrals, alone and inside `fit`."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import integrate, special, stats

import eqx_ensemble as ee
from eqx_ensemble.methods import heads

from ..factories import Alone, assert_close, distance, in_order, step_key

LEVELS, KEY, ADAM = np.array([0.1, 0.5, 0.8]), jax.random.key(11), optax.adam(1e-2)


def beta_mean(function, alpha):
    """The mean of a function of each class's probability, whose marginal distribution is a beta distribution."""
    marginals = [stats.beta(a, alpha.sum() - a) for a in alpha]
    return np.array([integrate.quad(lambda p, m=m: function(p) * m.pdf(p), 0, 1)[0] for m in marginals])


def divergence(alpha):
    """From the uniform distribution, whose density is the constant (K - 1)!."""
    return -stats.dirichlet(alpha).entropy() - special.gammaln(len(alpha))


def student(mean, nu, alpha, beta):
    return stats.t(2 * alpha, mean, np.sqrt(beta * (1 + nu) / (nu * alpha)))


def squared(alpha, label):
    known, one_hot = stats.dirichlet(alpha), np.eye(len(alpha))[label]
    risk = np.sum((one_hot - known.mean()) ** 2 + known.var())
    return risk + 0.5 * divergence(np.where(one_hot == 1, 1, alpha))


def digamma(alpha, label):
    wrong = np.where(np.arange(len(alpha)) == label, 1, alpha)
    return beta_mean(lambda p: -np.log(p), alpha)[label] + 0.5 * divergence(wrong)


def evidential(mean, nu, alpha, beta, y):
    return -student(mean, nu, alpha, beta).logpdf(y) + 0.3 * abs(y - mean) * (2 * nu + alpha)


def mixture(logits, mean, variance, y):
    return -np.log(special.softmax(logits) @ stats.norm(mean, np.sqrt(variance)).pdf(y))


def pinball(quantiles, y):
    return np.mean(np.maximum(LEVELS * (y - quantiles), (LEVELS - 1) * (y - quantiles)))


# The size of the output, the head, the loss of its parameters, the loss of one row, and whether targets are labels.
LOSSES = {
    "squared": (3, heads.dirichlet, heads.dirichlet_loss, {"kl_weight": 0.5}, squared, True),
    "digamma": (3, heads.dirichlet, heads.dirichlet_loss, {"kl_weight": 0.5, "risk": "digamma"}, digamma, True),
    "evidential": (4, heads.normal_inverse_gamma, heads.evidential_loss, {"coefficient": 0.3}, evidential, False),
    "mixture": (6, heads.mixture_density, heads.mixture_density_loss, {}, mixture, False),
    "quantiles": (3, lambda raw: raw, heads.pinball_loss, {"levels": LEVELS}, pinball, False),
}


def parts(parameters):
    return tuple(parameters) if isinstance(parameters, tuple) else (parameters,)


@pytest.mark.parametrize(("dtype", "shape"), [("float16", (1,)), ("float32", (2, 3)), ("float64", (7,))])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, dtype, shape):
    """Of rows, their means, and those of rows that count, whatever the others hold; under `jit` and `vmap`, too."""
    size, head, loss, options, of_row, is_class = LOSSES[name]
    rng = np.random.default_rng(len(shape))
    with jax.enable_x64(dtype == "float64"):
        raw = 2 * rng.normal(size=(*shape, size))
        known = [np.array(x, dtype) for x in parts(head(raw.astype(dtype)))]
        targets = rng.integers(0, 3, shape) if is_class else rng.normal(size=shape).astype(dtype)
        every = np.ndindex(shape)
        want = np.array([of_row(*(x[i].astype(float) for x in known), targets[i]) for i in every]).reshape(shape)
        close = dict(rtol=1e-8 if dtype == "float64" else 5e-5, atol=1e-9 if dtype == "float64" else 2e-5)
        found = loss(*known, targets, reduction="none", **options)
        assert found.dtype == ("float64" if dtype == "float64" else "float32")
        np.testing.assert_allclose(found, want, **close)
        one = jax.jit(jax.vmap(lambda *given: loss(*given, **options)))
        np.testing.assert_allclose(one(*known, targets), want.reshape(shape[0], -1).mean(1), **close)
        assert shape == (1,) or not np.allclose(np.flip(found), want, rtol=1e-2), "another order is told apart"
        kept = rng.uniform(size=shape) < 0.6
        kept[(0,) * len(shape)] = True
        weights = kept * rng.uniform(0.1, 3, shape)
        spoilt = [np.where(kept.reshape(shape + (1,) * (x.ndim - len(shape))), x, np.nan) for x in known]
        wrong = np.where(kept, targets, -7 if is_class else np.nan)
        total = lambda *given: loss(*given, wrong, row_weights=weights, **options)
        for call in (total, jax.jit(total)):
            np.testing.assert_allclose(call(*spoilt), np.average(want, weights=weights), **close)
        for slope in jax.grad(total, argnums=tuple(range(len(known))))(*spoilt):
            assert np.isfinite(slope).all()
            assert not slope[~kept].any()
            assert slope[kept].any()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_heads(dtype):
    """Any number of leading axes; floors may be traced."""
    raw = np.random.default_rng(0).normal(size=(5, 7, 12)).astype(dtype)
    soft = np.log1p(np.exp(raw.astype(float)))
    for floor in (0.0, 1e-3):
        gamma = jax.jit(lambda floor: heads.normal_inverse_gamma(raw[..., :4], floor=floor))(floor)
        density = jax.jit(lambda floor: heads.mixture_density(raw, floor=floor))(floor)
        want = (raw[..., 0], soft[..., 1] + floor, soft[..., 2] + 1 + floor, soft[..., 3] + floor)
        for got, x in zip(gamma, want, strict=True):
            np.testing.assert_allclose(got, x, rtol=1e-5)
        for got, x in zip(density, (raw[..., :4], raw[..., 4:8], soft[..., 8:] + floor), strict=True):
            np.testing.assert_allclose(got, x, rtol=1e-5)
    alpha = heads.dirichlet(raw)
    np.testing.assert_allclose(alpha, soft + 1, rtol=1e-5)
    np.testing.assert_allclose(heads.vacuity(alpha), 12 / np.sum(soft + 1, -1), rtol=1e-5)
    assert heads.vacuity(np.ones(3, np.float32)) == 1
    mean = alpha / alpha.sum(-1, keepdims=True)  # their logarithms are logits
    np.testing.assert_allclose(jnp.exp(ee.combine.mixture(jnp.log(alpha))), mean.mean(0), rtol=1e-4)


@pytest.mark.parametrize("raw", [-200.0, 200.0])
def test_far_outputs_have_finite_losses_and_gradients(raw):
    of_gamma = lambda raw: heads.evidential_loss(*heads.normal_inverse_gamma(raw), jnp.float32(0.5))
    of_density = lambda raw: heads.mixture_density_loss(*heads.mixture_density(raw), jnp.float32(0.5))
    of_classes = lambda raw: heads.dirichlet_loss(heads.dirichlet(raw), 0, kl_weight=1.0)
    for loss, size in ((of_gamma, 4), (of_density, 6), (of_classes, 3)):
        value, slope = jax.value_and_grad(loss)(jnp.full(size, raw))
        assert np.isfinite(value)
        assert np.isfinite(slope).all()
    assert (np.abs(jax.grad(of_classes)(jnp.full(3, -5.0))) > 1e-4).all()  # a ReLU has none there
    assert np.isfinite(heads.decompose_evidential(*heads.normal_inverse_gamma(jnp.full(4, raw)))).all()


@pytest.mark.parametrize("evidence", [0.0, 15.0, 1e3, 1e6])
def test_much_evidence_in_single_precision(evidence):
    concentration = 1 + evidence * np.array([[0.3, 1, 2]])
    wrong = np.where([True, False, False], 1, concentration[0])
    loss = lambda weight: heads.dirichlet_loss(concentration.astype(np.float32), np.zeros(1, int), kl_weight=weight)
    np.testing.assert_allclose(loss(1.0) - loss(0.0), divergence(wrong), rtol=1e-5, atol=5e-6)
    values = 0.3, 1.7, evidence + 2, (evidence + 2) * 0.9
    likelihood = lambda alpha: heads.evidential_loss(
        *map(jnp.float32, values[:2]), alpha, jnp.float32(values[3]), 1.0, coefficient=0
    )
    got, slope = jax.value_and_grad(likelihood)(jnp.float32(values[2]))
    np.testing.assert_allclose(got, -student(*values).logpdf(1.0), rtol=1e-5)
    assert np.isfinite(slope)


@pytest.mark.parametrize("risk", ["squared", "digamma"])
@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range(risk, label):
    alpha = np.ones((3, 3), np.float32)
    loss = lambda labels: heads.dirichlet_loss(alpha, labels, kl_weight=1.0, risk=risk, reduction="none")
    np.testing.assert_array_equal(np.isnan(jax.jit(loss)(np.array([0, label, 1]))), [False, True, False])
    with pytest.raises(ValueError, match="labels from 0 to 2"):
        loss(np.array([0, label, 1]))


def test_the_split_of_a_dirichlet_distribution():
    alphas = np.array([[2.0, 3.5, 1.2], [1.0, 1.0, 1.0], [40.0, 1.5, 7.0]])
    found = heads.decompose_dirichlet(alphas.astype(np.float32))
    entropies = [beta_mean(lambda p: -special.xlogy(p, p), alpha).sum() for alpha in alphas]
    total = [stats.entropy(alpha) for alpha in alphas]
    np.testing.assert_allclose(found.aleatoric, entropies, rtol=1e-5)
    np.testing.assert_allclose(found.total, total, rtol=1e-5)
    np.testing.assert_allclose(found.epistemic, np.subtract(total, entropies), rtol=1e-4)
    assert (heads.decompose_dirichlet(np.full(4, 1e7, np.float32)).epistemic >= 0).all()


def test_the_split_of_evidence_and_that_the_likelihood_does_not_determine_it():
    mean, nu, alpha, beta, other = 0.3, 1.7, 6.4, 0.9, 0.1
    found, prior = heads.decompose_evidential(mean, nu, alpha, beta), stats.invgamma(alpha, scale=beta)
    np.testing.assert_allclose(found.total, student(mean, nu, alpha, beta).var(), rtol=1e-6)
    np.testing.assert_allclose(found.aleatoric, prior.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.epistemic, prior.expect(lambda v: v / nu), rtol=1e-6)
    density = lambda v: prior.pdf(v) * stats.norm(mean, np.sqrt(v * (1 + 1 / nu))).pdf(1.1)
    same = beta * (1 + 1 / nu) / (1 + 1 / other)
    loss = lambda nu, beta, c: heads.evidential_loss(mean, nu, alpha, beta, 1.1, coefficient=c)
    np.testing.assert_allclose(loss(nu, beta, 0), -np.log(integrate.quad(density, 0, np.inf)[0]), rtol=1e-6)
    np.testing.assert_allclose(loss(nu, beta, 0), loss(other, same, 0), rtol=1e-5)
    assert loss(nu, beta, 0.01) > loss(other, same, 0.01) + 1e-3
    assert heads.decompose_evidential(mean, other, alpha, same).epistemic > 2 * found.epistemic
    assert np.isfinite(jax.grad(lambda m: heads.evidential_loss(m, nu, alpha, beta, mean))(mean))


def test_components_far_away_pull_on_the_logits():
    given = (jnp.array([[0.0, -200.0]]), jnp.array([[0.0, 40.0]]), jnp.full((1, 2), 1e-2), jnp.array([40.0]))
    value, slope = jax.value_and_grad(heads.mixture_density_loss, argnums=(0, 1, 2))(*given)
    np.testing.assert_allclose(value, 200 + 0.5 * np.log(2 * np.pi * 1e-2), rtol=1e-5)
    assert all(np.isfinite(x).all() for x in slope)
    np.testing.assert_allclose(slope[0], [[1, -1]], rtol=1e-5)


@pytest.mark.parametrize("weights", [None, np.array([0.5, 0.0, 0.3, 0.2])])
def test_moments_and_components_of_all_members(weights):
    rng = np.random.default_rng(0)
    logits, mean = rng.normal(size=(2, 4, 6, 3)).astype(np.float32)  # members, rows, components
    variance, targets = np.exp(rng.normal(size=(4, 6, 3))).astype(np.float32), rng.normal(size=6).astype(np.float32)
    moments, share = heads.mixture_density_moments(logits, mean, variance), special.softmax(logits, axis=-1)
    centre = np.sum(share * mean, -1)
    np.testing.assert_allclose(moments.mean, centre, rtol=1e-4)
    np.testing.assert_allclose(moments.variance, np.sum(share * (variance + mean**2), -1) - centre**2, rtol=1e-4)
    every = zip(logits, mean, variance, strict=True)
    own = np.stack([heads.mixture_density_loss(*of, targets, reduction="none") for of in every])
    spoilt = [x.copy() for x in (logits, mean, variance)]
    for x in spoilt if weights is not None else ():
        x[1] = np.nan  # a member of weight zero
    *flat, shares = heads.mixture_components(*spoilt, weights=weights)
    assert flat[0].shape == (12, 6)
    np.testing.assert_allclose(shares.sum(0), np.ones(6), rtol=1e-5)
    got = ee.scores.nll_gaussian_mixture(*flat, targets, weights=shares, reduction="none")
    np.testing.assert_allclose(got, -np.log(np.average(np.exp(-own), axis=0, weights=weights)), rtol=1e-4)
    whole, nested = ee.combine.gaussian(*flat, weights=shares), ee.combine.gaussian(*moments, weights=weights)
    np.testing.assert_allclose(whole, nested, rtol=1e-4)


def test_quantiles():
    """Constants are best at the quantiles of a sample, many levels give the CRPS, and one level is `scores.pinball`."""
    sample = np.sort(np.random.default_rng(0).normal(size=101)).astype(np.float32)
    for level in LEVELS:  # 101 rows: no level falls between two of them
        loss = lambda q, level=level: heads.pinball_loss(
            jnp.broadcast_to(q, (101, 1)), sample, levels=np.array([level])
        )
        values = jax.vmap(loss)(jnp.asarray(sample))
        assert sample[np.argmin(values)] == np.quantile(sample, level, method="inverted_cdf")
        want = ee.scores.pinball(np.full(101, 0.2, np.float32), sample, level=level)
        np.testing.assert_allclose(loss(np.float32(0.2)), want, rtol=1e-5)
    levels = (np.arange(2000) + 0.5) / 2000
    quantiles = stats.norm(0.3, 1.5).ppf(levels)[None].astype(np.float32)
    crps = ee.scores.crps_gaussian(*np.float32([[0.3], [2.25], [1]]))
    np.testing.assert_allclose(2 * heads.pinball_loss(quantiles, np.ones(1), levels=levels), crps, rtol=1e-3)


def test_sorting_never_raises_the_loss():
    crossed = np.array(list(itertools.permutations([0.0, 1.0, 2.5])), np.float32)
    for y in (-1.0, 0.4, 1.7, 3.0):
        loss = lambda q, y=y: heads.pinball_loss(q, np.full(len(crossed), y), levels=LEVELS, reduction="none")
        before, after = loss(crossed), loss(heads.sort_quantiles(crossed))
        assert (after <= before + 1e-6).all()
        assert (after < before - 1e-3).any()
    got = heads.sort_quantiles(np.array([[[3.0, 1.0, 2.0]], [[np.nan, 1.0, 0.0]]], np.float32))
    np.testing.assert_array_equal(got, [[[1, 2, 3]], [[np.nan] * 3]])


ONE, TWO = np.ones(1, np.float32), 2 * np.ones(1, np.float32)
FLAT, ROW = np.ones((2, 3), np.float32), np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: heads.dirichlet_loss(-FLAT, [0, 1], kl_weight=1), "heads.dirichlet_loss` needs `concentration`"),
        (lambda: heads.dirichlet_loss(FLAT, [0, 1], kl_weight=-0.1), "`kl_weight` of zero or more"),
        (lambda: heads.evidential_loss(ONE, 0 * ONE, TWO, ONE, ONE), "`nu` above 0"),
        (lambda: heads.decompose_evidential(ONE, ONE, ONE, ONE), "`alpha` above 1"),
        (lambda: heads.decompose_evidential(ONE, ONE, TWO, -ONE), "`beta` above 0"),
        (lambda: heads.evidential_loss(ONE, ONE, TWO, ROW, ONE), "`beta` of the rows of `mean`"),
        (lambda: heads.evidential_loss(ONE, ONE, TWO, ONE, ONE, coefficient=-1), "`coefficient` of zero or more"),
        (lambda: heads.normal_inverse_gamma(np.ones((3, 8), np.float32)), r"`raw` of shape \(\*batch, 4\)"),
        (lambda: heads.mixture_density(np.ones((2, 4), np.float32)), r"3 \* components"),
        (lambda: heads.mixture_density_loss(FLAT, FLAT, -FLAT, ROW), "variances above zero"),
        (lambda: heads.mixture_density_moments(FLAT, FLAT[:, :1], FLAT), "`mean` of the rows of `logits`"),
        (lambda: heads.mixture_components(FLAT, FLAT, FLAT, weights=np.ones(3)), "one weight per member"),
        *((lambda levels=levels: heads.pinball_loss(FLAT, ROW, levels=levels), message)
          for message, levels in (("increasing", [0.5, 0.1, 0.9]), ("increasing", [0.1, 0.1, 0.9]),
                                  ("between 0 and 1", [0.0, 0.5, 0.9]), ("Write 90 %", [10.0, 50.0, 90.0]),
                                  ("`levels` of the rows of `quantiles`", [0.5]))),
    ],
)  # fmt: skip
def test_wrong_arguments(unhooked, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


X = jax.random.normal(jax.random.key(0), (20, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_member_is_the_model_that_training_it_alone_gives(name):
    """The weight of a penalty differs between members, where there is one."""
    size, head, of_parameters, options, _, is_class = LOSSES[name]
    penalty = next((option for option in ("coefficient", "kl_weight") if option in options), None)
    data = (X, (X[:, 0] > 0).astype(int) if is_class else jnp.sin(X[:, 0]))
    weights = jnp.array([0.0, 0.1, 1.0])

    def loss(model, batch, key, hyper):
        own = options if penalty is None else options | {penalty: hyper["penalty"]}
        return of_parameters(*parts(head(jax.vmap(model)(batch[0]))), batch[1], **own)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, size, 8, 1, key=key), 3, key=jax.random.key(3))
    length = {"steps": 5, "batch_size": 8, "shuffle": False, "key": KEY}
    run = ee.fit(ensemble, loss, lambda hyper: ADAM, data, hyper={"penalty": weights}, **length)
    for i in (0, 2):
        fixed = lambda model, batch, key, i=i: loss(model, batch, key, {"penalty": weights[i]})
        keys = [step_key(KEY, i, step) for step in range(5)]
        alone, _, losses = Alone(fixed, ADAM)(ensemble[i], in_order(data, 8, 5), keys)
        assert distance(alone, ensemble[i]) > 1e-2
        assert_close(run.ensemble[i], alone, 1e-5)
        np.testing.assert_allclose(run.history.loss[i], losses, rtol=1e-5)


def test_predictions_of_an_ensemble_are_named_tuples_of_members():
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 4, key=key), 3, key=KEY)
    found = ee.predict(ensemble, X, fn=lambda model, x: heads.normal_inverse_gamma(model(x)))
    assert isinstance(found, heads.NormalInverseGamma)
    total = heads.decompose_evidential(*found).total
    assert total.shape == (3, 20)
    np.testing.assert_allclose(total[1], heads.decompose_evidential(*(x[1] for x in found)).total, rtol=1e-6)
