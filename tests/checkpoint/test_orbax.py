"""The format of Orbax: arrays are restored exactly, on the devices of `like`, or an error explains why not."""

import importlib.metadata

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import _disk, _orbax
from eqx_ensemble.checkpoint._read import read_manifest

from ..factories import CASES, mlp
from ..test_files import assert_same as assert_same_model
from ..test_files import built
from .orbax_tools import mesh, save, spread
from .test_roundtrip import DTYPES, NUMBERS, SHAPES, SMALL, TREES, assert_same, random_bytes

ocp = pytest.importorskip("orbax.checkpoint.experimental.v1", reason="needs orbax-checkpoint (extra `orbax`)")

# Coroutines that Orbax leaves behind when it fails, which only the garbage collector sees.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

KEY = jax.random.key(5)
REFUSED = ("uint2", "uint4")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """What power cuts do is tested elsewhere."""
    monkeypatch.setattr(_disk, "sync", lambda file: None)
    monkeypatch.setattr(_disk, "sync_folder", lambda path: None)


def roundtrip(tree, path):
    save(path, tree)
    ee.checkpoint.verify(path)
    return ee.load(path, tree)


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_model(name, tmp_path):
    make, made = CASES[name].make, built(name)
    save(tmp_path / "e", made, meta={"a": 1})
    contents = ee.checkpoint.verify(tmp_path / "e")
    assert (contents.ids, contents.meta, contents.format, contents.unchecked) == ((2, 0, 7), {"a": 1}, "orbax", ())
    for like in (make, made):
        assert_same_model(ee.load(tmp_path / "e", like), made)
    some = jax.tree.leaves(eqx.filter(ee.load(tmp_path / "e", make, members=[2, 0]), eqx.is_array))
    for x, y in zip(some, jax.tree.leaves(eqx.filter(made, eqx.is_array)), strict=True):
        assert_same(x, y[np.array([2, 0])])


@pytest.mark.parametrize("name", CASES)
def test_the_manifest_is_that_of_the_other_format(name, tmp_path):
    """The checksums too: those of arrays on many devices are those of the same arrays in one file."""
    ee.save(tmp_path / "safetensors", built(name))
    save(tmp_path / "orbax", spread(built(name), mesh(3)))
    one, other = (read_manifest(tmp_path / format) for format in ("safetensors", "orbax"))
    assert other == one._replace(file="orbax-0001", versions=other.versions)
    assert all(entry.checksum for entry in other.entries)
    assert set(other.versions) - set(one.versions) == {"orbax-checkpoint"}


@pytest.mark.parametrize("name", sorted({*DTYPES, *SMALL} - {*REFUSED}))
def test_numpy_arrays(name, tmp_path):
    dtype = np.dtype(getattr(jnp, name)) if name in (*SMALL, "bfloat16") else np.dtype(name)
    arrays = [random_bytes(shape, dtype) for shape in SHAPES]
    assert_same(roundtrip(arrays, tmp_path / "x"), arrays)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4", "bool", "complex64"])
def test_jax_arrays_on_several_devices(name, tmp_path):
    x = spread(jnp.asarray(random_bytes((8, 2), np.dtype(getattr(jnp, name)))), mesh(4))
    got = roundtrip({"x": x}, tmp_path / "x")["x"]
    assert_same(got, x)
    assert got.sharding == x.sharding


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys(kind, tmp_path):
    keys = jax.random.split(jax.random.key(3, impl=kind), 8)
    made = {"one": keys[0], "many": keys.reshape(2, 4), "spread": spread(keys, mesh(4)), "none": keys[:0]}
    got = roundtrip(made, tmp_path / "x")
    assert_same(got, made)
    assert jax.random.key_impl(got["one"]) == kind
    assert got["spread"].sharding == made["spread"].sharding


def test_python_numbers(tmp_path):
    save(tmp_path / "x", NUMBERS)
    got = ee.load(tmp_path / "x", [type(value)(0) for value in NUMBERS])
    assert [(type(x), repr(x)) for x in got if type(x) is not int] == [
        (type(x), repr(x)) for x in NUMBERS if type(x) is not int
    ]
    assert [x for x in got if type(x) is int] == [x for x in NUMBERS if type(x) is int]


