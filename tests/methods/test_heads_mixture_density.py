"""Mixture density heads against scipy, scores of Gaussian mixtures, and the Gaussian they contain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import eqx_ensemble as ee
from eqx_ensemble.methods import heads

RNG = np.random.default_rng(0)
LOGITS, MEAN = RNG.normal(size=(2, 4, 6, 3))  # members, rows, components
VARIANCE = np.exp(RNG.normal(size=(4, 6, 3)))
TARGETS = RNG.normal(size=6)


def density(*arrays, dtype=np.float32):
    return heads.MixtureDensity(*(np.asarray(x, dtype) for x in arrays))


def of_member(i, dtype=np.float32):
    return density(LOGITS[i], MEAN[i], VARIANCE[i], dtype=dtype)


@pytest.mark.parametrize("x64", [False, True])
def test_loss_is_the_density_of_the_mixture(x64):
    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        got = heads.mixture_density_loss(of_member(0, dtype), TARGETS.astype(dtype), reduction="none")
        assert got.dtype == dtype
    each = scipy.stats.norm(MEAN[0], np.sqrt(VARIANCE[0])).pdf(TARGETS[:, None])
    expected = -np.log(np.sum(scipy.special.softmax(LOGITS[0], axis=-1) * each, axis=-1))
    np.testing.assert_allclose(got, expected, rtol=1e-12 if x64 else 1e-5)
    assert not np.allclose(got, -np.log(np.mean(each, axis=-1)), rtol=1e-2)


def test_equal_weights_and_one_component():
    even = density(np.zeros_like(LOGITS[0]), MEAN[0], VARIANCE[0])
    as_members = (np.moveaxis(x, -1, 0) for x in even[1:])
    targets = TARGETS.astype(np.float32)
    np.testing.assert_allclose(
        heads.mixture_density_loss(even, targets), ee.scores.nll_gaussian_mixture(*as_members, targets), rtol=1e-5
    )
    one = jax.tree.map(lambda x: x[:, :1], of_member(0))
    np.testing.assert_allclose(
        heads.mixture_density_loss(one, targets),
        ee.scores.nll_gaussian(one.mean[:, 0], one.variance[:, 0], targets),
        rtol=1e-6,
    )


def test_far_targets_and_components_without_weight_have_a_finite_loss_and_gradient():
    logits = jnp.array([[0.0, -200.0]])
    head = heads.MixtureDensity(logits, jnp.array([[0.0, 40.0]]), jnp.full((1, 2), 1e-2))
    value, slope = jax.value_and_grad(lambda head: heads.mixture_density_loss(head, jnp.array([40.0])))(head)
    np.testing.assert_allclose(value, 200 + 0.5 * np.log(2 * np.pi * 1e-2), rtol=1e-5)
    assert all(np.isfinite(x).all() for x in slope)
    np.testing.assert_allclose(slope.logits, [[1, -1]], rtol=1e-5)  # pulls towards the component that is right


def test_moments():
    got = heads.mixture_density_moments(density(LOGITS, MEAN, VARIANCE))
    share = scipy.special.softmax(LOGITS, axis=-1)
    mean = np.sum(share * MEAN, axis=-1)
    np.testing.assert_allclose(got.mean, mean, rtol=1e-4)
    np.testing.assert_allclose(got.variance, np.sum(share * (VARIANCE + MEAN**2), -1) - mean**2, rtol=1e-4)
    hand = heads.mixture_density_moments(density(np.zeros(2), [-1.0, 2.0], [0.25, 1.0]))
    np.testing.assert_allclose(hand.variance, 0.625 + 2.25)


@pytest.mark.parametrize("weights", [None, np.array([0.5, 0.0, 0.3, 0.2])])
def test_components_of_all_members_are_one_mixture(weights):
    parameters = density(LOGITS, MEAN, VARIANCE)
    if weights is not None:
        parameters = jax.tree.map(lambda x: x.copy(), parameters)
        for x in parameters:
            x[1] = np.nan  # a member of weight zero
    mean, variance, shares = heads.mixture_components(parameters, weights=weights)
    assert mean.shape == (12, 6)
    np.testing.assert_allclose(shares.sum(0), np.ones(6), rtol=1e-5)
    own = np.stack([heads.mixture_density_loss(of_member(i), TARGETS, reduction="none") for i in range(4)])
    convex = np.full(4, 0.25) if weights is None else weights
    expected = -np.log(np.sum(convex[:, None] * np.exp(-own), axis=0))
    got = ee.scores.nll_gaussian_mixture(mean, variance, TARGETS.astype(np.float32), weights=shares, reduction="none")
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    whole = ee.combine.gaussian(mean, variance, weights=shares)
    moments = heads.mixture_density_moments(density(LOGITS, MEAN, VARIANCE))
    nested = ee.combine.gaussian(*moments, weights=weights)
    for a, b in zip(whole, nested, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_head():
    raw = RNG.normal(size=(7, 6)).astype(np.float32)
    logits, mean, variance = heads.mixture_density(raw, floor=1e-3)
    np.testing.assert_array_equal(logits, raw[:, :2])
    np.testing.assert_array_equal(mean, raw[:, 2:4])
    np.testing.assert_allclose(variance, np.log1p(np.exp(raw[:, 4:])) + 1e-3, rtol=1e-5)


@pytest.mark.usefixtures("unhooked")
def test_wrong_arguments():
    with pytest.raises(ValueError, match="components"):
        heads.mixture_density(np.ones((2, 4), np.float32))
    with pytest.raises(TypeError, match="of type `MixtureDensity`"):
        heads.mixture_density_loss((MEAN[0],) * 3, TARGETS)
    with pytest.raises(ValueError, match="above zero"):
        heads.mixture_density_loss(of_member(0)._replace(variance=-VARIANCE[0]), TARGETS)
    with pytest.raises(ValueError, match="targets"):
        heads.mixture_density_loss(of_member(0), TARGETS[:, None])
    with pytest.raises(ValueError, match="of one shape"):
        heads.mixture_density_moments(of_member(0)._replace(mean=MEAN[0, :, :1]))
    with pytest.raises(ValueError, match="members"):
        heads.mixture_components(density(np.zeros(2), np.zeros(2), np.ones(2)))
    with pytest.raises(ValueError, match="one weight per member"):
        heads.mixture_components(density(LOGITS, MEAN, VARIANCE), weights=np.ones(3))
