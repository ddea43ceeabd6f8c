"""Distillation: closed forms and optima of the losses, and students that reach their teachers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import optimize, special, stats

import eqx_ensemble as ee
from eqx_ensemble.methods import distillation, heads

KEY = jax.random.key(3)
RNG = np.random.default_rng(1)
TEACHER = (2 * RNG.normal(size=(6, 4, 3))).astype(np.float32)  # (rows, members, classes)
LOGITS = RNG.normal(size=(6, 3)).astype(np.float32)
X = np.asarray(jnp.asarray(RNG.normal(size=(40, 3))))  # of the dtype of weights
MASK = np.array([True, True, False, True, True, True])
distribution_loss = distillation.distribution_loss


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_mixture_loss_is_a_divergence(temperature):
    target = special.softmax(TEACHER / temperature, axis=-1).mean(axis=1)
    found = special.softmax(LOGITS / temperature, axis=-1)
    expected = temperature**2 * special.rel_entr(target, found).sum(axis=-1)
    options = dict(temperature=temperature, reduction="none")
    found_loss = distillation.mixture_loss(LOGITS, TEACHER, **options)
    np.testing.assert_allclose(found_loss, expected, rtol=1e-5, atol=2e-5)
    mean_of_logits = special.softmax(TEACHER.mean(axis=1) / temperature, axis=-1)  # another target
    assert np.abs(special.rel_entr(mean_of_logits, found).sum(axis=-1) * temperature**2 - expected).max() > 0.05
    reached = distillation.mixture_loss(temperature * np.log(target), TEACHER, **options)
    np.testing.assert_allclose(reached, 0, atol=2e-5)


def test_a_class_that_all_teachers_exclude():
    teacher = np.asarray(jnp.log(jnp.array([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])))
    student = np.log(np.array([[0.75, 0.25, 1e-9]], np.float32))
    value, slope = jax.value_and_grad(distillation.mixture_loss)(student, teacher)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    assert np.isfinite(slope).all()
    value, slope = jax.value_and_grad(distribution_loss)(student, teacher)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
    assert not np.isfinite(distribution_loss(student, teacher, smoothing=0.0))


@pytest.mark.parametrize("temperature", [1.0, 5.0])
@pytest.mark.parametrize("smoothing", [0.0, 1e-2])
def test_the_distribution_loss_is_a_density_of_scipy(temperature, smoothing):
    points = special.softmax(TEACHER.astype(np.float64) / temperature, axis=-1)
    points = (1 - smoothing) * points + smoothing / 3
    alphas = np.exp(LOGITS / temperature)
    rows = zip(points, alphas, strict=True)
    expected = [-np.mean([stats.dirichlet.logpdf(p / p.sum(), alpha) for p in row]) for row, alpha in rows]
    found = distribution_loss(LOGITS, TEACHER, temperature=temperature, smoothing=smoothing, reduction="none")
    np.testing.assert_allclose(found, temperature**2 * np.array(expected), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(
        distribution_loss(LOGITS, TEACHER, temperature=temperature, smoothing=smoothing), found.mean(), rtol=1e-6
    )


@pytest.mark.parametrize("strength", [1e-6, 1e-2, 7.9, 8.1, 1e3, 1e6])
def test_little_and_much_evidence(strength):
    """In float32; the plain formula is a difference of numbers as large as the evidence times its logarithm."""
    points = stats.dirichlet.rvs(strength * np.array([0.5, 0.3, 0.2]) + 1, size=3, random_state=0)
    alpha = (strength * np.array([0.5, 0.3, 0.2])).astype(np.float32)
    mean_log = np.log(points).mean(axis=0)
    exact = alpha.astype(np.float64)
    expected = special.gammaln(exact).sum() - special.gammaln(exact.sum()) - (exact - 1) @ mean_log
    found = distribution_loss(np.log(alpha), np.log(points).astype(np.float32), smoothing=0.0)
    # A logit of 13 is known to 1e-6: of the evidence 1e6 that is 1.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * max(strength, 1))
    if strength == 1e6:
        plain = jax.scipy.special.gammaln
        naive = jnp.sum(plain(alpha)) - plain(jnp.sum(alpha)) - jnp.sum((alpha - 1) * mean_log.astype(np.float32))
        assert abs(float(naive) - expected) > 3 * abs(float(found) - expected)


def test_the_optimum_solves_the_digamma_equations():
    with jax.enable_x64(True):
        teacher = jnp.asarray(TEACHER[:1], jnp.float64)
        value_and_grad = jax.jit(jax.value_and_grad(lambda z: distribution_loss(z[None], teacher, smoothing=0.0)))
        found = optimize.minimize(lambda z: [np.asarray(x) for x in value_and_grad(jnp.asarray(z))], np.zeros(3),
                                  jac=True, method="BFGS", options={"gtol": 1e-11})  # fmt: skip
    alpha = np.exp(found.x)
    mean_log = special.log_softmax(TEACHER[0].astype(np.float64), axis=-1).mean(axis=0)
    residual = special.digamma(alpha.sum()) - special.digamma(alpha) + mean_log
    np.testing.assert_allclose(residual, 0, atol=1e-8)
    wrong = 2 * alpha  # the same mean
    assert np.abs(special.digamma(wrong.sum()) - special.digamma(wrong) + mean_log).max() > 0.05


def test_one_teacher_has_no_optimum(unhooked):
    """Its likelihood grows with the evidence without bound, and is refused."""
    point = TEACHER[:1, :1]
    twice = np.repeat(point, 2, axis=1)
    value = lambda strength: float(distribution_loss(point[:, 0] + np.float32(np.log(strength)), twice, smoothing=0.0))
    values = [value(strength) for strength in (1e1, 1e3, 1e5)]
    assert values[0] - values[1] > 3
    assert values[1] - values[2] > 3
    with pytest.raises(ValueError, match="needs at least two teachers.\n  got 1\n.*mixture_loss"):
        distribution_loss(LOGITS[:1], point)


def test_the_gaussian_loss_is_least_at_the_moments_of_the_mixture():
    means, variances = RNG.normal(size=(5, 4)), np.exp(RNG.normal(size=(5, 4)))
    moments = ee.combine.gaussian(means.T.astype(np.float32), variances.T.astype(np.float32))
    with jax.enable_x64(True):
        loss = lambda mean, variance: distillation.gaussian_loss(mean, variance, means, variances)
        slopes = jax.grad(loss, argnums=(0, 1))(means.mean(axis=1), variances.mean(axis=1) + means.var(axis=1))
        np.testing.assert_allclose(slopes, 0, atol=1e-12)
        within = jax.grad(loss, argnums=1)(means.mean(axis=1), variances.mean(axis=1))  # without disagreement
        assert np.abs(within).min() > 1e-4
        equal = distillation.gaussian_loss(means[:, 0], variances[:, 0], means[:, :1], variances[:, :1])
        assert abs(float(equal)) < 1e-12
    np.testing.assert_allclose(moments[0], means.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(moments[1], variances.mean(axis=1) + means.var(axis=1), rtol=1e-5)
    value = distillation.gaussian_loss(np.float32([0.3]), np.float32([2.0]), np.float32([[1.0]]), np.float32([[0.5]]))
    np.testing.assert_allclose(value, 0.5 * (np.log(4) + (0.5 + 0.49) / 2 - 1), rtol=1e-6)


@pytest.mark.parametrize("loss", [distillation.mixture_loss, distribution_loss])
def test_masked_rows_do_not_count(loss):
    logits, teacher = LOGITS.copy(), TEACHER.copy()
    logits[2], teacher[2] = np.nan, np.nan
    value, slope = jax.value_and_grad(loss)(logits, teacher, row_weights=MASK)
    np.testing.assert_allclose(value, loss(LOGITS[MASK], TEACHER[MASK]), rtol=1e-5)
    np.testing.assert_array_equal(slope[2], 0)
    weights = (1 + np.arange(len(MASK))) * MASK
    want = np.average(loss(LOGITS, TEACHER, reduction="none"), weights=weights)
    np.testing.assert_allclose(loss(logits, teacher, row_weights=weights), want, rtol=1e-5)
    rows = loss(logits, teacher, row_weights=MASK, reduction="none")
    np.testing.assert_array_equal(np.isnan(rows), ~MASK)
    mean, variance = np.moveaxis(teacher[..., :1], 1, -1)[:, 0], np.exp(logits[..., :1]) + 0 * teacher[..., 0]
    options = dict(row_weights=MASK)
    assert np.isfinite(distillation.gaussian_loss(logits[:, 0], variance[:, 0], mean, variance, **options))


@pytest.mark.slow
def test_half_precision_and_transformations():
    for loss in (distillation.mixture_loss, distribution_loss):
        expected = loss(LOGITS, TEACHER)
        half = loss(LOGITS.astype(np.float16), TEACHER.astype(np.float16))
        assert half.dtype == jnp.float32
        np.testing.assert_allclose(half, expected, rtol=1e-2)
        by_row = jax.jit(jax.vmap(loss))(LOGITS, TEACHER)
        np.testing.assert_allclose(by_row, loss(LOGITS, TEACHER, reduction="none"), rtol=1e-5)


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
    split = distillation.split_targets(found, 2)
    assert split.value.shape == (2, 40, 2, 3)
    np.testing.assert_array_equal(split.value[1], found[:, 2:])


def test_students_reach_teachers_inside_their_class(teachers):
    """As many students as teachers, on uneven batches: each becomes its own teacher."""

    def loss(model, batch, key):
        x, teacher = batch
        return distillation.mixture_loss(jax.vmap(model)(x), teacher)

    students = ee.build(linear, 4, key=jax.random.key(9))
    split = distillation.split_targets(distillation.targets(teachers, X), 4)
    run = ee.fit(students, loss, optax.adam(0.05), (X, split), epochs=250, batch_size=16, key=KEY)
    new = X[:20] + X[20:]
    probabilities = lambda ensemble: jax.nn.softmax(ee.predict(ensemble, new))
    np.testing.assert_allclose(probabilities(run.ensemble), probabilities(teachers), atol=2e-3)
    assert np.abs(probabilities(run.ensemble)[::-1] - probabilities(teachers)).max() > 0.1


@pytest.mark.slow
def test_a_student_reaches_the_distribution_with_annealing(teachers):
    """A free concentration for each row; the temperature falls from 2 to 1 as a hyper-parameter."""

    def loss(model, batch, key, hyper):
        return distribution_loss(model, batch, temperature=hyper["temperature"])

    teacher = distillation.targets(teachers, X[:5])
    student = ee.build(lambda key: jnp.zeros((5, 3)) + 0.1 * jax.random.normal(key, (5, 3)), 2, key=KEY)
    adam = optax.adam(0.1)
    state = ee.train.init(student, adam, hyper={"temperature": jnp.full(2, 2.0)}, key=KEY)
    # A logit that is small evidence at a high temperature is much at a low one: that takes most of the steps.
    for epoch, steps in enumerate((40, 40, 40, 600)):
        now = jnp.full(2, optax.linear_schedule(2.0, 1.0, 3)(epoch), jnp.float32)
        state = eqx.tree_at(lambda s: s.hyper, state, {"temperature": now})
        run = ee.fit(state, loss, adam, teacher, steps=steps, batch_size=5, shuffle=False, key=KEY)
        state = run.train_state
    points = (1 - 1e-4) * jax.nn.softmax(teacher) + 1e-4 / 3
    alpha = np.exp(np.asarray(state.ensemble.stacked, np.float64))
    strength = alpha.sum(axis=-1, keepdims=True)
    residual = special.digamma(strength) - special.digamma(alpha) + np.log(points).mean(axis=1)
    np.testing.assert_allclose(residual, 0, atol=2e-3)
    parts = heads.decompose_dirichlet(alpha[0].astype(np.float32))
    apart = ee.uncertainty.decompose_entropy(np.moveaxis(np.asarray(teacher), 1, 0))
    assert np.corrcoef(parts.epistemic, apart.epistemic)[0, 1] > 0.9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: distillation.mixture_loss(LOGITS, np.moveaxis(TEACHER, 1, 0)), r"\(6, members, 3\), got \(4, 6, 3\)"),
        (lambda: distillation.mixture_loss(LOGITS, TEACHER[:, 0]), r"`teacher` of shape \(\*batch, members, classes\)"),
        (lambda: distillation.mixture_loss(LOGITS, TEACHER[:, :0]), "needs at least one teacher.\n  got 0"),
        (lambda: distillation.mixture_loss(LOGITS, TEACHER.astype(int)), "needs floating-point `teacher`"),
        (lambda: distillation.mixture_loss(LOGITS, TEACHER, temperature=0), "a finite `temperature` above zero"),
        (lambda: distillation.mixture_loss(LOGITS, TEACHER, reduction="sum"), "`methods.distillation.mixture_loss`"),
        (lambda: distribution_loss(LOGITS, TEACHER, smoothing=1.0), "needs `smoothing` below 1, got 1.0"),
        (lambda: distillation.gaussian_loss(LOGITS[:, 0], LOGITS[:, 0] ** 2, TEACHER, TEACHER), "`teacher_mean` of"),
        (lambda: distillation.gaussian_loss(LOGITS[:, 0], LOGITS[:, 0] ** 2, TEACHER[..., 0], TEACHER[:, :2, 0]),
         "got 4 means and 2 variances"),
        (lambda: distillation.gaussian_loss(LOGITS[:, 0], LOGITS[:, 0] ** 2, TEACHER[..., 0], -np.abs(TEACHER[..., 0])),
         "variances above zero"),
        (lambda: distillation.gaussian_loss(LOGITS[:, 0], 0 * LOGITS[:, 0], TEACHER[..., 0], TEACHER[..., 0] ** 2),
         "variances above zero"),
        (lambda: distillation.split_targets(TEACHER, 3), "cannot divide 4 teachers among 3 students"),
    ],
)  # fmt: skip
def test_bad_distillation(unhooked, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_teacher_that_diverged_is_named(teachers):
    broken = eqx.tree_at(lambda e: e.stacked.bias, teachers, replace_fn=lambda b: b.at[2].set(jnp.nan))
    with pytest.raises(ValueError, match=r"those of members \[2\] are"):
        distillation.targets(broken, X)
