"""Distillation: closed forms and optima of the losses, and students that reach their teachers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import eqx_ensemble as ee
from eqx_ensemble.methods import distillation

KEY = jax.random.key(3)
RNG = np.random.default_rng(1)
TEACHER = (2 * RNG.normal(size=(6, 4, 3))).astype(np.float32)  # (rows, members, classes)
LOGITS = RNG.normal(size=(6, 3)).astype(np.float32)
X = np.asarray(jnp.asarray(RNG.normal(size=(40, 3))))  # of the dtype of weights
distribution_loss = distillation.distribution_loss


def mixture(logits, teacher, temperature):
    target = special.softmax(teacher / temperature, axis=-1).mean(0)
    return temperature**2 * special.rel_entr(target, special.softmax(logits / temperature)).sum()


def distribution(logits, teacher, temperature, smoothing=1e-4):
    points = (1 - smoothing) * special.softmax(teacher / temperature, axis=-1) + smoothing / teacher.shape[-1]
    of_one = [stats.dirichlet.logpdf(p / p.sum(), np.exp(logits / temperature)) for p in points]
    return -(temperature**2) * np.mean(of_one)


def gaussian(mean, variance, means, variances):
    each = np.log(variance / variances) + (variances + (means - mean) ** 2) / variance - 1
    return np.mean(each) / 2


# The loss, its options, and the loss of one row.
LOSSES = {
    "mixture": (distillation.mixture_loss, {"temperature": 4.0}, mixture),
    "distribution": (distribution_loss, {"temperature": 5.0, "smoothing": 1e-2}, distribution),
    "plain distribution": (distribution_loss, {"temperature": 1.0, "smoothing": 0.0}, distribution),
    "gaussian": (distillation.gaussian_loss, {}, gaussian),
}


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (2, 3)), ("float64", (6,))])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, dtype, shape):
    """Of rows, and their means; options may be traced."""
    loss, options, of_row = LOSSES[name]
    rng = np.random.default_rng(len(shape))
    with jax.enable_x64(dtype == "float64"):
        made = [rng.normal(size=(*shape, 3)), 2 * rng.normal(size=(*shape, 4, 3))]
        if of_row is gaussian:
            made = [f(rng.normal(size=own)) for own in (shape, (*shape, 4)) for f in (np.asarray, np.exp)]
        known = [x.astype(dtype) for x in made]
        want = [of_row(*(x[i].astype(float) for x in known), **options) for i in np.ndindex(shape)]
        want = np.reshape(want, shape)
        close = dict(rtol=1e-9, atol=1e-9) if dtype == "float64" else dict(rtol=2e-5, atol=5e-5)
        found = loss(*known, reduction="none", **options)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, want, **close)
        rows = jax.jit(lambda options: jax.vmap(lambda *given: loss(*given, **options))(*known))(options)
        np.testing.assert_allclose(rows, want.reshape(shape[0], -1).mean(1), **close)
        assert not np.allclose(loss(known[0][::-1], *known[1:], reduction="none", **options), want)
        weights = np.arange(want.size).reshape(shape)
        known[0].flat[0] = np.nan  # a row that does not count
        value, slope = jax.value_and_grad(lambda *x: loss(*x, row_weights=weights, **options))(*known)
        np.testing.assert_allclose(value, np.average(want, weights=weights), **close)
        assert np.isfinite(slope).all()


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


def linear(key):
    return eqx.nn.Linear(3, 3, key=key)


@pytest.fixture(scope="module")
def teachers():
    ensemble = ee.build(linear, 4, key=KEY)
    return eqx.tree_at(lambda e: e.stacked.weight, ensemble, replace_fn=lambda w: 3 * w)


def test_targets_are_predictions_with_the_rows_first(teachers):
    found = distillation.targets(teachers, X)
    assert found.shape == (40, 4, 3)
    np.testing.assert_array_equal(found, np.moveaxis(ee.predict(teachers, X), 0, 1))
    in_batches = distillation.targets(teachers, X, batch_size=7)
    np.testing.assert_allclose(in_batches, found, rtol=1e-5, atol=1e-6)
    pair = distillation.targets(teachers, X, fn=lambda model, x: (model(x)[0], jnp.exp(model(x)[1])))
    assert [x.shape for x in pair] == [(40, 4), (40, 4)]
    np.testing.assert_array_equal(distillation.split_targets(found, 2).value[1], found[:, 2:])
    broken = eqx.tree_at(lambda e: e.stacked.bias, teachers, replace_fn=lambda b: b.at[2].set(jnp.nan))
    with pytest.raises(ValueError, match=r"those of members \[2\] are"):
        distillation.targets(broken, X)


def test_bad_distillation(unhooked):
    with pytest.raises(ValueError, match="needs at least two teachers"):
        distribution_loss(LOGITS, TEACHER[:, :1])
    with pytest.raises(ValueError, match="variances above"):
        distillation.gaussian_loss(*np.ones((2, 6)), np.ones((6, 4)), -np.ones((6, 4)))
