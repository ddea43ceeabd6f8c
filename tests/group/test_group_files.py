import re

import equinox as eqx
import numpy as np
import pytest

import eqx_ensemble as ee

from .models import KEY, NARROW, linear, make_group


@pytest.fixture(scope="module")
def group():
    return make_group(KEY, sizes=(3, 2))[[4, 0, 3, 1, 2]]


@pytest.fixture(scope="module")
def path(group, tmp_path_factory):
    path = tmp_path_factory.mktemp("group") / "saved"
    ee.save(path, group)
    return path


@pytest.mark.parametrize("like", ["the group", "its shapes", "a function of a key"])
def test_a_group_comes_back(group, path, like):
    shapes = eqx.filter_eval_shape(lambda: group)
    like = {"the group": group, "its shapes": shapes, "a function of a key": make_group}[like]
    loaded = ee.load(path, like)
    assert eqx.tree_equal(loaded, group)
    assert loaded.order == group.order
    assert loaded.ids.tolist() == [4, 0, 3, 1, 2]


@pytest.mark.parametrize("members", [[3, 0], slice(1, 4), np.array([False, True, False, False, False])])
def test_some_members(group, path, members):
    for like in (group, make_group):
        assert eqx.tree_equal(ee.load(path, like, members=members), group[members])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ("linear", "TypeError: `load`: expected an int, a slice, or a one-dimensional list.*got 'linear'"),
        ([1, 1], "ValueError: `load`: member 1 is given twice"),
        ([5], "IndexError: `load`: index 5 is out of range for 5 members"),
        (np.array(1), "TypeError: `load` needs a list of positions as `members`, got 1"),
    ],
    ids=str,
)
def test_members_are_positions(path, members, message):
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        ee.load(path, make_group, members=members)
    assert re.match(message, f"{type(caught.value).__name__}: {caught.value}")


def test_in_a_bigger_tree(group, tmp_path):
    tree = {"group": group, "weights": np.float32([0.2, 0.3, 0.1, 0.2, 0.2])}
    ee.save(tmp_path / "tree", tree)
    assert eqx.tree_equal(ee.load(tmp_path / "tree", tree), tree)


def test_on_a_mesh(group, path):
    loaded = ee.load(path, make_group, mesh=ee.make_mesh())
    assert all(len(part.stacked.weight.devices()) == 4 for name, part in loaded.parts.items() if name == "linear")
    np.testing.assert_array_equal(loaded["wide"].stacked.layers[0].weight, group["wide"].stacked.layers[0].weight)


def test_another_architecture_is_told_by_part_and_leaf(path):
    narrow = lambda key: ee.Group({"wide": ee.build(NARROW, 3, key=key), "linear": ee.build(linear, ids=[3], key=key)})
    with pytest.raises(ee.MemberMismatchError) as caught:
        ee.load(path, narrow)
    assert str(caught.value).splitlines()[1].replace("f64", "f32") == (
        "  at `.parts['wide'].stacked.layers[0].weight`: saved f32[3,8,3], expected f32[3,5,3]"
    )
    renamed = lambda key: ee.Group({"wde": make_group(key)["wide"]})
    with pytest.raises(ee.MemberMismatchError, match=r"at `.parts\['wde'\].*`: saved nothing"):
        ee.load(path, renamed)
