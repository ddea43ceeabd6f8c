"""What does not count, a row or a member of weight zero, changes no value and no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .array_calls import NAMES, arguments_of, call

KEPT = np.array([True, True, False, True, True, True])
WEIGHTS = np.array([0.75, 0.0, 0.25])

# Sets of rows, drawn rows and the like are not predictions: they define themselves which rows count.
_NOT_SPOILT = ("weights", "row_weights", "new_weights", "positives", "unseen", "sets", "correct")


def _spoilt(name, member, value):
    """The call's arguments with `value` in the row, or the member, that does not count; all of them finite else."""
    arguments = arguments_of(name)
    option = {"weights": WEIGHTS} if member else {"row_weights": KEPT}
    changed = {}
    for argument, array in arguments.items():
        if argument in _NOT_SPOILT or not isinstance(array, np.ndarray) or array.dtype != np.float32:
            continue
        copy = array.copy()
        if member and array.ndim > 1 and array.shape[0] == 3:
            copy[1] = value
        elif not member and 6 in array.shape[:2]:
            copy[(slice(None),) * array.shape.index(6) + (2,)] = value
        changed[argument] = copy
    return changed, option


CASES = [(name, member) for name in NAMES for member in (False, True)
         if {False: "row_weights", True: "weights"}[member] in arguments_of(name)
         and name not in ("tree.weighted_sum", "tree.weighted_mean")]  # fmt: skip


def _numbers(result):
    return [np.asarray(x) for x in jax.tree.leaves(result) if hasattr(x, "dtype") and x.dtype != bool]


@pytest.mark.filterwarnings("ignore:.*(no minimum|best mean log score)")
@pytest.mark.parametrize("value", [np.nan, -1.0])
@pytest.mark.parametrize(("name", "member"), CASES)
def test_value(name, member, value):
    spoilt, option = _spoilt(name, member, value)
    clean, _ = _spoilt(name, member, 0.5)
    for got, want in zip(
        _numbers(call(name, **spoilt, **option)), _numbers(call(name, **clean, **option)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


WHOLE = np.array([1, 2, 0, 1, 3, 1])
TAKING = [name for name in NAMES if "row_weights" in arguments_of(name)]
COUNTING = [name for name in TAKING if name.startswith(("acquire", "conformal", "methods.density"))]
COUNTING += ["scores.excess_aurc", "scores.pit_histogram", "scores.rank_histogram"]
OTHERS = [name for name in TAKING if name not in COUNTING and not name.startswith("scores")]  # scores have their own
OTHERS.remove("calibrate.vector")  # which separates so few rows: there is no minimum to compare


@pytest.mark.filterwarnings("ignore:.*(no minimum|best mean log score)")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("calibrate") else name for name in OTHERS]
)
def test_whole_numbers_repeat_rows(name):
    repeat = lambda x: np.repeat(x, WHOLE, axis=x.shape.index(6)) if 6 in np.shape(x)[:2] else x
    options = arguments_of(name) | {"row_weights": None}
    options |= {"tolerance": 1e-6} if name.endswith("stacking") else {}
    repeated, plain = _numbers(call(name, **jax.tree.map(repeat, options))), _numbers(call(name, **options))
    got = _numbers(call(name, **(options | {"row_weights": WHOLE})))
    for one, want in zip(got, repeated, strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-6)
    assert any(one.shape != other.shape or not np.allclose(one, other) for one, other in zip(got, plain, strict=True))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.filterwarnings("ignore:.*(too few|are too few|unbounded|the sets have)")
@pytest.mark.parametrize("name", COUNTING)
def test_rows_that_are_counted(name):
    """By booleans, or numbers that are known to be zeros and ones."""
    want = _numbers(call(name, row_weights=KEPT))
    for got, same in zip(_numbers(call(name, row_weights=1.0 * KEPT)), want, strict=True):
        np.testing.assert_array_equal(got, same)
    with pytest.raises(ValueError, match=r"`row_weights` of zeros and ones.\n  got 2 at index \(1,\)"):
        call(name, row_weights=WHOLE)
    with pytest.raises(TypeError, match="boolean `row_weights`.\n  got a traced array of dtype float32"):
        jax.jit(lambda row_weights: _numbers(call(name, row_weights=row_weights)))(jnp.ones(6, jnp.float32))


_WITHOUT = {  # said in words
    *(f"calibrate.{kind}" for kind in ("temperature", "vector", "matrix", "platt", "beta", "isotonic")),
    "scores.energy_score", "scores.variogram_score",
}  # fmt: skip


@pytest.mark.slow  # compiles a gradient for every function
@pytest.mark.filterwarnings("ignore:.*(no minimum|best mean log score)")
@pytest.mark.parametrize(("name", "member"), [case for case in CASES if case[0] != "combine.stacking"])
def test_gradient(name, member):
    spoilt, option = _spoilt(name, member, np.nan)

    def total(arrays):
        leaves = jax.tree.leaves(call(name, **arrays, **option))
        leaves = [x for x in leaves if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sum(jnp.where(jnp.isfinite(x), x, 0)) for x in leaves), jnp.zeros(()))

    gradient = jax.grad(total)
    if name in _WITHOUT:
        with pytest.raises((NotImplementedError, TypeError), match=f"`{name}`"):
            gradient(spoilt)
        return
    for argument, found in gradient(spoilt).items():
        assert np.isfinite(found).all(), argument
