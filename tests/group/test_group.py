import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_ensemble as ee

from .models import KEY, LISTED, MAKERS, WIDE, assert_close, linear, looped, make_group, models, rows

X = jnp.ones(3)


@pytest.fixture(scope="module")
def group():
    return ee.group(LISTED)


@pytest.fixture(scope="module")
def of_two():
    return make_group(KEY, sizes=(2, 3))


def outputs(members):
    return np.stack([np.asarray(model(X)) for model in members])


def test_a_list_of_models_keeps_its_order(group):
    assert list(group.parts) == ["Linear", "MLP", "MLP_2"]
    assert [part.num_members for part in group.parts.values()] == [2, 2, 1]
    assert len(group) == group.num_members == 5
    np.testing.assert_array_equal(group.ids, range(5))
    assert [part.ids.tolist() for part in group.parts.values()] == [[1, 4], [0, 2], [3]]
    assert_close(group(X), outputs(LISTED))
    assert not np.allclose(jnp.concatenate([part(X) for part in group.parts.values()]), outputs(LISTED))
    for one, model in zip(group, LISTED, strict=True):
        assert eqx.tree_equal(one, model)


def test_ids_are_those_given():
    group = ee.group(LISTED[:3], ids=[7, 5, 9])
    assert group.ids.tolist() == [7, 5, 9]
    assert group["Linear"].ids.tolist() == [5]


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from(sorted(MAKERS)), min_size=1, max_size=6), st.data())
def test_members_stay_in_the_order_of_the_list_whatever_the_parts(kinds, data):
    members = models(kinds)
    group = ee.group(members)
    ids = lambda members: [float(jax.tree.leaves(eqx.filter(model, eqx.is_array))[0].ravel()[0]) for model in members]
    assert ids(group) == ids(members)
    assert len(group.parts) == len(set(kinds))
    index = data.draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, unique=True))
    some = group[index]
    assert ids(some) == ids([members[i] for i in index])
    assert some.ids.tolist() == index
    cut = data.draw(st.integers(0, len(kinds)))
    pieces = [group[piece] for piece in (slice(0, cut), slice(cut, None)) if range(len(kinds))[piece]]
    again = ee.concatenate(pieces)
    assert ids(again) == ids(members)
    assert again.ids.tolist() == group.ids.tolist()


def test_an_index_gives_a_model_a_part_or_a_smaller_group(group):
    assert eqx.tree_equal(group[-2], LISTED[3])
    assert eqx.tree_equal(group[np.int64(1)], LISTED[1])
    assert isinstance(group["MLP"], ee.Ensemble)
    for index in (slice(1, 4), [4, 0, 3], np.array([True, False, True, False, True]), jnp.array([2])):
        chosen = np.arange(5)[np.asarray(index) if not isinstance(index, slice) else index]
        some = group[index]
        assert isinstance(some, ee.Group)
        assert some.ids.tolist() == chosen.tolist()
        assert_close(some(X), outputs([LISTED[i] for i in chosen]))


def test_members_of_a_dict_come_in_its_order():
    wide, flat = ee.build(WIDE, 2, key=KEY), ee.build(linear, ids=[5], key=KEY)
    group = ee.Group({"wide": wide, "flat": flat})
    assert group.ids.tolist() == [0, 1, 5]
    assert list(group.parts) == ["flat", "wide"]
    np.testing.assert_array_equal(group(X), jnp.concatenate([wide(X), flat(X)]))
    listed = ee.Group([wide, flat, ee.build(linear, ids=[6], key=KEY)])
    assert list(listed.parts) == ["Linear", "Linear_2", "MLP"]
    assert listed.ids.tolist() == [0, 1, 5, 6]


def test_members_are_renumbered_on_request(of_two):
    assert of_two.ids.tolist() == [0, 1, 2, 3, 4]
    assert of_two["linear"].ids.tolist() == [2, 3, 4]
    joined = ee.concatenate([of_two, of_two], renumber=True)
    assert joined.ids.tolist() == list(range(10))
    assert list(joined.parts) == ["linear", "wide"]
    np.testing.assert_array_equal(joined(X), jnp.concatenate([of_two(X)] * 2))


def test_ensembles_among_groups_are_parts_of_their_own(group):
    more = ee.build(WIDE, ids=[10, 11], key=KEY)
    joined = ee.concatenate([group[:2], more, group[2:]])
    assert joined.ids.tolist() == [0, 1, 10, 11, 2, 3, 4]
    np.testing.assert_array_equal(joined["MLP_3"].ids, [10, 11])
    assert_close(joined(X), np.concatenate([outputs(LISTED[:2]), more(X), outputs(LISTED[2:])]))


