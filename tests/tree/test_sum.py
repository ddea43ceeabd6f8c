import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqx_ensemble import MemberMismatchError, tree

quick = settings(derandomize=True, deadline=None, max_examples=40)

L1 = [[[[1, 2], [3, 4]], [2, 3]]] * 2
L2 = [[[[2, 3], [3, 4]], [5, 3]]] * 2
L3 = [[[[7, 1], [4, 4]], [6, 2]], [[[6, 4], [3, 7]], [7, 3]]]
TOTAL = [[[[26, 11], [21, 24]], [30, 15]], [[[23, 20], [18, 33]], [33, 18]]]


def test_nested_lists_of_python_ints_stay_exact():
    result = tree.weighted_sum([L1, L2, L3], [1, 2, 3])
    assert result == TOTAL
    assert all(type(leaf) is int for leaf in jax.tree.leaves(result))


@pytest.mark.parametrize(
    "weights", [[1, 2, 3], np.array([1, 2, 3]), jnp.array([1, 2, 3]), (1, np.int8(2), jnp.array(3))]
)
def test_nested_lists_of_arrays(weights):
    result = tree.weighted_sum([jax.tree.map(jnp.asarray, x) for x in (L1, L2, L3)], weights)
    assert jax.tree.map(int, result) == TOTAL
    assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype("int32")}
    assert tree.weighted_sum([L1, L2, L3], weights) == TOTAL


def test_python_ints_beyond_64_bits():
    assert tree.weighted_sum([[2**70], [1]], [3, 2**80]) == [3 * 2**70 + 2**80]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(-(10**6), 10**6), st.integers(-(10**30), 10**30)), min_size=1, max_size=5))
@quick
def test_python_ints_against_the_formula(pairs):
    weights, values = zip(*pairs, strict=True)
    trees = [{"a": (v, [v + 1])} for v in values]
    expected = sum(w * v for w, v in pairs)
    assert tree.weighted_sum(trees, weights) == {"a": (expected, [expected + sum(weights)])}


finite = st.floats(-100, 100, width=32)


@given(st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=5))
@quick
def test_floats_against_the_formula_in_double_precision(rows):
    weights = [row[0] for row in rows]
    trees = [{"w": jnp.asarray(row[1:], jnp.float32), "x": row[1]} for row in rows]
    values = np.asarray([row[1:] for row in rows])
    bound = 1e-6 * np.abs(weights) @ np.abs(values) + 1e-30  # float32 rounds each of at most ten operations
    result = tree.weighted_sum(trees, weights)
    assert (np.abs(np.asarray(result["w"], np.float64) - weights @ values) <= bound).all()
    assert result["x"] == pytest.approx((weights @ values)[0], rel=1e-9, abs=1e-9)
    positive = np.abs(weights) + 1
    mean = tree.weighted_mean(trees, positive)
    np.testing.assert_allclose(mean["w"], positive @ values / positive.sum(), 1e-5, 1e-4)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "bool", "int4"])
def test_integer_arrays_with_integer_weights_are_exact_in_32_bits(dtype):
    leaves = [jnp.asarray([1, 0], dtype), jnp.asarray([1, 1], dtype)]
    result = tree.weighted_sum(leaves, [1000, -70_000])
    assert result.dtype == jnp.int32
    assert result.tolist() == [-69_000, -70_000]


def test_unsigned_32_bit_arrays():
    leaves = [jnp.asarray([2**31], jnp.uint32), jnp.asarray([7], jnp.uint32)]
    assert tree.weighted_sum(leaves, [1, 2]).tolist() == [2**31 + 14]
    assert tree.weighted_sum(leaves, [1, 2]).dtype == jnp.uint32
    assert tree.weighted_sum([leaf[0] * 0 + 5 for leaf in leaves], [1, -3]).tolist() == -10


@pytest.mark.parametrize("dtype", ["int8", "bool", "uint32"])
def test_integer_arrays_with_float_weights_and_means_are_floats(dtype):
    leaves = [jnp.asarray([1, 0], dtype), jnp.asarray([1, 1], dtype)]
    assert tree.weighted_sum(leaves, [0.5, 0.25]).tolist() == [0.75, 0.25]
    assert tree.weighted_sum(leaves, [0.5, 1]).dtype == jnp.float32
    for mean in (tree.weighted_mean(leaves, [1, 3]), tree.weighted_mean(leaves, np.array([1, 3]))):
        assert mean.dtype == jnp.float32
        assert mean.tolist() == [1.0, 0.75]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_summed_in_float32(dtype):
    # 256 + 1 rounds back to 256 in bfloat16, 2048 + 1 to 2048 in float16: only the sum at the end may be rounded.
    big = {"bfloat16": 256, "float16": 2048}[dtype]
    leaves = [jnp.full(2, big, dtype)] + [jnp.ones(2, dtype)] * 64
    result = tree.weighted_sum(leaves, [1] * 65)
    assert result.dtype == jnp.dtype(dtype)
    assert result.tolist() == [big + 64] * 2
    assert tree.weighted_mean(leaves[1:]).tolist() == [1, 1]


