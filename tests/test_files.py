"""Saving and loading ensembles: the result is what was saved, or an error that lists all differences."""

import functools as ft
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_ensemble as ee
from eqx_ensemble.checkpoint._read import Reader

from .factories import CASES, Attention, mlp, numbers

KEY = jax.random.key(5)


def linear(key):
    return eqx.nn.Linear(3, 2, key=key)


def assert_same(got, expected):
    """Bit for bit, also in the leaves that are no arrays."""
    a, b = numbers(got), numbers(expected)
    assert list(a) == list(b)
    for path, x in a.items():
        assert (x.dtype, x.shape, x.tobytes()) == (b[path].dtype, b[path].shape, b[path].tobytes()), path
    plain = lambda tree: [x for x in jax.tree.leaves(tree) if isinstance(x, bool | int | float | str)]
    assert plain(got) == plain(expected)


@ft.cache
def built(name):
    """An ensemble of three, with its state where there is one: compiled once for all tests."""
    return ee.build(CASES[name].make, ids=[2, 0, 7], key=KEY)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(linear, ids=[3, 1, 8, 5], key=KEY)


@pytest.fixture
def path(tmp_path, ensemble):
    ee.save(tmp_path / "e", ensemble)
    return tmp_path / "e"


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_model(name, tmp_path):
    make, made = CASES[name].make, built(name)
    ee.save(tmp_path / "e", made)
    assert ee.checkpoint.verify(tmp_path / "e").ids == (2, 0, 7)
    shapes = eqx.filter_eval_shape(lambda key: ee.build(make, 3, key=key), KEY)
    for like in (make, made, shapes):
        assert_same(ee.load(tmp_path / "e", like), made)
    for like in (make, made):
        some = numbers(ee.load(tmp_path / "e", like, members=[2, 0]))
        for path, x in numbers(made).items():
            np.testing.assert_array_equal(some[path], x[[2, 0]])


def test_shared_leaves(tmp_path):
    stacked = built("mlp").stacked
    trunk = jax.tree.map(lambda x: x[0], stacked.layers[0])
    model = eqx.combine(eqx.tree_at(lambda model: model.layers[0], stacked, trunk), built("mlp").shared)
    made = ee.from_stacked(model, shared=lambda model: model.layers[0])
    ee.save(tmp_path / "e", made)
    got = ee.load(tmp_path / "e", mlp, members=[1])
    assert_same(got.shared, made.shared)
    np.testing.assert_array_equal(got.stacked.layers[1].weight, made.stacked.layers[1].weight[1:2])


def test_ensembles_of_ensembles(tmp_path):
    make = lambda key: ee.build(linear, 2, key=key)
    made = ee.build(make, 3, key=KEY)
    ee.save(tmp_path / "e", made)
    assert_same(ee.load(tmp_path / "e", made, members=[2]), made[[2]])
    assert_same(ee.load(tmp_path / "e", make), made)


def test_members_in_any_way_an_ensemble_is_indexed(path, ensemble):
    mask = np.array([True, False, False, True])
    for index in ([0, 3], slice(1, None, 2), mask, np.array([-1, 0]), jnp.array([2]), range(2)):
        rows = list(index) if isinstance(index, range) else index
        assert_same(ee.load(path, linear, members=index), ensemble[rows])


def test_one_member_is_read_without_the_others(path, ensemble, monkeypatch):
    read, rows = Reader._read, []

    def reading(self, entry, first_row, data, count, digests):
        rows.append((entry.path, first_row, data.shape[0]))
        return read(self, entry, first_row, data, count, digests)

    monkeypatch.setattr(Reader, "_read", reading)
    ee.load(path, linear, members=[2])
    assert rows == [(where, 2, 1) for where in (".stacked.weight", ".stacked.bias", ".ids")]


def test_growing_is_as_having_built_more(tmp_path):
    ee.save(tmp_path / "e", ee.build(linear, 3, key=KEY))
    grown = ee.concatenate([ee.load(tmp_path / "e", linear), ee.build(linear, ids=[3, 4], key=KEY)])
    assert_same(grown, ee.build(linear, 5, key=KEY))