def test_inputs_are_shared_or_one_each(group):
    own = rows(5)
    expected = np.stack([np.asarray(model(x)) for model, x in zip(LISTED, own, strict=True)])
    assert_close(group(ee.Each(own)), expected)
    assert_close(group(ee.Each(own.T, axis=1)), expected)
    assert_close(group(ee.Batch(rows(4))), looped(LISTED, rows(4)))


def test_it_is_a_tree(group):
    assert_close(eqx.filter_jit(lambda group, x: group[[4, 0]](x))(group, X), outputs([LISTED[4], LISTED[0]]))
    gradient = eqx.filter_grad(lambda group: jnp.sum(group(X) ** 2))(group)
    alone = eqx.filter_grad(lambda model: jnp.sum(model(X) ** 2))(LISTED[3])
    assert_close(gradient["MLP_2"].stacked.layers[0].weight[0], alone.layers[0].weight)
    back = jax.tree.unflatten(jax.tree.structure(group), jax.tree.leaves(group))
    assert list(back.parts) == list(group.parts)
    assert eqx.tree_equal(back, group)
    parts = "MLP=Ensemble[MLP](num_members=2), MLP_2=Ensemble[MLP](num_members=1)"
    assert repr(group) == f"Group(Linear=Ensemble[Linear](num_members=2), {parts})"


def test_pruning_keeps_members_and_drops_empty_parts(group):
    weights = np.array([0.5, 0.1, 0.0, 0.4, 0.0])
    some, kept = ee.prune_members(group, weights, above=0.2)
    assert some.ids.tolist() == [0, 3]
    assert list(some.parts) == ["MLP", "MLP_2"]
    np.testing.assert_allclose(kept, [5 / 9, 4 / 9], rtol=1e-6)


