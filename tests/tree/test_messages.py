"""The messages of the errors, and what must be an error."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import MemberMismatchError, tree

pytestmark = pytest.mark.usefixtures("unhooked")


class Layer(eqx.Module):
    weight: jax.Array


class Net(eqx.Module):
    layers: list


def _net(width, dtype=jnp.float32):
    return Net([Layer(jnp.ones((width, 2), dtype)), Layer(jnp.ones(3))])


def _mlp(width=4, depth=2, seed=0, **options):
    return eqx.nn.MLP(2, 2, width, depth, key=jax.random.key(seed), **options)


def _text(error, function, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert type(caught.value) is error
    return str(caught.value)


def test_other_size():
    assert _text(MemberMismatchError, tree.stack, [_net(4), _net(4), _net(8)]) == (
        "`tree.stack` needs models that differ only in their arrays; member 2 differs from member 0.\n"
        "  at `.layers[0].weight`: expected f32[4,2], got f32[8,2]\n"
        "Models of different sizes cannot share one stacked Module: build one ensemble per size."
    )


def test_several_members_differ():
    assert _text(MemberMismatchError, tree.stack, [_net(4), _net(8), _net(9), _net(8)]) == (
        "`tree.stack` needs models that differ only in their arrays; "
        "members 1, 2 and 3 differ from member 0.\n"
        "  at `.layers[0].weight`: expected f32[4,2], got f32[8,2] (members 1 and 3), f32[9,2] (member 2)\n"
        "Models of different sizes cannot share one stacked Module: build one ensemble per size."
    )


def test_other_dtype_is_not_promoted():
    assert _text(MemberMismatchError, tree.stack, [_net(4), _net(4, jnp.bfloat16)]) == (
        "`tree.stack` needs models that differ only in their arrays; member 1 differs from member 0.\n"
        "  at `.layers[0].weight`: expected f32[4,2], got bf16[4,2]\n"
        "Nothing is promoted silently: cast the leaves to one dtype first."
    )


def test_all_leaves_that_differ_are_listed_up_to_eight():
    lines = _text(MemberMismatchError, tree.stack, [[jnp.ones(2)] * 20, [jnp.ones(3)] * 20]).splitlines()
    assert lines[1:9] == [f"  at `[{i}]`: expected f32[2], got f32[3]" for i in range(8)]
    assert lines[9] == "  and 12 more"
    assert len(lines) == 11
    lines = _text(MemberMismatchError, tree.stack, [[jnp.ones(2)] * 8, [jnp.ones(3)] * 8]).splitlines()
    assert len(lines) == 10
    assert "more" not in "".join(lines[1:9])


@pytest.mark.slow
def test_other_depth_width_and_class():
    text = _text(MemberMismatchError, tree.stack, [_mlp(), _mlp(depth=3)])
    assert "  at `.layers`: expected tuple of 3, got tuple of 4\n  at `.depth`: expected 2, got 3\n" in text
    assert text.endswith("build one ensemble per architecture.")
    text = _text(MemberMismatchError, tree.stack, [_mlp(), _mlp(8)])
    assert "at `.layers[0].weight`: expected f32[4,2], got f32[8,2]" in text
    assert "at `.width_size`: expected 4, got 8" in text
    text = _text(MemberMismatchError, tree.stack, [_mlp(), eqx.nn.Identity()])
    assert "at `<root>`: expected MLP, got Identity" in text
    text = _text(MemberMismatchError, tree.stack, [_mlp(), _mlp(use_final_bias=False)])
    assert "at `.layers[2].bias`: expected f32[2], got None" in text
    text = _text(MemberMismatchError, tree.stack, [_mlp(use_final_bias=False), _mlp()])
    assert "at `.layers[2].bias`: expected None, got f32[2]" in text


def test_a_class_that_is_defined_again():
    def made(module):
        class Net(eqx.Module):
            weight: jax.Array

        Net.__module__ = module
        return Net(jnp.ones(2))

    text = _text(MemberMismatchError, tree.stack, [made("nets"), made("nets")])
    again = "its cell or module ran again, so build these models again"
    assert f"at `<root>`: expected Net, got Net, another class of this name: {again}\n" in text
    text = _text(MemberMismatchError, tree.stack, [made("nets"), made("others")])
    assert "expected nets.test_a_class_that_is_defined_again.<locals>.made.<locals>.Net, got others." in text


def test_static_field():
    first, second = eqx.nn.LayerNorm(3, eps=1e-5), eqx.nn.LayerNorm(3, eps=1e-6)
    assert _text(MemberMismatchError, tree.stack, [first, first, second]) == (
        "`tree.stack` needs models that differ only in their arrays; member 2 differs from member 0.\n"
        "  at `.eps`: expected 1e-05, got 1e-06\n"
        "What is not an array is kept once for all members: make it an array, or build one ensemble per value."
    )


def test_activation_of_member_0_is_never_taken_silently():
    text = _text(MemberMismatchError, tree.stack, [_mlp(activation=jax.nn.relu), _mlp(activation=jax.nn.gelu)])
    assert "at `.activation`" in text
    text = _text(MemberMismatchError, tree.stack, [_mlp(activation=lambda x: x), _mlp(activation=lambda x: -x)])
    assert "test_messages.py:" in text


def test_python_floats():
    models = [eqx.nn.Dropout(p) for p in (0.1, 0.2, 0.1)]
    assert _text(MemberMismatchError, tree.stack, models) == (
        "`tree.stack` needs models that differ only in their arrays; member 1 differs from member 0.\n"
        "  at `.p`: expected 0.1, got 0.2\n"
        "Pass `promote_scalars=True` to stack Python floats that differ, or make them arrays."
    )
    stacked = tree.stack(models, promote_scalars=True)
    assert stacked.p.dtype == jnp.float32
    np.testing.assert_array_equal(stacked.p, np.float32([0.1, 0.2, 0.1]))
    assert stacked.inference is False
    same = tree.stack([models[0], models[2]], promote_scalars=True)
    assert same.p == 0.1
    assert type(same.p) is float
    nan = tree.stack([[float("nan")], [float("nan")]], promote_scalars=True)
    assert type(nan[0]) is float
    assert tree.stack([[0.0], [-0.0]], promote_scalars=True)[0].shape == (2,)


@pytest.mark.parametrize(
    "pair", [(1, 2), (True, False), ("a", "b"), (1.0, 1), (1, True), (0.5, None), (1 + 0j, 2 + 0j)]
)
@pytest.mark.parametrize("promote", [True, False])
def test_other_scalars_are_always_refused(pair, promote):
    text = _text(MemberMismatchError, tree.stack, [{"x": pair[0]}, {"x": pair[1]}], promote_scalars=promote)
    assert f"at `['x']`: expected {pair[0]!r}, got {pair[1]!r}" in text
    assert "promote_scalars" not in text


def test_array_against_number():
    text = _text(MemberMismatchError, tree.stack, [{"x": jnp.asarray(1.0)}, {"x": 1.0}])
    assert "at `['x']`: expected f32[], got 1.0" in text


def test_hidden_array():
    def make(value):
        return eqx.nn.Lambda(lambda x: x * value)

    assert _text(MemberMismatchError, tree.stack, [make(jnp.ones(3)), make(jnp.zeros(3))]) == (
        "`tree.stack` needs models that differ only in their arrays; member 1 differs from member 0.\n"
        "  at `.fn`: member 1 closes over an array (f32[3]) that differs from member 0's, in closure variable `value`\n"
        "Only member 0's would be used for all, since jax does not see it: make it a field of the Module."
    )


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_static_array():
    class Static(eqx.Module):
        weight: jax.Array
        scale: object = eqx.field(static=True)

    same = [Static(jnp.ones(2), np.arange(3)) for _ in range(2)]
    tree.stack(same)
    text = _text(MemberMismatchError, tree.stack, [same[0], Static(jnp.ones(2), np.arange(1, 4))])
    assert "at `.scale`: member 1 holds an array (i64[3]) that differs from member 0's\n" in text


def test_a_lambda_with_another_value():
    def make(value):
        return eqx.nn.Lambda(lambda x: x * value)

    text = _text(MemberMismatchError, tree.stack, [make(2), make(3)])
    assert "at `.fn`: expected 2, got 3 in closure variable `value`" in text


def test_containers():
    cases = [
        ({"a": jnp.ones(1)}, {"b": jnp.ones(1)}, "expected dict with keys ['a'], got dict with keys ['b']"),
        ([jnp.ones(1)], (jnp.ones(1),), "expected list, got tuple"),
        ([jnp.ones(1)], [jnp.ones(1)] * 2, "expected list of 1, got list of 2"),
        ([jnp.ones(1)], jnp.ones(1), "expected [f32[1]], got f32[1]"),
        (jnp.ones(1), [jnp.ones(1)], "expected f32[1], got [f32[1]]"),
        (jax.tree_util.Partial(jnp.sin, 1.0), jax.tree_util.Partial(jnp.cos, 1.0), "at `<root>`"),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0)), "expected key<fry>[], got u32[2]"),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), "expected key<fry>[], got key<rbg>[]"),
    ]
    for first, second, text in cases:
        assert text in _text(MemberMismatchError, tree.stack, [first, second])


def test_weak_types_are_fine():
    result = tree.stack([jnp.asarray(1.0), jnp.float32(2.0)])
    assert result.tolist() == [1.0, 2.0]


Point = collections.namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    "single",
    [_mlp(), eqx.nn.Sequential([_mlp()]), jnp.ones((2, 3)), np.ones((2, 3)), {"a": jnp.ones(2)}, "ab", {1, 2}, 3, None]
    + [Point(jnp.ones(2), jnp.ones(2)), jnp.tanh],
)
def test_a_single_tree_where_a_sequence_belongs(single):
    for function in (tree.stack, tree.concatenate):
        name = f"tree.{function.__name__}"
        assert _text(TypeError, function, single) == (
            f"`{name}` needs a sequence of trees (a list, tuple or iterator), got one `{type(single).__name__}`.\n"
            "Put the trees in a list, one per member; a tree that is already stacked needs no stacking."
        )


@pytest.mark.parametrize("empty", [[], (), iter([])])
def test_no_trees(empty):
    for function in (tree.stack, tree.concatenate):
        text = _text(ValueError, function, empty)
        assert text == f"`tree.{function.__name__}` needs at least one tree, got an empty sequence."


def test_sequences_of_trees(assert_same):
    made = [{"w": jnp.full(2, i)} for i in range(3)]
    expected = tree.stack(made)
    for trees in (tuple(made), iter(made), (m for m in made), dict(enumerate(made)).values(), collections.deque(made)):
        assert_same(tree.stack(trees), expected)


def test_numpy_integers_that_do_not_fit():
    text = _text(ValueError, tree.stack, [{"ids": np.array([1])}, {"ids": np.array([2**40])}])
    assert "`['ids']` holds integers outside int32: from 1099511627776 to 1099511627776" in text
    assert tree.stack([np.array([7])] * 2).dtype == jnp.int32
    with jax.enable_x64(True):
        assert tree.stack([np.array([2**40])] * 2).tolist() == [[2**40]] * 2


def test_leading_axes_that_disagree():
    wrong = {"a": jnp.ones((4, 2)), "b": jnp.ones(4), "c": jnp.ones((5, 2)), "f": jnp.tanh}
    for function, args in (
        (tree.num_members, ()),
        (tree.unstack, ()),
        (tree.take, (0,)),
        (tree.replace, (0, wrong)),
    ):
        assert _text(MemberMismatchError, function, wrong, *args) == (
            f"`tree.{function.__name__}` needs array leaves that agree on the leading `members` axis; "
            "2 of 3 have 4.\n"
            "  at `['c']`: expected 4, got f32[5,2]\n"
            "A tree that was never stacked has no `members` axis: stack a list of members first."
        )
    with pytest.raises(MemberMismatchError, match="tree.concatenate"):
        tree.concatenate([wrong])


def test_leaves_without_a_members_axis():
    text = _text(MemberMismatchError, tree.num_members, {"a": jnp.ones(2), "b": jnp.asarray(1.0)})
    assert "some have too few axes.\n  at `['b']`: f32[]\n" in text
    text = _text(MemberMismatchError, tree.unstack, {"a": jnp.ones(2)}, num_axes=2)
    assert "the 2 leading axes" in text
    text = _text(MemberMismatchError, tree.unstack, {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 4))}, num_axes=2)
    assert "agree on the 2 leading axes" in text
    text = _text(ValueError, tree.num_members, {"a": 1.0, "f": jnp.tanh})
    assert text.startswith("`tree.num_members` needs a stacked tree; this `dict` has no array leaf.")
    text = _text(ValueError, tree.unstack, {"a": jnp.ones((0, 2))})
    assert "needs at least one member" in text
    for wrong, error in ((0, ValueError), (1.0, TypeError), (True, TypeError)):
        assert "num_axes" in _text(error, tree.unstack, {"a": jnp.ones(2)}, num_axes=wrong)


STACKED = {"w": jnp.arange(8.0).reshape(4, 2), "f": jnp.tanh}


@pytest.mark.parametrize("index", [4, -5, 100, [0, 4], np.array([-5]), jnp.array(4), np.int8(4), (1, 2, 9), 2**70])
def test_index_out_of_range(index):
    for function, args in ((tree.take, ()), (tree.replace, (STACKED,))):
        text = _text(IndexError, function, STACKED, index, *args)
        assert text.startswith(f"`tree.{function.__name__}`: ")
        assert ".\nUse the position of a member" in text


@pytest.mark.parametrize(
    "index",
    [1.0, True, np.bool_(True), jnp.asarray(True), None, "a", ..., [0.0, 1.0], np.zeros((2, 2), int)]
    + [jnp.asarray(1.0), slice(0.0, 2), [[0], [1]], {0}, [None], np.zeros((4, 1), bool)],
)
def test_index_of_the_wrong_kind(index):
    with pytest.raises(
        (IndexError, TypeError, ValueError), match="(?s)`tree.take`: .*Use the position of a member, such as `0`"
    ):
        tree.take(STACKED, index)


@pytest.mark.parametrize("index", [[], (), slice(2, 2), np.zeros(0, int), [False] * 4, np.zeros(4, bool)])
def test_an_empty_selection(index):
    assert _text(ValueError, tree.take, STACKED, index) == (
        "`tree.take`: the index selects no member; an ensemble needs at least one."
    )


def test_masks(assert_same):
    expected = {"w": STACKED["w"][np.array([1, 3])], "f": jnp.tanh}
    for kind in (list, tuple, np.array, jnp.array):
        assert_same(tree.take(STACKED, kind([False, True, False, True])), expected)
        text = _text(IndexError, tree.take, STACKED, kind([False, True, True]))
        assert text.startswith("`tree.take`: boolean index did not match indexed array")
    with pytest.raises(TypeError, match="a mask selects a number of members unknown to jit"):
        eqx.filter_jit(tree.take)(STACKED, jnp.asarray([True, False, True, False]))


@pytest.mark.parametrize("index", [slice(None), slice(1, 3), slice(None, None, -1), slice(-2, None), slice(3, 0, -2)])
def test_slices(index, assert_same):
    numpy = {"w": np.arange(8).reshape(4, 2)}
    assert_same(tree.take(STACKED, index), {"w": STACKED["w"][index], "f": jnp.tanh})
    assert_same(tree.take(numpy, index), {"w": numpy["w"][index]})


def test_a_traced_index_clamps_as_documented():
    jitted = eqx.filter_jit(tree.take)
    for index, row in ((0, 0), (3, 3), (-1, 3), (9, 3), (-9, 0)):
        assert jitted(STACKED, jnp.asarray(index))["w"].tolist() == STACKED["w"][row].tolist()
    assert jitted(STACKED, jnp.asarray([0, 9, -1]))["w"].tolist() == STACKED["w"][np.array([0, 3, 3])].tolist()
    numpy = {"w": np.arange(8).reshape(4, 2)}
    assert jitted(numpy, jnp.asarray(2))["w"].tolist() == [4, 5]
    replaced = eqx.filter_jit(tree.replace)(STACKED, jnp.asarray(9), {"w": jnp.zeros(2), "f": jnp.tanh})
    assert replaced["w"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 0]]
    listed = eqx.filter_jit(lambda i: tree.take(STACKED, [i, 0])["w"])(jnp.asarray(1))
    assert listed.tolist() == [[2, 3], [0, 1]]


def test_replace_refuses_what_does_not_fit():
    one = {"w": jnp.ones(2), "f": jnp.tanh}
    assert _text(MemberMismatchError, tree.replace, STACKED, 1, {"w": jnp.ones(3), "f": jnp.tanh}) == (
        "`tree.replace` needs a value for one member; the value differs from the members.\n"
        "  at `['w']`: expected f32[2], got f32[3]\n"
        "Models of different sizes cannot share one stacked Module: build one ensemble per size."
    )
    text = _text(MemberMismatchError, tree.replace, STACKED, [0, 1], STACKED)
    assert "needs a value for 2 stacked members" in text
    assert "at `['w']`: expected f32[2,2], got f32[4,2]" in text
    text = _text(MemberMismatchError, tree.replace, STACKED, [0, 1], one)
    assert "expected f32[2,2], got f32[2]" in text
    text = _text(MemberMismatchError, tree.replace, STACKED, 1, {"w": jnp.ones(2, jnp.int32), "f": jnp.tanh})
    assert "expected f32[2], got i32[2]" in text
    text = _text(MemberMismatchError, tree.replace, STACKED, 1, {"w": jnp.ones(2), "f": jnp.sin})
    assert "at `['f']`" in text
    for index in ([1, 1], [1, -3], np.array([1, 0, 1])):
        text = _text(ValueError, tree.replace, STACKED, index, STACKED)
        assert text == "`tree.replace`: member 1 is given twice; each member once at most."


def test_concatenate_refuses_what_does_not_fit():
    def make(*shape, f=jnp.tanh, dtype=jnp.float32):
        return {"w": jnp.ones(shape, dtype), "f": f}

    assert _text(MemberMismatchError, tree.concatenate, [make(2, 3), make(5, 4)]) == (
        "`tree.concatenate` needs stacked trees of the same kind of member; tree 1 differs from tree 0.\n"
        "  at `['w']`: expected f32[5,3], got f32[5,4]\n"
        "Models of different sizes cannot share one stacked Module: build one ensemble per size."
    )
    for other in (make(2, 3, f=jnp.sin), make(2, 3, dtype=jnp.bfloat16), make(2), {"w": jnp.ones((2, 3))}):
        with pytest.raises(MemberMismatchError, match="tree 1 differs from tree 0"):
            tree.concatenate([make(2, 3), other])
    floats = [{"w": jnp.ones((1, 2)), "p": 0.1}, {"w": jnp.ones((1, 2)), "p": 0.2}]
    text = _text(MemberMismatchError, tree.concatenate, floats)
    assert "at `['p']`: expected 0.1, got 0.2" in text
    assert "promote_scalars" not in text


def test_num_members_under_transformations():
    assert tree.num_members(STACKED) == 4
    assert eqx.filter_jit(lambda x: x["w"].sum() * tree.num_members(x))(STACKED) == 28 * 4
    assert eqx.filter_eval_shape(tree.unstack, STACKED)[0]["w"].shape == (2,)


def test_more_than_three_sizes_are_trimmed():
    wrong = [jnp.ones(2)] * 3 + [jnp.ones(3)] * 2 + [jnp.ones(i) for i in range(4, 14)]
    lines = _text(MemberMismatchError, tree.num_members, wrong).splitlines()
    assert lines[0].endswith("3 of 15 have 2.")
    assert lines[-2] == "  and 4 more"