def test_merging_runs(tmp_path):
    parts = [ee.build(linear, 2, key=jax.random.key(i)) for i in range(2)]
    for i, part in enumerate(parts):
        ee.save(tmp_path / str(i), part)
    merged = ee.concatenate([ee.load(tmp_path / str(i), linear) for i in range(2)], renumber=True)
    assert_same(merged, ee.concatenate(parts, renumber=True))


def test_one_model(tmp_path):
    model = Attention(KEY)
    ee.save(tmp_path / "m", model)
    for like in (Attention, model, eqx.filter_eval_shape(Attention, KEY)):
        assert_same(ee.load(tmp_path / "m", like), model)
    with pytest.raises(ValueError, match="cannot choose members of .*: it was saved without members"):
        ee.load(tmp_path / "m", Attention, members=[0])


def test_a_training_state(tmp_path, ensemble):
    state = ee.train.init(ensemble, optax.adam(1e-3), key=KEY)
    ee.save(tmp_path / "s", state)
    assert_same(ee.load(tmp_path / "s", state), state)


def test_trees_around_ensembles(tmp_path, ensemble):
    tree = {"e": ensemble, "x": ee.Each(jnp.arange(8).reshape(4, 2)), "lr": 0.1}
    ee.save(tmp_path / "t", tree)
    got = ee.load(tmp_path / "t", tree, members=[1, 2])
    assert_same(got["e"], ensemble[[1, 2]])
    assert got["x"].value.tolist() == [[2, 3], [4, 5]]
    ee.save(tmp_path / "x", ee.Each(np.arange(3)))
    assert ee.checkpoint.contents(tmp_path / "x").ids == (0, 1, 2)


def linear_ensemble(ids):
    return ee.build(linear, ids=list(ids), key=KEY)


def parts_of_a_tree():
    """Parts with how many members each has: none, or so many that no file can choose among them (-1)."""
    four = linear_ensemble(range(4))
    return {
        "four": (four, 4),
        "four of other ids": (linear_ensemble([7, 5, 6, 4]), 4),
        "the same four": (four, 4),
        "three": (four[:3], 3),
        "each of four": (ee.Each(jnp.arange(8.0).reshape(4, 2)), 4),
        "each of three": (ee.Each(jnp.arange(3.0)), 3),
        # Its first axis is as long as the ensemble, and is not that of the members.
        "each, another axis": (ee.Each(jnp.arange(12.0).reshape(4, 3), axis=1), -1),
        "plain": (jnp.arange(4.0), 0),
    }


def test_members_of_a_tree_are_those_of_its_one_ensemble(tmp_path):
    """Of any two parts, in either order: the members chosen by hand, or an error, but never a part without choice."""
    parts, refusals = parts_of_a_tree(), 0
    for (a, (one, n)), (b, (other, m)) in itertools.permutations(parts.items(), 2):
        tree, path = {"a": one, "b": other}, tmp_path / f"{a} {b}"
        ee.save(path, tree)
        two = isinstance(one, ee.Ensemble) and isinstance(other, ee.Ensemble)
        if two or -1 in (n, m) or len({n, m} - {0}) > 1:
            refusals += 1
            with pytest.raises(ValueError, match="cannot choose members"):
                ee.load(path, tree, members=[2, 0])
        else:
            by_hand = {name: x if x is parts["plain"][0] else ee.tree.take(x, [2, 0]) for name, x in tree.items()}
            assert_same(ee.load(path, tree, members=[2, 0]), by_hand)
    assert 0 < refusals < len(parts) * (len(parts) - 1)


def test_several_ensembles_are_named(tmp_path, ensemble):
    tree = {"actor": ensemble, "critics": (ensemble, 1)}
    ee.save(tmp_path / "t", tree)
    with pytest.raises(
        ValueError, match=r"several ensembles: at `\['actor'\]`, `\['critics'\]\[0\]`\.\nLoad all of it"
    ):
        ee.load(tmp_path / "t", tree, members=[0])


def test_saved_numbers_win(tmp_path):
    ee.save(tmp_path / "m", eqx.nn.Dropout(0.3, inference=True))
    got = ee.load(tmp_path / "m", eqx.nn.Dropout(0.5))
    assert (got.p, got.inference) == (0.3, True)


def test_a_maker_that_cannot_be_traced(tmp_path):
    def make(key):
        return eqx.tree_at(lambda m: m.bias, linear(key), jnp.asarray(np.asarray(jax.random.normal(key, (2,)))))

    made = ee.stack([make(key) for key in jax.random.split(KEY, 2)])
    ee.save(tmp_path / "e", made)
    assert_same(ee.load(tmp_path / "e", make), made)


