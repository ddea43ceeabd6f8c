"""Evidential regression against scipy's Student t distribution and integrals over the variance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from eqx_ensemble.methods import heads

RNG = np.random.default_rng(0)
ROWS = (RNG.normal(size=8), *(np.exp(RNG.normal(size=(3, 8))) + [[0.0], [1.0], [0.0]]))
TARGETS = RNG.normal(size=8)


def parameters(*values, dtype=np.float32):
    return heads.NormalInverseGamma(*(np.asarray(x, dtype) for x in values))


def student(mean, nu, alpha, beta):
    return scipy.stats.t(2 * alpha, mean, np.sqrt(beta * (1 + nu) / (nu * alpha)))


@pytest.mark.parametrize("x64", [False, True])
def test_likelihood_is_that_of_a_student_t(x64):
    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        got = heads.evidential_loss(
            parameters(*ROWS, dtype=dtype), TARGETS.astype(dtype), coefficient=0, reduction="none"
        )
        assert got.dtype == dtype
    np.testing.assert_allclose(got, -student(*ROWS).logpdf(TARGETS), rtol=1e-12 if x64 else 2e-5)
    wrong = student(ROWS[0], ROWS[1], ROWS[2] / 2, ROWS[3])
    assert not np.allclose(got, -wrong.logpdf(TARGETS), rtol=1e-2)


def test_likelihood_is_the_integral_over_mean_and_variance():
    mean, nu, alpha, beta, y = 0.3, 1.7, 2.4, 0.9, 1.1
    prior = scipy.stats.invgamma(alpha, scale=beta)
    given = lambda variance: scipy.stats.norm(mean, np.sqrt(variance * (1 + 1 / nu))).pdf(y)
    density = scipy.integrate.quad(lambda v: prior.pdf(v) * given(v), 0, np.inf)[0]
    got = heads.evidential_loss(parameters(mean, nu, alpha, beta), np.float32(y), coefficient=0)
    np.testing.assert_allclose(got, -np.log(density), rtol=1e-6)
    np.testing.assert_allclose(got, 1.29740786, rtol=1e-6)


@pytest.mark.parametrize("alpha", [1e3, 1e6])
def test_single_precision_with_much_evidence(alpha):
    values = 0.3, 1.7, alpha, alpha * 0.9
    got, slope = jax.value_and_grad(
        lambda a: heads.evidential_loss(parameters(*values)._replace(alpha=a), np.float32(1), coefficient=0)
    )(jnp.float32(alpha))
    np.testing.assert_allclose(got, -student(*values).logpdf(1.0), rtol=1e-5)
    assert np.isfinite(slope)


def test_penalty():
    # |y - m| (2 nu + alpha) by hand, in the authors' notation: (0.8) (2 * 1.7 + 2.4).
    head, y = parameters(0.3, 1.7, 2.4, 0.9), np.float32(1.1)
    plain = heads.evidential_loss(head, y, coefficient=0)
    np.testing.assert_allclose(heads.evidential_loss(head, y) - plain, 0.01 * 0.8 * 5.8, rtol=1e-5)
    np.testing.assert_allclose(heads.evidential_loss(head, y, coefficient=2.0) - plain, 2 * 0.8 * 5.8, rtol=1e-5)
    at_target = parameters(1.1, 1.7, 2.4, 0.9)
    assert heads.evidential_loss(at_target, y) == heads.evidential_loss(at_target, y, coefficient=0)
    assert np.isfinite(jax.grad(lambda m: heads.evidential_loss(at_target._replace(mean=m), y))(jnp.float32(1.1)))


def test_the_likelihood_does_not_determine_the_split():
    first = parameters(0.3, 1.7, 2.4, 0.9)
    nu = 0.1
    second = parameters(0.3, nu, 2.4, 0.9 * (2.7 / 1.7) / ((1 + nu) / nu))
    y = RNG.normal(size=5).astype(np.float32)
    row = lambda head: [heads.evidential_loss(head, t, coefficient=0) for t in y]
    np.testing.assert_allclose(row(first), row(second), rtol=1e-5)
    one, other = heads.decompose_evidential(first), heads.decompose_evidential(second)
    np.testing.assert_allclose(one.total, other.total, rtol=1e-5)
    np.testing.assert_allclose([one.epistemic, other.epistemic], [0.3781513, 0.928], rtol=1e-3)
    penalised = [heads.evidential_loss(head, y[0]) for head in (first, second)]
    assert penalised[0] > penalised[1] + 1e-3


def test_split_is_that_of_draws_and_its_sum_the_variance_of_the_student_t():
    mean, nu, alpha, beta = 0.3, 1.7, 6.4, 0.9
    parts = heads.decompose_evidential(parameters(mean, nu, alpha, beta))
    np.testing.assert_allclose(parts.total, student(mean, nu, alpha, beta).var(), rtol=1e-6)
    prior = scipy.stats.invgamma(alpha, scale=beta)
    np.testing.assert_allclose(parts.aleatoric, prior.mean(), rtol=1e-6)
    np.testing.assert_allclose(parts.epistemic, prior.expect(lambda v: v / nu), rtol=1e-6)


def test_head():
    raw = RNG.normal(size=(7, 3, 4)).astype(np.float32)
    head = heads.normal_inverse_gamma(raw, floor=0.0)
    soft = np.log1p(np.exp(raw.astype(np.float64)))
    for got, expected in zip(head, (raw[..., 0], soft[..., 1], soft[..., 2] + 1, soft[..., 3]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    far = heads.normal_inverse_gamma(np.array([0.0, -200, -200, -200], np.float32))
    assert np.isfinite(heads.decompose_evidential(far)).all()
    loss = lambda raw: heads.evidential_loss(heads.normal_inverse_gamma(raw), jnp.float32(0.5))
    assert np.isfinite(jax.grad(loss)(jnp.array([0.0, -200, -200, -200]))).all()
    assert np.isfinite(jax.grad(loss)(jnp.array([0.0, 200, 200, 200]))).all()


def test_members_are_an_axis_of_the_head_and_of_the_split():
    head = heads.normal_inverse_gamma(RNG.normal(size=(5, 7, 4)).astype(np.float32))
    parts = heads.decompose_evidential(head)
    assert parts.total.shape == (5, 7)
    alone = heads.decompose_evidential(jax.tree.map(lambda x: x[2], head))
    np.testing.assert_array_equal(parts.epistemic[2], alone.epistemic)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"nu": [0.0]}, "`nu` above 0"),
        ({"alpha": [1.0]}, "`alpha` above 1"),
        ({"beta": [-1.0]}, "`beta` above 0"),
        ({"beta": [1.0, 2.0]}, "of one shape"),
    ],
)
def test_parameters_out_of_range(changed, match):
    values = {"mean": [0.0], "nu": [1.0], "alpha": [2.0], "beta": [1.0]} | changed
    head = parameters(*values.values())
    for call in (lambda: heads.evidential_loss(head, np.zeros(1)), lambda: heads.decompose_evidential(head)):
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.usefixtures("unhooked")
def test_plain_tuples_and_wrong_sizes():
    with pytest.raises(TypeError, match="of type `NormalInverseGamma`"):
        heads.evidential_loss((np.ones(1),) * 4, np.ones(1))
    with pytest.raises(ValueError, match=r"\(\*batch, 4\)"):
        heads.normal_inverse_gamma(np.ones((3, 8), np.float32))
    with pytest.raises(ValueError, match="targets"):
        heads.evidential_loss(parameters([0.0], [1.0], [2.0], [1.0]), np.zeros((1, 1)))
    with pytest.raises(ValueError, match="coefficient"):
        heads.evidential_loss(parameters([0.0], [1.0], [2.0], [1.0]), np.zeros(1), coefficient=-1)