@pytest.mark.parametrize("name", TREES)
def test_trees(name, tmp_path):
    got = roundtrip(TREES[name], tmp_path / "x")
    if name == "big endian":
        np.testing.assert_array_equal(got[0], TREES[name][0])
    else:
        assert_same(got, TREES[name])


def test_tied_arrays_are_saved_once_and_stay_tied(tmp_path):
    x = jnp.arange(1000.0)
    got = roundtrip({"a": x, "b": [x, jnp.arange(1000.0)]}, tmp_path / "x")
    assert got["a"] is got["b"][0]
    assert got["a"] is not got["b"][1]
    assert ee.checkpoint.contents(tmp_path / "x").num_bytes == 8000


def test_one_array_as_two_kinds(tmp_path):
    """An array that `like` has on devices at one path and in host memory at another."""
    x = spread(jnp.arange(8.0), mesh(4))
    save(tmp_path / "x", {"a": x, "b": x, "c": x})
    for like in ({"a": x, "b": np.zeros(8, np.float32), "c": x}, {"a": np.zeros(8, np.float32), "b": x, "c": x}):
        got = ee.load(tmp_path / "x", like)
        for name, leaf in like.items():
            np.testing.assert_array_equal(got[name], np.arange(8))
            assert isinstance(got[name], type(leaf))
        assert got["c"].sharding == x.sharding


def test_64_bits(tmp_path):
    with jax.enable_x64(True):
        made = {"x": spread(jnp.asarray(random_bytes((4, 3), "float64")), mesh(4)), "n": jnp.arange(2**40, 2**40 + 4)}
        assert_same(roundtrip(made, tmp_path / "x"), made)
        shapes = eqx.filter_eval_shape(lambda: made)
        save(tmp_path / "y", {"x": jnp.arange(4) / 3})
    with pytest.raises(ValueError, match="jax has 64-bit types switched off"):
        ee.load(tmp_path / "x", shapes)
    got = ee.load(tmp_path / "x", jax.tree.map(np.asarray, made))
    assert_same(got, jax.tree.map(np.asarray, made))
    like = {"x": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh(4), PartitionSpec("members")))}
    got = ee.load(tmp_path / "y", like, cast="like")["x"]
    assert_same(got, jnp.asarray((np.arange(4) / 3).astype(np.float32)))
    assert got.sharding == like["x"].sharding


def test_a_training_state(tmp_path):
    state = ee.train.init(built("mlp"), optax.adam(1e-3), key=KEY)
    save(tmp_path / "s", state)
    assert_same_model(ee.load(tmp_path / "s", state), state)


def test_other_programs_read_the_arrays(tmp_path):
    model = eqx.nn.Linear(3, 2, key=KEY)
    save(tmp_path / "m", model)
    got = ocp.load(
        tmp_path / "m" / "orbax-0001", {".weight": np.ndarray, ".bias": np.ndarray, "<checksums>": np.ndarray}
    )
    np.testing.assert_array_equal(got[".weight"], model.weight)


LAYOUTS = {
    "two devices": ((2,), PartitionSpec("members")),
    "a square": ((2, 2), PartitionSpec("members", "data")),
    "other axis": ((2, 2), PartitionSpec(None, "members")),
    "both axes on one": ((4,), PartitionSpec(None, "members")),
    "replicated": ((4,), PartitionSpec()),
    "one device": ((1,), PartitionSpec("members")),
}


