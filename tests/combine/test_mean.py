import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine


def _gradient(loss, argnums=0):
    return jax.jit(jax.grad(loss, argnums))


def _put(array, index, value):
    changed = array.copy()
    changed[index] = value
    return changed


def _values(shape=(5, 7, 3), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(5,), (5, 7), (5, 2, 3, 4), (1, 6)])
def test_is_numpys_average_over_members(shape):
    values, weights = _values(shape), np.arange(1, shape[0] + 1)
    np.testing.assert_allclose(combine.mean(values), np.mean(values, axis=0), rtol=1e-5, atol=1e-6)
    weighted = combine.mean(values, weights=weights)
    np.testing.assert_allclose(weighted, np.average(values, axis=0, weights=weights), rtol=1e-5, atol=1e-6)
    if shape[0] > 1:
        assert not np.allclose(combine.mean(values, weights=weights[::-1]), weighted, atol=1e-3)


def test_weights_count_members():
    values = _values((2, 7))
    duplicated = combine.mean(values[np.array([0, 0, 1])])
    np.testing.assert_allclose(combine.mean(values, weights=np.array([2, 1])), duplicated, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(combine.mean(values, weights=np.ones(2)), combine.mean(values), rtol=1e-6)
    scaled = combine.mean(values, weights=np.array([20.0, 10.0]))
    np.testing.assert_allclose(scaled, duplicated, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_weight_zero_leaves_a_broken_member_out(broken):
    values = _put(_values((3, 4)), (1), broken)
    weights = np.array([1.0, 0.0, 3.0])
    want = combine.mean(values[np.array([0, 2])], weights=weights[np.array([0, 2])])
    np.testing.assert_array_equal(combine.mean(values, weights=weights), want)
    gradient = _gradient(lambda v: jnp.sum(combine.mean(v, weights=weights)))(values)
    np.testing.assert_allclose(gradient, np.broadcast_to([[0.25], [0.0], [0.75]], (3, 4)), rtol=1e-6)
    assert not np.isfinite(combine.mean(values)).any()


def test_half_precision_is_computed_in_float32():
    values = np.full((300, 2), 1.0078125, jnp.bfloat16)
    assert combine.mean(values).dtype == jnp.float32
    np.testing.assert_allclose(combine.mean(values), 1.0078125, rtol=1e-6)


def test_double_precision_stays():
    with jax.enable_x64(True):
        values = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)))
        assert combine.mean(values, weights=np.array([1, 2, 3])).dtype == jnp.float64
        np.testing.assert_allclose(combine.mean(values), np.mean(values, 0), rtol=1e-14)


def test_jit_vmap_and_weights_as_arguments():
    values, weights = _values((3, 4)), np.array([1.0, 2.0, 0.5], np.float32)
    eager = combine.mean(values, weights=weights)
    np.testing.assert_allclose(jax.jit(lambda v, w: combine.mean(v, weights=w))(values, weights), eager, rtol=1e-6)
    many = jax.vmap(lambda v, w: combine.mean(v, weights=w))(np.stack([values] * 2), np.stack([weights] * 2))
    np.testing.assert_allclose(many, np.stack([eager] * 2), rtol=1e-6)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("weights", "got"),
    [
        ([1.0, 2.0], "one weight per member.\n  expected shape (3,), got (2,)"),
        ([[1.0], [1.0], [1.0]], "one weight per member.\n  expected shape (3,) or (3, 2), got (3, 1)"),
        ([1.0, -2.0, 1.0], "finite `weights` of zero or more.\n  got -2.0 at index (1,), the first of 1 such"),
        ([1.0, 1.0, np.nan], "finite `weights` of zero or more.\n  got nan at index (2,)"),
        ([np.inf, 1.0, 1.0], "finite `weights` of zero or more.\n  got inf at index (0,)"),
        ([0.0, 0.0, 0.0], "`weights` that are not all zero.\n  got 3 zeros"),
    ],
)
def test_invalid_weights(weights, got):
    with pytest.raises(ValueError, match="`combine.mean` needs ") as caught:
        combine.mean(_values((3, 2)), weights=np.array(weights))
    assert got in str(caught.value)


@pytest.mark.usefixtures("unhooked")
def test_invalid_values():
    with pytest.raises(TypeError, match="floating-point `values`.\n  got dtype int32"):
        combine.mean(jnp.arange(3, dtype=jnp.int32))
    with pytest.raises(ValueError, match=r"got shape \(\)\nOne member\?.*`values\[None\]`"):
        combine.mean(jnp.float32(3))
    with pytest.raises(ValueError, match="at least one member"):
        combine.mean(np.zeros((0, 3)))


@pytest.mark.usefixtures("unhooked")
def test_traced_weights_are_checked_for_their_number():
    with pytest.raises(ValueError, match="one weight per member"):
        jax.jit(lambda w: combine.mean(np.ones((3, 2)), weights=w))(np.ones(2))


def test_log_mixture_is_the_log_of_the_mean():
    logs = 2 * _values((4, 6))
    weights = np.array([0.1, 0.2, 0.3, 0.4])
    exact = np.exp(np.asarray(logs, np.float64))
    np.testing.assert_allclose(combine.log_mixture(logs), np.log(exact.mean(0)), rtol=1e-5, atol=1e-6)
    want = np.log(np.average(exact, axis=0, weights=weights))
    np.testing.assert_allclose(combine.log_mixture(logs, weights=weights), want, rtol=1e-5, atol=1e-6)
    # The mean of the logarithms, a product of densities, would not pass.
    assert not np.allclose(np.average(logs, axis=0, weights=weights), want, rtol=1e-2)


def test_log_mixture_far_from_one_and_impossible():
    logs = np.float32([[-1e4, 300.0, -np.inf, 0.0], [-1e4 - 1, 299.0, -np.inf, -np.inf]])
    want = [-1e4 + np.log((1 + np.exp(-1)) / 2), 300 + np.log((1 + np.exp(-1)) / 2), -np.inf, -np.log(2)]
    np.testing.assert_allclose(combine.log_mixture(logs), want, rtol=1e-6)
    gradient = _gradient(lambda x: jnp.sum(combine.log_mixture(x)[jnp.array([0, 1, 3])]))(logs)
    assert np.isfinite(gradient).all()


def test_log_mixture_leave_out_weight_zero():
    logs = _values((3, 5))
    want = combine.log_mixture(logs[jnp.array([0, 2])])
    broken = jnp.asarray(logs).at[1].set(jnp.nan)
    np.testing.assert_allclose(combine.log_mixture(broken, weights=np.array([1, 0, 1])), want, rtol=1e-6)


def test_a_weight_of_zero_has_no_gradient():
    values, weights = np.float32([[np.nan], [3.0], [7.0]]), jnp.array([0.0, 1.0, 1.0])
    gradient = _gradient(lambda w: combine.mean(values, weights=w)[0])(weights)
    np.testing.assert_allclose(gradient, [0, -1, 1], rtol=1e-6)


@pytest.mark.parametrize("weight", [1e-60, 2e38])
def test_weights_of_rows_of_any_size(weight):
    values = np.array([[1.0, 1.0], [3.0, 5.0]], np.float32)
    np.testing.assert_allclose(combine.mean(values, weights=np.full((2, 2), weight)), [2, 3], rtol=1e-6)
    large = np.array([[3_000_000_000] * 2, [1_000_000_000] * 2])
    np.testing.assert_allclose(combine.mean(values, weights=large), [1.5, 2], rtol=1e-6)
