"""Heads and their losses against SciPy's distributions, closed forms and integrals, alone and inside `fit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import integrate, special, stats

import eqx_ensemble as ee
from eqx_ensemble.methods import heads

from ..factories import Alone, assert_close, in_order, step_key

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


parts = lambda parameters: tuple(parameters) if isinstance(parameters, tuple) else (parameters,)


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (2, 3)), ("float64", (7,))])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, dtype, shape):
    """Of rows, and their means; under `jit` and `vmap`, too."""
    size, head, loss, options, of_row, is_class = LOSSES[name]
    rng = np.random.default_rng(len(shape))
    with jax.enable_x64(dtype == "float64"):
        known = [np.array(x, dtype) for x in parts(head(2 * rng.normal(size=(*shape, size)).astype(dtype)))]
        targets = rng.integers(0, 3, shape) if is_class else rng.normal(size=shape).astype(dtype)
        every = np.ndindex(shape)
        want = np.array([of_row(*(x[i].astype(float) for x in known), targets[i]) for i in every]).reshape(shape)
        close = dict(rtol=1e-8 if dtype == "float64" else 5e-5, atol=1e-9 if dtype == "float64" else 2e-5)
        found = loss(*known, targets, reduction="none", **options)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, want, **close)
        one = jax.jit(jax.vmap(lambda *given: loss(*given, **options)))
        np.testing.assert_allclose(one(*known, targets), want.reshape(shape[0], -1).mean(1), **close)
        weights = np.arange(want.size).reshape(shape)
        known[0].flat[0] = np.nan  # a row that does not count
        total = lambda *given: loss(*given, targets, row_weights=weights, **options)
        value, slopes = jax.value_and_grad(total, argnums=tuple(range(len(known))))(*known)
        np.testing.assert_allclose(value, np.average(want, weights=weights), **close)
        assert all(np.isfinite(slope).all() and slope.any() for slope in slopes)


@pytest.mark.parametrize("floor", [0.0, 1e-3])
def test_heads(floor):
    """Any number of leading axes; floors may be traced."""
    raw = np.random.default_rng(0).normal(size=(5, 7, 12)).astype(np.float32)
    both = lambda floor: (
        heads.normal_inverse_gamma(raw[..., :4], floor=floor),
        heads.mixture_density(raw, floor=floor),
    )
    soft = np.log1p(np.exp(raw.astype(float))) + floor
    want = [raw[..., 0], soft[..., 1], soft[..., 2] + 1, soft[..., 3], raw[..., :4], raw[..., 4:8], soft[..., 8:]]
    for got, x in zip(jax.tree.leaves(jax.jit(both)(floor)), want, strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-5)
    alpha = heads.dirichlet(raw)
    np.testing.assert_allclose(alpha, soft - floor + 1, rtol=1e-5)
    np.testing.assert_allclose(heads.vacuity(alpha), 12 / np.sum(alpha, -1), rtol=1e-5)


@pytest.mark.parametrize("raw", [-200.0, 200.0])
def test_far_outputs_have_finite_losses_and_gradients(raw):
    of_gamma = lambda raw: heads.evidential_loss(*heads.normal_inverse_gamma(raw), jnp.float32(0.5))
    of_density = lambda raw: heads.mixture_density_loss(*heads.mixture_density(raw), jnp.float32(0.5))
    of_classes = lambda raw: heads.dirichlet_loss(heads.dirichlet(raw), 0, kl_weight=1.0)
    for loss, size in ((of_gamma, 4), (of_density, 6), (of_classes, 3)):
        value, slope = jax.value_and_grad(loss)(jnp.full(size, raw))
        assert np.isfinite([value, *slope]).all()
    assert (np.abs(jax.grad(of_classes)(jnp.full(3, -5.0))) > 1e-4).all()  # a ReLU has none there
    assert np.isfinite(heads.decompose_evidential(*heads.normal_inverse_gamma(jnp.full(4, raw)))).all()
    given = (jnp.array([[0.0, raw]]), jnp.array([[0.0, 40.0]]), jnp.full((1, 2), 1e-2), jnp.array([40.0]))
    value, slope = jax.value_and_grad(heads.mixture_density_loss)(*given)  # a component far away pulls on the logits
    np.testing.assert_allclose(value, max(-raw, 0) + 0.5 * np.log(2 * np.pi * 1e-2), rtol=1e-5)
    np.testing.assert_allclose(slope, [[1, -1]] if raw < 0 else [[0, 0]], rtol=1e-5)


@pytest.mark.parametrize("evidence", [0.0, 15.0, 1e6])
def test_much_evidence_in_single_precision(evidence):
    alpha = 1 + evidence * np.array([[0.3, 1, 2]])
    loss = lambda weight: heads.dirichlet_loss(alpha.astype(np.float32), np.zeros(1, int), kl_weight=weight)
    expected = divergence(np.where([True, False, False], 1, alpha[0]))
    np.testing.assert_allclose(loss(1.0) - loss(0.0), expected, rtol=1e-5, atol=5e-6)
    values = 0.3, 1.7, evidence + 2, (evidence + 2) * 0.9
    got = heads.evidential_loss(*map(jnp.float32, values), 1.0, coefficient=0)
    np.testing.assert_allclose(got, -student(*values).logpdf(1.0), rtol=1e-5)


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
    same = beta * (1 + 1 / nu) / (1 + 1 / other)
    loss = lambda nu, beta: heads.evidential_loss(mean, nu, alpha, beta, 1.1, coefficient=0)
    np.testing.assert_allclose(loss(nu, beta), loss(other, same), rtol=1e-5)


def test_moments_and_components_of_all_members():
    rng, weights = np.random.default_rng(0), np.array([0.5, 0.0, 0.3, 0.2])
    logits, mean = rng.normal(size=(2, 4, 6, 3)).astype(np.float32)  # members, rows, components
    variance, targets = np.exp(rng.normal(size=(4, 6, 3))).astype(np.float32), rng.normal(size=6).astype(np.float32)
    moments, share = heads.mixture_density_moments(logits, mean, variance), special.softmax(logits, axis=-1)
    centre = np.sum(share * mean, -1)
    np.testing.assert_allclose(moments.mean, centre, rtol=1e-4)
    np.testing.assert_allclose(moments.variance, np.sum(share * (variance + mean**2), -1) - centre**2, rtol=1e-4)
    every = zip(logits, mean, variance, strict=True)
    own = np.stack([heads.mixture_density_loss(*of, targets, reduction="none") for of in every])
    *flat, shares = heads.mixture_components(logits, mean, variance, weights=weights)
    np.testing.assert_allclose(shares.sum(0), np.ones(6), rtol=1e-5)
    got = ee.scores.nll_gaussian_mixture(*flat, targets, weights=shares, reduction="none")
    np.testing.assert_allclose(got, -np.log(np.average(np.exp(-own), axis=0, weights=weights)), rtol=1e-4)
    whole, nested = ee.combine.gaussian(*flat, weights=shares), ee.combine.gaussian(*moments, weights=weights)
    np.testing.assert_allclose(whole, nested, rtol=1e-4)


def test_quantiles():
    """Constants are best at the quantiles of a sample."""
    sample = np.sort(np.random.default_rng(0).normal(size=101)).astype(np.float32)
    for level in LEVELS:  # 101 rows: no level falls between two of them
        loss = lambda q, level=level: heads.pinball_loss(jnp.full((101, 1), q), sample, levels=np.array([level]))
        best = sample[np.argmin(jax.vmap(loss)(jnp.asarray(sample)))]
        assert best == np.quantile(sample, level, method="inverted_cdf")
    got = heads.sort_quantiles(np.array([[[3.0, 1.0, 2.0]], [[np.nan, 1.0, 0.0]]], np.float32))
    np.testing.assert_array_equal(got, [[[1, 2, 3]], [[np.nan] * 3]])


def test_wrong_arguments(unhooked):
    one, flat, row = np.ones(1, np.float32), np.ones((2, 3), np.float32), np.ones(2, np.float32)
    for call, message in [
        (lambda: heads.dirichlet_loss(flat, [0, 3], kl_weight=1), "labels from 0 to 2"),
        (lambda: heads.decompose_evidential(one, one, one, one), "`alpha` above 1"),
        (lambda: heads.normal_inverse_gamma(np.ones((3, 8), np.float32)), r"`raw` of shape \(\*batch, 4\)"),
        (lambda: heads.mixture_density(np.ones((2, 4), np.float32)), r"3 \* components"),
        (lambda: heads.pinball_loss(flat, row, levels=[0.1, 0.1, 0.9]), "increasing"),
        (lambda: heads.pinball_loss(flat, row, levels=[10.0, 50.0, 90.0]), "Write 90 %"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_a_member_is_the_model_that_training_it_alone_gives():
    """The weight of a penalty differs between members."""
    x = jax.random.normal(jax.random.key(0), (20, 3))
    data, weights = (x, jnp.sin(x[:, 0])), jnp.array([0.0, 0.1, 1.0])
    given = lambda model, x: heads.normal_inverse_gamma(jax.vmap(model)(x))
    loss = lambda model, batch, key, hyper: heads.evidential_loss(*given(model, batch[0]), batch[1], coefficient=hyper)
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 4, 8, 1, key=key), 3, key=KEY)
    length = {"steps": 5, "batch_size": 8, "shuffle": False, "key": KEY}
    run = ee.fit(ensemble, loss, lambda hyper: ADAM, data, hyper=weights, **length)
    fixed, keys = lambda *given: loss(*given, weights[2]), [step_key(KEY, 2, step) for step in range(5)]
    alone, _, losses = Alone(fixed, ADAM)(ensemble[2], in_order(data, 8, 5), keys)
    assert_close(run.ensemble[2], alone, 1e-5)
    np.testing.assert_allclose(run.history.loss[2], losses, rtol=1e-5)