def test_complex():
    leaves = [jnp.asarray([1 + 2j, jnp.inf]), jnp.asarray([3 - 1j, 1.0])]
    result = tree.weighted_sum(leaves, [2.0, 1.0])
    assert result.dtype == jnp.complex64
    assert result.tolist() == [5 + 3j, complex(jnp.inf, 0)]
    assert tree.weighted_mean(leaves)[0] == 2 + 0.5j
    assert tree.weighted_sum([1 + 2j, 3 - 1j], [2, 1]) == 5 + 3j


def test_numpy_leaves_become_jax_arrays():
    result = tree.weighted_sum([np.float32(2.0), np.float32(3.0)], [1, 2])
    assert isinstance(result, jax.Array)
    assert result == 8.0


def test_doubles_keep_their_precision():
    with jax.enable_x64(True):
        leaves = [jnp.asarray([1.0]), jnp.asarray([2.0**-40])]
        assert tree.weighted_sum(leaves, [1.0, 0.1])[0] == 1.0 + 0.1 * 2.0**-40
        assert tree.weighted_mean(leaves, [0.1, 0.2]).dtype == jnp.float64
        assert tree.weighted_sum([jnp.asarray([2**40])] * 2, [1, 3]).tolist() == [2**42]
        assert tree.weighted_mean([jnp.asarray([1])] * 2).dtype == jnp.float64


def test_what_is_no_number_passes_through():
    make = lambda i: {"f": jnp.tanh, "s": "name", "flag": True, "n": None, "w": jnp.full(2, i)}
    result = tree.weighted_sum([make(1.0), make(2.0)], [1, 1])
    assert result["f"] is jnp.tanh
    assert (result["s"], result["flag"], result["n"]) == ("name", True, None)
    assert result["w"].tolist() == [3, 3]


def test_a_mean_keeps_the_numbers_on_which_all_agree():
    make = lambda i: {"size": 3, "rate": 0.1, "value": i, "w": jnp.full(2, i, jnp.float32)}
    result = tree.weighted_mean([make(1), make(2)], [1, 3])
    assert (result["size"], result["rate"], result["value"]) == (3, 0.1, 1.75)
    assert type(result["size"]) is int
    traced = jax.jit(lambda w: [tree.weighted_mean([make(1), make(2)], w)["value"]])(jnp.array([1.0, 3.0]))
    assert traced == [1.75]


@pytest.mark.slow
def test_a_model_soup():
    models = [eqx.nn.MLP(2, 2, 3, 2, key=jax.random.key(i)) for i in range(3)]
    soup = tree.weighted_mean(models)
    expected = sum(np.asarray(m.layers[1].weight, np.float64) for m in models) / 3
    np.testing.assert_allclose(soup.layers[1].weight, expected, 1e-6)
    assert soup.activation is models[0].activation
    # Weights need not sum to one.
    np.testing.assert_allclose(tree.weighted_mean(models, [7, 7, 7]).layers[1].weight, expected, 1e-6)


