"""Random trees are preserved by stack, unstack, take, concatenate and replace, bit for bit."""

import copy
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eqx_ensemble import MemberMismatchError, tree

quick = settings(
    derandomize=True,
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# Few shapes, so that jax compiles few programs.
SHAPES = [(), (2, 3), (0, 2)]
DTYPES = ["float32", "bfloat16", "int8", "int32", "bool", "complex64", "key"]
STATIC = [None, True, 3, 0.5, float("nan"), "name", jax.nn.relu, 2 + 1j]


class Node(eqx.Module):
    left: Any
    right: Any
    tag: Any = eqx.field(static=True)


def _array(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    if dtype == "key":
        return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, (*shape, 2), dtype=np.uint32)))
    if dtype == "bool":
        return jnp.asarray(rng.integers(0, 2, shape).astype(bool))
    if dtype == "complex64":
        return jnp.asarray((rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64))
    scale = 1 if "int" not in dtype else 50
    return jnp.asarray(np.abs(rng.normal(size=shape)) * scale).astype(dtype)


class Leaf:
    """The recipe of an array leaf: every member draws its own values."""

    def __init__(self, shape, dtype, numpy):
        self.shape, self.dtype, self.numpy = shape, dtype, numpy

    def make(self, seed):
        array = _array(self.shape, self.dtype, seed)
        return np.asarray(array) if self.numpy and self.dtype != "key" else array

    def __repr__(self):
        return f"Leaf({self.shape}, {self.dtype}, {self.numpy})"


arrays = st.builds(Leaf, st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.booleans())
leaves = st.one_of(arrays, arrays, st.sampled_from(STATIC))
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), children, max_size=3),
        st.builds(Node, children, children, st.sampled_from(["x", 1, ("y", 2)])),
    ),
    max_leaves=6,
)
# At least one array, or there is nothing to stack.
recipes = st.builds(lambda first, rest: {"first": first, "rest": rest}, arrays, trees)


def make(recipe, member):
    parts, treedef = jtu.tree_flatten(recipe)
    made = [x.make((member, i)) if isinstance(x, Leaf) else x for i, x in enumerate(parts)]
    return jtu.tree_unflatten(treedef, made)


def members(recipe, count, start=0):
    return [make(recipe, start + i) for i in range(count)]


@pytest.mark.slow
@given(recipes, st.sampled_from([1, 3]))
@quick
def test_unstack_undoes_stack(assert_same, recipe, count):
    made = members(recipe, count)
    stacked = tree.stack(made)
    assert jtu.tree_structure(stacked) == jtu.tree_structure(made[0])
    assert tree.num_members(stacked) == count
    back = tree.unstack(stacked)
    assert len(back) == count
    for one, other in zip(made, back, strict=True):
        assert_same(one, other)


@pytest.mark.slow
@given(recipes, st.integers(-3, 2))
@quick
def test_take_one_is_the_member(assert_same, recipe, i):
    made = members(recipe, 3)
    assert_same(tree.take(tree.stack(made), i), made[i])
    assert_same(tree.take(tree.stack(made), np.int64(i)), made[i])


@pytest.mark.slow
@given(
    recipes, st.lists(st.integers(-3, 2), min_size=3, max_size=3), st.sampled_from([list, tuple, np.array, jnp.array])
)
@quick
def test_take_many_is_the_stack_of_members(assert_same, recipe, index, kind):
    made = members(recipe, 3)
    assert_same(tree.take(tree.stack(made), kind(index)), tree.stack([made[i] for i in index]))


@pytest.mark.slow
@given(recipes, st.sampled_from([1, 2]))
@quick
def test_concatenate_is_the_stack_of_all(assert_same, recipe, one):
    made = members(recipe, 3)
    joined = tree.concatenate([tree.stack(made[:one]), tree.stack(made[one:])])
    assert_same(joined, tree.stack(made))


@pytest.mark.slow
@given(recipes, st.permutations(range(3)), st.just(2))
@quick
def test_replace_writes_these_members_and_no_other(assert_same, recipe, order, count):
    made, new = members(recipe, 3), members(recipe, count, start=10)
    index = order[:count]
    expected = list(made)
    for i, value in zip(index, new, strict=True):
        expected[i] = value
    assert_same(tree.replace(tree.stack(made), index, tree.stack(new)), tree.stack(expected))
    expected = list(made)
    expected[index[0]] = new[0]
    assert_same(tree.replace(tree.stack(made), index[0] - 3, new[0]), tree.stack(expected))


@pytest.mark.slow
@given(recipes)
@settings(quick, max_examples=5)
def test_stack_unstack_take_work_under_jit(assert_same, recipe):
    made = members(recipe, 2)
    stacked = tree.stack(made)
    assert_same(eqx.filter_jit(tree.stack)(made), stacked)
    assert_same(eqx.filter_jit(tree.unstack)(stacked), made)
    assert_same(eqx.filter_jit(tree.take)(stacked, jnp.asarray(1)), made[1])


@pytest.mark.slow
@given(recipes)
@quick
def test_inputs_do_not_change(assert_same, recipe):
    made = members(recipe, 2)
    before = copy.deepcopy(jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, made))
    stacked = tree.stack(made)
    tree.replace(stacked, 0, made[1])
    assert_same(made, before)
    assert_same(tree.take(stacked, 0), before[0])


@pytest.mark.slow
@given(recipes, st.data())
@quick
def test_one_leaf_of_other_dtype_or_shape_is_named(recipe, data):
    made = members(recipe, 3)
    keyed = [(path, leaf) for path, leaf in jtu.tree_leaves_with_path(made[0]) if eqx.is_array(leaf)]
    path, leaf = data.draw(st.sampled_from(keyed))
    wrong = jnp.zeros((*leaf.shape, 2), jnp.int16)
    victim = data.draw(st.integers(1, 2))
    made[victim] = jtu.tree_map_with_path(lambda p, x: wrong if p == path else x, made[victim])
    with pytest.raises(MemberMismatchError) as caught:
        tree.stack(made)
    assert f"`{jtu.keystr(path)}`" in str(caught.value)
    assert f"member {victim} differs from member 0" in str(caught.value)
    assert "i16[" in str(caught.value)


def test_unstack_over_several_axes(assert_same):
    stacked = {"w": jnp.arange(24.0).reshape(2, 3, 4), "n": np.arange(6).reshape(2, 3), "f": jnp.tanh}
    nested = tree.unstack(stacked, num_axes=2)
    assert [len(inner) for inner in nested] == [3, 3]
    for i in range(2):
        for j in range(3):
            assert_same(nested[i][j], {"w": stacked["w"][i, j], "n": stacked["n"][i, j], "f": jnp.tanh})