@pytest.mark.parametrize("kind", ["arrays", "shapes"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_onto_another_mesh(name, kind, tmp_path):
    values = random_bytes((8, 4, 3), "float32")
    values[:, 0].view(np.uint32)[:] = 0x7FC00000 + np.arange(24).reshape(8, 3)  # many kinds of NaN
    ids = jnp.arange(8)
    save(tmp_path / "x", ee.Each(spread({"x": jnp.asarray(values), "ids": ids}, mesh(4))))
    shape, spec = LAYOUTS[name]
    sharding = NamedSharding(mesh(*shape), spec)
    like = ee.Each({"x": jax.device_put(jnp.zeros_like(values), sharding), "ids": ids})
    if kind == "shapes":
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    got = ee.load(tmp_path / "x", like).value
    assert np.asarray(got["x"]).tobytes() == values.tobytes()
    if sharding.num_devices > 1:
        assert got["x"].sharding == sharding
    assert got["ids"].devices() == {jax.devices()[0]}


def test_orbax_gets_the_sharding_of_every_array(tmp_path, monkeypatch):
    """So that no device and no host holds all of an array of which it needs a part."""
    told = {}

    class Recorder:
        Context = ocp.Context

        @staticmethod
        def load(path, like):
            told.update(like)
            return ocp.load(path, like)

    key = jax.random.split(KEY, 4)
    made = {"a": spread(jnp.ones(8), mesh(4)), "b": jnp.ones(2), "c": np.ones(2), "key": spread(key, mesh(4))}
    save(tmp_path / "x", made)
    monkeypatch.setattr(_orbax, "_orbax", lambda: Recorder)
    like = made | {"a": spread(jnp.ones(8), mesh(2))}
    assert_same(ee.load(tmp_path / "x", like), like)
    assert (told["['a']"].sharding, told["['key']"].sharding) == (like["a"].sharding, made["key"].sharding)
    assert [told[name] for name in ("['b']", "['c']", "<checksums>")] == [np.ndarray] * 3


def test_orbax_alone_takes_the_devices_it_was_saved_from(tmp_path):
    """The control: this happens without another sharding."""
    save(tmp_path / "x", {"x": spread(jnp.arange(8.0), mesh(4))})
    with pytest.warns(UserWarning, match="Sharding info not provided"):
        alone = ocp.load(tmp_path / "x" / "orbax-0001")
    assert alone["['x']"].sharding.num_devices == 4


def test_from_any_layout(tmp_path):
    values = random_bytes((8, 4, 3), "float32")
    for i, (shape, spec) in enumerate(LAYOUTS.values()):
        x = jax.device_put(jnp.asarray(values), NamedSharding(mesh(*shape), spec))
        save(tmp_path / str(i), ee.Each(x))
        assert ee.checkpoint.verify(tmp_path / str(i)).unchecked == ()
        assert ee.load(tmp_path / str(i), ee.Each(np.zeros_like(values))).value.tobytes() == values.tobytes()


def test_without_a_sharding_it_comes_back_on_the_default_device(tmp_path):
    made = built("mlp")
    save(tmp_path / "e", spread(made, mesh(3)))
    for like in (mlp, made, eqx.filter_eval_shape(lambda: made)):
        got = ee.load(tmp_path / "e", like)
        assert {d for x in jax.tree.leaves(eqx.filter(got, eqx.is_array)) for d in x.devices()} == {jax.devices()[0]}
        assert_same_model(got, made)


def test_members_of_arrays_on_several_devices(tmp_path):
    save(tmp_path / "e", spread(built("mlp"), mesh(3)))
    got = ee.load(tmp_path / "e", spread(built("mlp"), mesh(1)), members=[2, 1])
    assert_same_model(got, built("mlp")[[2, 1]])


def test_a_sharding_that_does_not_fit(tmp_path):
    save(tmp_path / "x", {"x": jnp.zeros((3, 2))})
    like = {"x": jax.ShapeDtypeStruct((3, 2), jnp.float32, sharding=NamedSharding(mesh(4), PartitionSpec("members")))}
    with pytest.raises(ValueError, match=r"The leaf at `\['x'\]` cannot have the sharding of `like`: .*evenly divide"):
        ee.load(tmp_path / "x", like)


def deep(layers):
    return lambda key: eqx.nn.MLP(3, 1, 8, layers, key=key)


REFUSALS = {
    "six layers into three": (deep(6), deep(3), {}, r"layers\[6\].weight`: saved f32\[2,1,8\], expected nothing"),
    "three layers into six": (deep(3), deep(6), {}, r"layers\[6\].weight`: saved nothing, expected f32\[2,1,8\]"),
    "narrower": (
        deep(1),
        lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key),
        {},
        r"saved f32\[2,8,3\], expected f32\[2,4,3\]",
    ),
    "integers into floats": (
        lambda key: {"x": jnp.arange(3)},
        lambda key: {"x": jnp.arange(3.0)},
        {"cast": "like"},
        r"saved i32\[2,3\], expected f32\[2,3\]",
    ),
    "precision": (
        lambda key: {"x": jax.random.uniform(key, (3,))},
        lambda key: {"x": jnp.arange(3, dtype=jnp.float16)},
        {},
        r"saved f32\[2,3\], expected f16\[2,3\]\nPass `cast='like'`",
    ),
    "another function": (
        lambda key: eqx.nn.MLP(3, 1, 8, 1, jax.nn.relu, key=key),
        lambda key: eqx.nn.MLP(3, 1, 8, 1, jax.nn.tanh, key=key),
        {},
        "activation`: saved relu, expected tanh",
    ),
}


@pytest.mark.parametrize("padding", [False, True], ids=["", "where Orbax is told to pad and cut"])
@pytest.mark.parametrize("name", REFUSALS)
def test_another_model_is_refused(name, padding, tmp_path):
    saved, expected, options, message = REFUSALS[name]
    save(tmp_path / "e", ee.build(saved, 2, key=KEY))
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = padding
    context.pytree.loading.partial_load = padding
    with context, pytest.raises(ee.MemberMismatchError, match=message):
        ee.load(tmp_path / "e", expected, **options)


def test_what_orbax_alone_does(tmp_path):
    """The control: two of these load silently as something else."""
    ocp.save(tmp_path / "a", {"i": jnp.arange(3), "x": jnp.arange(6.0)})
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {name: jax.ShapeDtypeStruct((3,), jnp.float32, sharding=one) for name in ("i", "x")}
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = True
    with context:
        got = ocp.load(tmp_path / "a", like)
    assert got["i"].dtype == jnp.float32
    assert got["x"].shape == (3,)


def test_options_around_the_call_change_nothing(tmp_path):
    """A context in which Orbax stores less than its input."""
    made = {"x": jnp.asarray(random_bytes((3, 5), "float32"))}
    context = ocp.Context()
    context.array.saving.storage_options = type(context.array.saving.storage_options)(dtype=jnp.bfloat16)
    with context:
        save(tmp_path / "x", made)
        ocp.save(tmp_path / "control", made)
    assert_same(ee.load(tmp_path / "x", made), made)
    context = ocp.Context(checkpoint_layout="safetensors")
    with context:
        assert_same(ee.load(tmp_path / "x", made), made)
        with pytest.raises(Exception, match="x"):
            ocp.load(tmp_path / "control", {"x": np.ndarray})
    assert ocp.load(tmp_path / "control", {"x": np.ndarray})["x"].dtype == jnp.bfloat16


def test_casts(tmp_path):
    x = spread(jnp.asarray([1.0, 2.5, -3.0, 1e5]), mesh(4))
    save(tmp_path / "x", {"x": x})
    like = {"x": x.astype(jnp.bfloat16)}
    got = ee.load(tmp_path / "x", like, cast="like")["x"]
    assert_same(got, like["x"])
    assert got.sharding == x.sharding
    with pytest.raises(ValueError, match="holds numbers outside float16"):
        ee.load(tmp_path / "x", {"x": x.astype(jnp.float16)}, cast="like")


def test_not_strict(tmp_path):
    save(tmp_path / "m", eqx.nn.MLP(3, 1, 8, 1, jax.nn.relu, key=KEY))
    with pytest.warns(UserWarning, match="activation`: saved relu, expected tanh"):
        got = ee.load(tmp_path / "m", eqx.nn.MLP(3, 1, 8, 1, jax.nn.tanh, key=KEY), strict=False)
    assert got.activation is jax.nn.tanh


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_that_orbax_does_not_have(name, tmp_path):
    with pytest.raises(TypeError, match=rf"The leaf at `\['x'\]` is of dtype {name}, which Orbax cannot save"):
        save(tmp_path / "x", {"x": np.zeros(3, getattr(jnp, name))})
    assert list(tmp_path.iterdir()) == []


def test_traced_arrays_are_refused(tmp_path):
    with pytest.raises(TypeError, match="is traced: save outside"):
        jax.jit(lambda x: save(tmp_path / "x", {"x": x}))(jnp.ones(2))


@pytest.mark.parametrize("version", ["0.11.36", "0.12.7", "0.12.8.dev1", "1.0"])
def test_an_older_orbax_is_named(tmp_path, monkeypatch, version):
    old = version.startswith(("0.11", "0.12.7"))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    if not old:
        save(tmp_path / "m", {"x": spread(jnp.ones(4), mesh(2))})
        return
    with pytest.raises(
        ImportError, match=rf"needs orbax-checkpoint 0\.12\.8 or newer, found {version}.*\n.*ble\[orbax"
    ):
        save(tmp_path / "m", {"x": spread(jnp.ones(4), mesh(2))})
    assert list(tmp_path.iterdir()) == []