def test_a_mean_of_huge_and_tiny_weights():
    leaves = [jnp.asarray(1e30), jnp.asarray(3e30)]
    for scale in (1e-200, 1e-40, 1.0, 1e38, 1e200):
        assert float(tree.weighted_mean(leaves, [scale, scale])) == pytest.approx(2e30, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("function", [tree.weighted_sum, tree.weighted_mean])
def test_traced_weights_and_leaves_and_their_gradients(function):
    trees = [{"w": jnp.asarray([1.0, 2.0]), "h": jnp.asarray([1, 2], jnp.bfloat16), "i": 2.0 * i} for i in range(3)]
    trees = [jax.tree.map(lambda x, i=i: x * (i + 1) if eqx.is_array(x) else x, t) for i, t in enumerate(trees)]
    weights = jnp.asarray([0.2, 0.5, 0.7])
    concrete = function(trees, weights)
    traced = jax.jit(lambda w: function(trees, w))(weights)
    by_list = jax.jit(lambda w: function(trees, [w[0], w[1], w[2]]))(weights)
    for result in (traced, by_list):
        np.testing.assert_allclose(result["w"], concrete["w"], 1e-6)
        assert result["h"].dtype == jnp.bfloat16
        np.testing.assert_allclose(result["i"], concrete["i"], 1e-6)
    gradient = jax.grad(lambda w: function(trees, w)["w"].sum())(weights)
    values = np.asarray([3.0, 6.0, 9.0])
    total = 1.4
    expected = values if function is tree.weighted_sum else (values - weights @ values / total) / total
    np.testing.assert_allclose(gradient, expected, 1e-5, 1e-5)
    by_leaf = jax.grad(lambda x: function([{**trees[0], "w": x}, *trees[1:]], weights)["w"].sum())(trees[0]["w"])
    np.testing.assert_allclose(by_leaf, np.full(2, 0.2 if function is tree.weighted_sum else 0.2 / total), 1e-6)


def test_traced_integer_weights_keep_integers():
    trees = [{"a": jnp.asarray([1, 2], jnp.int8), "b": 3}, {"a": jnp.asarray([3, 4], jnp.int8), "b": 5}]
    result = jax.jit(lambda w: tree.weighted_sum(trees, w))(jnp.asarray([100, 2]))
    assert result["a"].dtype == jnp.int32
    assert result["a"].tolist() == [106, 208]
    assert result["b"].dtype == jnp.int32
    assert result["b"] == 310


WRONG = {
    "too few": ([1.0], ValueError, "needs one weight per tree; got 2 trees and 1 weights."),
    "too many": (jnp.ones(3), ValueError, "needs one weight per tree; got 2 trees and 3 weights."),
    "two axes": (jnp.ones((2, 1)), ValueError, "in a one-dimensional array; got f32[2,1]"),
    "a number": (0.5, TypeError, "a list or a one-dimensional array of weights, one per tree; got `float`"),
    "no axis": (jnp.asarray(0.5), TypeError, "got f32[]"),
    "NaN": ([1.0, float("nan")], ValueError, "needs finite weights; weight 1 is nan"),
    "infinite": (jnp.asarray([jnp.inf, 1.0]), ValueError, "needs finite weights; weight 0 is inf"),
    "words": ([1.0, "a"], TypeError, "needs real weights; weight 1 is 'a'"),
    "complex": ([1.0, 1j], TypeError, "needs real weights; weight 1 is 1j"),
    "complex array": (jnp.asarray([1.0, 1j]), TypeError, "needs real weights; weight 0 is (1+0j)"),
    "matrix in a list": ([1.0, jnp.ones(2)], TypeError, "needs real weights; weight 1 is [1.0, 1.0]"),
}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(("weights", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_weights(weights, error, text):
    for function, name in ((tree.weighted_sum, "weighted_sum"), (tree.weighted_mean, "weighted_mean")):
        with pytest.raises(error) as caught:
            function([{"a": 1.0}, {"a": 2.0}], weights)
        assert str(caught.value).startswith(f"`tree.{name}` ")
        assert text in str(caught.value)


def test_weights_that_sum_to_zero():
    with pytest.raises(ValueError, match=r"divides by the sum of the weights, which is 0: \[1, -1\]"):
        tree.weighted_mean([1.0, 2.0], [1, -1])
    assert tree.weighted_sum([1.0, 2.0], [1, -1]) == -1.0
    assert tree.weighted_sum([1.0, 2.0], [0, 0]) == 0.0
    assert tree.weighted_mean([1.0, 2.0, 4.0], [1e16, 1, -1e16]) == pytest.approx(2.0 - 3e16)


def test_integer_weights_that_do_not_fit():
    with pytest.raises(ValueError, match="weight 4294967296 does not fit int32, in which `<root>` is summed"):
        tree.weighted_sum([jnp.ones(2, jnp.int8)] * 2, [1, 2**32])


def test_keys_have_no_sum():
    trees = [{"k": jax.random.key(i), "w": jnp.ones(2)} for i in range(2)]
    for function in (tree.weighted_sum, tree.weighted_mean):
        with pytest.raises(TypeError, match=r"cannot add PRNG keys; `\['k'\]` is key<fry>\[\]"):
            function(trees, [1, 1])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"a": 1}, "expected dict with keys ['a', 'b'], got dict with keys ['a']"),
        ({"a": 1, "b": jnp.ones(3)}, "at `['b']`: expected f32[2], got f32[3]"),
        ({"a": 1, "b": jnp.ones(2, jnp.bfloat16)}, "at `['b']`: expected f32[2], got bf16[2]"),
        ({"a": True, "b": jnp.ones(2)}, "at `['a']`: expected 1, got True"),
        ({"a": jnp.asarray(1), "b": jnp.ones(2)}, "at `['a']`: expected 1, got i32[]"),
        ([1, jnp.ones(2)], "at `<root>`: expected dict, got list"),
    ],
)
def test_trees_that_differ(other, text):
    with pytest.raises(MemberMismatchError) as caught:
        tree.weighted_sum([{"a": 1, "b": jnp.ones(2)}, other], [1, 1])
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "`tree.weighted_sum` needs trees that differ only in their numbers; tree 1 differs from tree 0."
    )
    assert text in lines[1]


@pytest.mark.usefixtures("unhooked")
def test_a_single_tree_and_no_tree():
    with pytest.raises(TypeError, match="needs a sequence of trees"):
        tree.weighted_sum({"a": 1}, [1])
    with pytest.raises(ValueError, match="at least one tree"):
        tree.weighted_mean([])
    assert tree.weighted_mean(iter([1.0, 2.0])) == 1.5