def test_arrays_that_a_maker_hides_are_no_tracers(tmp_path):
    def make(key):
        table = jnp.arange(2.0)
        return eqx.nn.Sequential([linear(key), eqx.nn.Lambda(lambda x: x + table)])

    model = make(KEY)
    ee.save(tmp_path / "m", model)
    np.testing.assert_array_equal(ee.load(tmp_path / "m", make)(jnp.ones(3)), model(jnp.ones(3)))


def test_arrays_come_back_on_the_devices_of_like(tmp_path):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("members",)), PartitionSpec("members"))
    stacked = ee.build(linear, 4, key=KEY)
    spread = jax.tree.map(lambda x: jax.device_put(x, sharding), stacked)
    ee.save(tmp_path / "e", spread)
    got = ee.load(tmp_path / "e", spread)
    assert got.stacked.weight.sharding == sharding
    assert_same(got, stacked)
    assert len(ee.load(tmp_path / "e", linear).stacked.weight.devices()) == 1


def narrow(key):
    return eqx.nn.MLP(3, 1, 4, 1, key=key)


def wide(key):
    return eqx.nn.MLP(3, 1, 5, 1, use_bias=False, key=key)


def test_every_leaf_that_differs_is_listed(tmp_path, unhooked):
    ee.save(tmp_path / "e", ee.build(narrow, 2, key=KEY))
    with pytest.raises(ee.MemberMismatchError) as caught:
        ee.load(tmp_path / "e", wide)
    assert str(caught.value) == (
        f"`load` needs a `like` with the leaves saved in `{tmp_path}/e`; 3 differ.\n"
        "  at `.stacked.layers[0].weight`: saved f32[2,4,3], expected f32[2,5,3]\n"
        "  at `.stacked.layers[1].weight`: saved f32[2,1,4], expected f32[2,1,5]\n"
        "  at `.stacked.layers[0].bias`: saved f32[2,4], expected nothing\n"
        "`like` has the shapes and dtypes of what was saved: make it as the saved model was made."
    )


def test_a_different_function_is_noticed(tmp_path, unhooked):
    tanh = lambda key: eqx.nn.MLP(3, 1, 4, 1, activation=jnp.tanh, key=key)
    ee.save(tmp_path / "e", ee.build(narrow, 2, key=KEY))
    with pytest.raises(ee.MemberMismatchError) as caught:
        ee.load(tmp_path / "e", tanh)
    text = (
        f"`load` found equal leaves in `{tmp_path}/e`, but parts that are not arrays differ from what was saved."
        "\n  at `.shared.activation`: saved relu, expected tanh"
    )
    assert str(caught.value) == text + (
        "\nMake `like` as the saved model was made, or pass `strict=False` to take these parts from `like` as they are."
    )
    with pytest.warns(UserWarning, match="parts that are not arrays differ") as warned:
        got = ee.load(tmp_path / "e", tanh, strict=False)
    assert str(warned[0].message) == text
    assert got.shared.activation is jnp.tanh


def test_more_or_fewer_layers_are_noticed(tmp_path):
    deep = lambda key: eqx.nn.MLP(3, 1, 4, 6, key=key)
    shallow = lambda key: eqx.nn.MLP(3, 1, 4, 3, key=key)
    ee.save(tmp_path / "e", deep(KEY))
    with pytest.raises(ee.MemberMismatchError, match="expected nothing"):
        ee.load(tmp_path / "e", shallow)


def test_another_number_of_members_is_noticed(path, ensemble):
    with pytest.raises(ee.MemberMismatchError, match=r"saved f32\[4,2,3\], expected f32\[3,2,3\]"):
        ee.load(path, ensemble[:3])
    assert ee.load(path, ensemble[:3], members=[0, 1]).num_members == 2


def test_a_model_where_an_ensemble_was_saved(path, unhooked):
    with pytest.raises(ee.MemberMismatchError, match="An ensemble was saved, and `like` is not one: pass the function"):
        ee.load(path, linear(KEY))