BAD = {
    "equal ids": (
        lambda: ee.Group({"a": ee.build(WIDE, 2, key=KEY), "b": ee.build(linear, 3, key=KEY)}),
        "ValueError: `Group` needs members with different ids, because each member's random stream follows from its "
        "id; the parts `a` and `b` both have [0, 1].\nPass `renumber=True` for the ids 0, 1, 2, ...; or build each "
        "part with its own: `build(make, ids=range(4, 8), key=key)`.",
    ),
    "a name": (
        lambda: ee.Group({"../a": ee.build(WIDE, 2, key=KEY)}),
        "ValueError: `Group` needs names of letters, digits, `_`, `-` and `.` for its parts, got '../a': a "
        "checkpoint folder of each part has its name.",
    ),
    "a name that is no string": (
        lambda: ee.Group({3: ee.build(WIDE, 2, key=KEY)}),
        "TypeError: `Group` needs a string as the name of each part, got 3.",
    ),
    "no parts": (lambda: ee.Group({}), "ValueError: `Group` needs at least one ensemble, got none."),
    "a model as a part": (
        lambda: ee.Group({"a": LISTED[0]}),
        "TypeError: `Group` needs ensembles as its parts, got a MLP at 'a'.\n`group([model, ...])` makes a group of "
        "models, `concatenate([group, ...])` of groups.",
    ),
    "an ensemble and its state": (
        lambda: ee.Group([(ee.build(WIDE, 2, key=KEY), eqx.nn.State(LISTED[0]))]),
        "TypeError: `Group` needs ensembles as its parts, got a tuple at 0.\nPass the ensemble alone, and its state "
        "to `predict` or `fit`: `state={part: state}`.",
    ),
    "ensembles as models": (
        lambda: ee.group([ee.build(WIDE, 2, key=KEY)]),
        "TypeError: `group` needs models, got an Ensemble at position 0.\n`Group([first, second])` makes a group of "
        "ensembles, `concatenate([first, second])` of groups.",
    ),
    "one model": (
        lambda: ee.group(LISTED[0]),
        "TypeError: `group` needs a sequence of models (a list, tuple or iterator), got one `MLP`.\nPut the models in "
        "a list, one per member; a model that is already stacked needs no stacking.",
    ),
    "no models": (lambda: ee.group([]), "ValueError: `group` needs at least one model, got an empty sequence."),
    "a dict of ensembles": (
        lambda: ee.group({"wide": ee.build(WIDE, 2, key=KEY)}),
        "TypeError: `group` needs a list of models, got a dict.\n`Group({name: ensemble, ...})` makes a group of "
        "ensembles. Pass models as a list: `list(models.values())`.",
    ),
    "too few ids": (
        lambda: ee.group(LISTED, ids=[0, 1]),
        "MemberMismatchError: `group` needs one id per model: 5 models, 2 ids.",
    ),
    "an unknown part": (
        lambda: ee.group(LISTED)["CNN"],
        "KeyError: \"This `Group` has no part 'CNN'; its parts are 'Linear', 'MLP', 'MLP_2'.\"",
    ),
    "an order": (
        lambda: ee.Group([ee.build(WIDE, 2, key=KEY)], order=[0, 0]),
        "ValueError: `Group` needs `order` to have each of 0 to 1 once, got [0, 0].",
    ),
    "an index of two axes": (
        lambda: ee.group(LISTED)[0, 1],
        "TypeError: A group is indexed along its members only, got (0, 1).\nWrite `group[[0, 1]]` for two members.",
    ),
    "a traced index": (
        lambda: jax.jit(lambda i: ee.group(LISTED)[i](X))(1),
        "TypeError: A `Group` needs a concrete index: its members are of several architectures, and a compiled program "
        "cannot choose among them.\nIndex a part: `group['name'][index]`.",
    ),
    "outputs of two shapes": (
        lambda: ee.group([LISTED[0], eqx.nn.Linear(3, 4, key=KEY)])(X),
        "MemberMismatchError: `Group.__call__` needs the same shape, structure and dtype from the members of all "
        "parts.\n  part `Linear`: f32[4]\n  part `MLP`: f32[2]\nPass a function of a model for each part that returns "
        "the same: `predict(group, x, fn={part: lambda model, x: ...})`.",
    ),
    "too few values": (
        lambda: ee.group(LISTED)(ee.Each(rows(4))),
        "MemberMismatchError: `Group.__call__` needs one value per member of the group: expected (5, ...), got (4, 3).",
    ),
    "a state": (
        lambda: ee.group(LISTED)(X, eqx.nn.State(LISTED[0])),
        "TypeError: A call of a `Group` takes no `equinox.nn.State`, because each part has its own kind of state.\n"
        "Call a part, `group['name'](x, state)`, or use `predict(group, x, state={'name': state})`.",
    ),
    "a map": (
        lambda: ee.map_members(norm)(ee.group(LISTED[:2])),  # of two parts of one member
        "TypeError: `map_members(norm)` needs an `Ensemble`, whose members are of one architecture, got a group.\n"
        "Map over each part: `{name: map_members(fn)(part) for name, part in group.parts.items()}`.",
    ),
    "a map over parts of different sizes": (
        lambda: ee.map_members(norm)(ee.group(LISTED), scale=ee.Each(jnp.ones(5))),
        "TypeError: `map_members(norm)` needs an `Ensemble`, whose members are of one architecture, got a group.\n"
        "Map over each part: `{name: map_members(fn)(part) for name, part in group.parts.items()}`.",
    ),
    "an average": (
        lambda: ee.average_parameters(ee.group(LISTED)),
        "TypeError: `average_parameters` needs an `Ensemble`, whose members are of one architecture, got a group.\n"
        "Pass one of its parts, `group['name']`, or each of `group.parts` in turn.",
    ),
}


def norm(model, scale=1.0):
    return scale * optax.global_norm(eqx.filter(model, eqx.is_array))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_messages(call, message):
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011
        call()
    assert f"{type(caught.value).__name__}: {caught.value}".replace("f64", "f32") == message


@pytest.mark.parametrize("use", [lambda g: g(X), lambda g: g.ids, lambda g: g[1], lambda g: ee.predict(g, rows())])
def test_a_part_of_another_size_is_noticed_wherever_members_are_joined(use):
    changed = eqx.tree_at(lambda group: group.parts["MLP"], ee.group(LISTED), ee.build(WIDE, 1, key=KEY))
    with pytest.raises(ee.MemberMismatchError, match="its parts have 4, its order 5"):
        use(changed)


def test_parts_of_one_name_are_of_one_architecture():
    first, second = (ee.Group({"a": ee.build(make, ids=[i], key=KEY)}) for i, make in enumerate([WIDE, linear]))
    with pytest.raises(ee.MemberMismatchError) as caught:
        ee.concatenate([first, second])
    assert caught.value.__notes__ == ["Both groups have a part `a`, and parts of one name become one ensemble."]
