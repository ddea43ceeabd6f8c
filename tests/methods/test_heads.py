"""Heads, distillation and their losses against SciPy's distributions, closed forms and integrals, and inside `fit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import integrate, special, stats

import eqx_ensemble as ee
from eqx_ensemble.methods import distillation, heads
from eqx_ensemble.methods.distillation import distribution_loss

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


def dirichlet(alpha, label, kl_weight, risk="squared"):
    known, one_hot = stats.dirichlet(alpha), np.eye(len(alpha))[label]
    found = np.sum((one_hot - known.mean()) ** 2 + known.var())
    found = found if risk == "squared" else beta_mean(lambda p: -np.log(p), alpha)[label]
    return found + kl_weight * divergence(np.where(one_hot == 1, 1, alpha))


def evidential(mean, nu, alpha, beta, y, coefficient):
    return -student(mean, nu, alpha, beta).logpdf(y) + coefficient * abs(y - mean) * (2 * nu + alpha)


def mixture_density(logits, mean, variance, y):
    return -np.log(special.softmax(logits) @ stats.norm(mean, np.sqrt(variance)).pdf(y))


def pinball(quantiles, y, levels):
    return np.mean(np.maximum(levels * (y - quantiles), (levels - 1) * (y - quantiles)))


def mixture(logits, teacher, temperature):
    target = special.softmax(teacher / temperature, axis=-1).mean(0)
    return temperature**2 * special.rel_entr(target, special.softmax(logits / temperature)).sum()


def distribution(logits, teacher, temperature, smoothing=1e-4):
    points = (1 - smoothing) * special.softmax(teacher / temperature, axis=-1) + smoothing / teacher.shape[-1]
    of_one = [stats.dirichlet.logpdf(p / p.sum(), np.exp(logits / temperature)) for p in points]
    return -(temperature**2) * np.mean(of_one)


def gaussian(mean, variance, means, variances):
    return np.mean(np.log(variance / variances) + (variances + (means - mean) ** 2) / variance - 1) / 2


normal = lambda *own: lambda rng, shape: rng.normal(size=(*shape, *own))
above = lambda low, *own: lambda rng, shape: low + np.exp(rng.normal(size=(*shape, *own)))
label = lambda rng, shape: rng.integers(0, 3, shape)
# The loss, its options, the loss of one row, and its arguments.
LOSSES = {
    "squared": (heads.dirichlet_loss, {"kl_weight": 0.5}, dirichlet, (above(1, 3), label)),
    "digamma": (heads.dirichlet_loss, {"kl_weight": 0.5, "risk": "digamma"}, dirichlet, (above(1, 3), label)),
    "evidential": (
        heads.evidential_loss, {"coefficient": 0.3}, evidential, (normal(), above(0), above(1), above(0), normal())
    ),
    "mixture density": (heads.mixture_density_loss, {}, mixture_density, (normal(2), normal(2), above(0, 2), normal())),
    "quantiles": (heads.pinball_loss, {"levels": LEVELS}, pinball, (normal(3), normal())),
    "mixture": (distillation.mixture_loss, {"temperature": 4.0}, mixture, (normal(3), normal(4, 3))),
    "smooth": (distribution_loss, {"temperature": 5.0, "smoothing": 1e-2}, distribution, (normal(3), normal(4, 3))),
    "plain": (distribution_loss, {"temperature": 1.0, "smoothing": 0.0}, distribution, (normal(3), normal(4, 3))),
    "gaussian": (distillation.gaussian_loss, {}, gaussian, (normal(), above(0), normal(4), above(0, 4))),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (2, 3)), ("float64", (7,))])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, dtype, shape):
    """Of rows, and their means; under `jit` and `vmap`, too, where numbers of the options may be traced."""
    loss, options, of_row, make = LOSSES[name]
    rng = np.random.default_rng(len(shape))
    with jax.enable_x64(dtype == "float64"):
        known = [x if x.dtype.kind == "i" else x.astype(dtype) for x in (one(rng, shape) for one in make)]
        double = [x if x.dtype.kind == "i" else x.astype(float) for x in known]
        want = np.reshape([of_row(*(x[i] for x in double), **options) for i in np.ndindex(shape)], shape)
        close = dict(rtol=1e-9, atol=1e-9) if dtype == "float64" else dict(rtol=2e-5, atol=5e-5)
        found = loss(*known, reduction="none", **options)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, want, **close)
        traced = {key: x for key, x in options.items() if isinstance(x, float)}
        of_all = lambda traced: jax.vmap(lambda *given: loss(*given, **options | traced))(*known)
        np.testing.assert_allclose(jax.jit(of_all)(traced), want.reshape(shape[0], -1).mean(1), **close)
        weights = np.arange(want.size).reshape(shape)
        known[0].flat[0] = np.nan  # a row that does not count
        total = lambda *given: loss(*given, row_weights=weights, **options)
        floats = [i for i, x in enumerate(known) if x.dtype.kind == "f"]
        value, slopes = jax.value_and_grad(total, argnums=floats)(*known)
        np.testing.assert_allclose(value, np.average(want, weights=weights), **close)
        assert all(np.isfinite(slope).all() for slope in slopes)


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


@pytest.mark.slow
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


def test_sorted_quantiles():
    got = heads.sort_quantiles(np.array([[[3.0, 1.0, 2.0]], [[np.nan, 1.0, 0.0]]], np.float32))
    np.testing.assert_array_equal(got, [[[1, 2, 3]], [[np.nan] * 3]])


def test_wrong_arguments(unhooked):
    one, flat, row = np.ones(1, np.float32), np.ones((2, 3), np.float32), np.ones(2, np.float32)
    for call, message in [
        (lambda: heads.dirichlet_loss(flat, [0, 3], kl_weight=1), "labels from 0 to 2"),
        (lambda: heads.decompose_evidential(one, one, one, one), "`alpha` above 1"),
        (lambda: heads.normal_inverse_gamma(np.ones((3, 8), np.float32)), r"`raw` of shape \(\*batch, 4\)"),
        (lambda: heads.pinball_loss(flat, row, levels=[0.1, 0.1, 0.9]), "increasing"),
        (lambda: heads.pinball_loss(flat, row, levels=[10.0, 50.0, 90.0]), "Write 90 %"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_class_that_all_teachers_exclude():
    teacher = np.asarray(jnp.log(jnp.array([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])))
    student = np.log(np.array([[0.75, 0.25, 1e-9]], np.float32))
    value, slope = jax.value_and_grad(distillation.mixture_loss)(student, teacher)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    value, of_distribution = jax.value_and_grad(distribution_loss)(student, teacher)
    assert np.isfinite([value, *slope[0], *of_distribution[0]]).all()
    assert not np.isfinite(distribution_loss(student, teacher, smoothing=0.0))


@pytest.mark.parametrize("strength", [1e-6, 7.9, 8.1, 1e6])
def test_little_and_much_evidence(strength):
    """In float32; the plain formula is a difference of numbers as large as the evidence times its logarithm."""
    alpha = (strength * np.array([0.5, 0.3, 0.2])).astype(np.float32)
    points = stats.dirichlet.rvs(alpha + 1, size=3, random_state=0)
    exact = alpha.astype(np.float64)
    expected = special.gammaln(exact).sum() - special.gammaln(exact.sum()) - (exact - 1) @ np.log(points).mean(axis=0)
    found = distribution_loss(np.log(alpha), np.log(points).astype(np.float32), smoothing=0.0)
    # A logit of 13 is known to 1e-6: of the evidence 1e6 that is 1.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * max(strength, 1))


@pytest.mark.slow
def test_targets_are_predictions_with_the_rows_first(unhooked):
    teachers, x = ee.build(lambda key: eqx.nn.Linear(3, 3, key=key), 4, key=KEY), jax.random.normal(KEY, (40, 3))
    found = distillation.targets(teachers, x)
    np.testing.assert_array_equal(found, np.moveaxis(ee.predict(teachers, x), 0, 1))
    np.testing.assert_allclose(distillation.targets(teachers, x, batch_size=7), found, rtol=1e-5, atol=1e-6)
    pair = distillation.targets(teachers, x, fn=lambda model, x: (model(x)[0], jnp.exp(model(x)[1])))
    assert [x.shape for x in pair] == [(40, 4), (40, 4)]
    np.testing.assert_array_equal(distillation.split_targets(found, 2).value[1], found[:, 2:])
    broken = eqx.tree_at(lambda e: e.stacked.bias, teachers, replace_fn=lambda b: b.at[2].set(jnp.nan))
    with pytest.raises(ValueError, match=r"got NaN from members \[2\]"):
        distillation.targets(broken, x)
    with pytest.raises(ValueError, match="needs at least two teachers"):
        distribution_loss(found[:, 0], found[:, :1])