def test_a_run_is_told_from_an_ensemble(tmp_path, ensemble, unhooked):
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    run = ee.fit(ensemble, loss, optax.sgd(0.1), jnp.ones((4, 3)), steps=1, key=KEY)
    ee.save(tmp_path / "run", run)
    for like in (linear, ensemble):
        with pytest.raises(ee.MemberMismatchError, match=r"A `Run` was saved(.|\n)*Save `run.ensemble` instead"):
            ee.load(tmp_path / "run", like)
    assert_same(ee.load(tmp_path / "run", run).ensemble, run.ensemble)


def test_an_ensemble_without_its_state_is_told(path, unhooked):
    with_state = lambda key: eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    with pytest.raises(ee.MemberMismatchError, match=r"An ensemble without its `equinox.nn.State` was saved"):
        ee.load(path, with_state)


def test_the_maker_in_place_of_the_model_replaces_nothing(path, ensemble, unhooked):
    with pytest.raises(TypeError, match=r"`save` got a function without any array(.|\n)*not its constructor"):
        ee.save(path, linear)
    assert_same(ee.load(path, linear), ensemble)


def test_keys_of_another_generator_are_noticed(tmp_path):
    ee.save(tmp_path / "k", {"key": jax.random.key(0)})
    with pytest.raises(ee.MemberMismatchError, match=r"saved key<fry>\[\], expected key<rbg>\[\]"):
        ee.load(tmp_path / "k", {"key": jax.random.key(0, impl="rbg")})


KINDS = {
    "a float": 0.5,
    "an array": jnp.ones(()),
    "an int": 3,
    "a bool": True,
    "a key": jax.random.key(0),
    "none": None,
}


@pytest.mark.parametrize("expected", KINDS)
@pytest.mark.parametrize("saved", ["a float", "an array", "a bool"])
def test_other_kinds_of_leaves_are_noticed(saved, expected, tmp_path):
    ee.save(tmp_path / "x", {"x": KINDS[saved]})
    if saved == expected:
        ee.load(tmp_path / "x", {"x": KINDS[expected]})
    else:
        with pytest.raises(ee.MemberMismatchError, match=r"at `\['x'\]`: saved .*, expected "):
            ee.load(tmp_path / "x", {"x": KINDS[expected]}, cast="like")


CASTS = [
    (np.float64([1.5]), jnp.zeros(1), True),
    (np.float32([1.5]), jnp.zeros(1, jnp.bfloat16), True),
    (np.float32([np.inf, np.nan]), jnp.zeros(2, jnp.float16), True),
    (np.float64([1e300]), jnp.zeros(1), False),
    (np.int64([7]), jnp.zeros(1, jnp.int8), True),
    (np.int64([300]), jnp.zeros(1, jnp.int8), False),
    (np.int32([-1]), jnp.zeros(1, jnp.uint32), False),
    (np.complex128([1j]), jnp.zeros(1, jnp.complex64), True),
    (np.int32([1]), jnp.zeros(1), None),
    (np.float32([1]), jnp.zeros(1, jnp.int32), None),
    (np.float32([1]), jnp.zeros(1, jnp.complex64), None),
    (np.array([True]), jnp.zeros(1, jnp.int32), None),
]


@pytest.mark.parametrize(("saved", "like", "fits"), CASTS, ids=lambda x: str(getattr(x, "dtype", x)))
def test_cast(saved, like, fits, tmp_path):
    ee.save(tmp_path / "x", [saved])
    text = "Pass `cast='like'`" if fits is not None else "expected"
    with pytest.raises(ee.MemberMismatchError, match="1 differs"):
        ee.load(tmp_path / "x", [like])
    if fits is None:
        with pytest.raises(ee.MemberMismatchError, match=text):
            ee.load(tmp_path / "x", [like], cast="like")
    elif fits:
        (got,) = ee.load(tmp_path / "x", [like], cast="like")
        assert got.dtype == like.dtype
        np.testing.assert_array_equal(np.asarray(got), saved.astype(like.dtype))
    else:
        with pytest.raises(ValueError, match="holds numbers outside"):
            ee.load(tmp_path / "x", [like], cast="like")


BAD = {
    "members of an int": (lambda p: ee.load(p, linear, members=1), TypeError, r"members=\[1\]\)\[0\]` for one model"),
    "members out of range": (lambda p: ee.load(p, linear, members=[4]), IndexError, "index 4 is out of range"),
    "members twice": (lambda p: ee.load(p, linear, members=[1, 1]), ValueError, "1"),
    "no member": (lambda p: ee.load(p, linear, members=[]), ValueError, "selects no member"),
    "no like": (lambda p: ee.load(p, None), TypeError, "needs `like`: the function that makes one member"),
    "cast to a dtype": (lambda p: ee.load(p, linear, cast=jnp.float32), ValueError, "`cast` to be one of None"),
    "meta": (lambda p: ee.save(p, linear(KEY), meta=np.ones(2)), TypeError, r"Write `array.tolist\(\)`"),
}


@pytest.mark.parametrize("name", BAD)
def test_message(unhooked, name, path):
    call, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        call(path)


def _run(folder):
    with ee.checkpoint.Checkpoints(folder / "x") as checkpoints:
        checkpoints.save(3, {"a": np.ones(2)})
        checkpoints.save(12, {"a": np.ones(2)})


def _files(*names):
    def make(folder):
        for name in names:
            (folder / "x" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "x" / name).write_bytes(b"{}")

    return make


FOLDERS = {
    "a run": (_run, r"a folder of `checkpoint.Checkpoints` \(2 checkpoints, the last one `step-000000000012`\).\n"
              r"`checkpoint.Checkpoints\('.*/x'\).restore\(like\)` reads .*`.*/x/step-000000000012`"),
    "single models": (_files("b.safetensors", "a.eqx"), r"files of single models \(`a.eqx`, `b.safetensors`\)"),
    "checkpoints": (lambda folder: [ee.save(folder / "x" / name, 1) for name in "ab"],
                    r"holds checkpoints \(`a`, `b`\).\n`load` reads one of them, `.*/x/a`"),
    "shards": (lambda folder: [ee.save(folder / "x" / name, 1) for name in ("call", "shard-000000", "shard-000001")],
               r"run of `fleet.fit\(save=...\)` \(2 shards\).\n`fleet.open_run\('.*/x', like\)` opens it"),
    "Orbax": (_files("_CHECKPOINT_METADATA", "state/x"), r"that Orbax wrote alone.\n`orbax.checkpoint` reads it"),
    "nothing": (lambda folder: (folder / "x").mkdir(), r"an empty folder.\nCheck the path"),
    "anything": (_files("{a}.py", "b", "c", "d", "e"), r"another folder \(it holds `b`, `c`, `d` and 2 more\)"),
    "a manifest of others": (_files("checkpoint.json"), r"`checkpoint.json`"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_no_checkpoint_is_described(name, tmp_path, unhooked):
    make, message = FOLDERS[name]
    make(tmp_path)
    calls = {
        "load": lambda path: ee.load(path, linear),
        "checkpoint.contents": ee.checkpoint.contents,
        "checkpoint.verify": ee.checkpoint.verify,
    }
    for function, call in calls.items():
        with pytest.raises((FileNotFoundError, ee.CheckpointCorruptError), match=message) as caught:
            call(tmp_path / "x")
        assert f"`{function}` needs the folder of one checkpoint" in str(caught.value)


def test_a_folder_of_fit_is_described(tmp_path, ensemble, unhooked):
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    ee.fit(ensemble, loss, optax.sgd(0.1), jnp.ones((4, 3)), steps=2, checkpoint=tmp_path / "x", key=KEY)
    way = r"The same call of `fit` with `checkpoint='.*/x'` gives the run; to load the .*`save\(path, ru"
    for like in (linear, ensemble):
        with pytest.raises(FileNotFoundError, match=r"folder of a run of `fit` \(1 checkpoints, the last one `step-0"):
            ee.load(tmp_path / "x", like)
        with pytest.raises(FileNotFoundError, match=way):
            ee.load(tmp_path / "x", like)
        with pytest.raises(ValueError, match=rf"one of a run of `fit`: it holds the whole training state.\n{way}"):
            ee.load(ee.checkpoint.Checkpoints(tmp_path / "x").path(2), like)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(), here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    make = lambda key: eqx.nn.Linear(3, 1, key=key)
    ensemble = ee.build(make, 2, key=jax.random.key(0))
    ee.save("~/a", ensemble)
    ee.checkpoint.Checkpoints("~/runs").save(1, ensemble)
    assert sorted(path.name for path in home.iterdir()) == ["a", "runs"]
    assert not [*here.iterdir()]
    assert ee.load("~/a", make).num_members == 2
