"""Everything is restored bit for bit; and other programs can read the arrays."""

import collections
import dataclasses
import functools as ft
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import _disk

SMALL = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32")
DTYPES += ("float64", "bfloat16", "complex64", "complex128")
SHAPES = [(), (1,), (3,), (2, 3), (0,), (2, 0, 3), (2, 1, 1, 2)]

Pair = collections.namedtuple("Pair", ["left", "right"])


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """What power cuts do is tested elsewhere."""
    monkeypatch.setattr(_disk, "sync", lambda file: None)
    monkeypatch.setattr(_disk, "sync_folder", lambda path: None)


def bits(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert type(x) is type(y)
        if eqx.is_array(y):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            assert bits(x) == bits(y)
        else:
            assert repr(x) == repr(y)


def roundtrip(tree, path):
    ee.save(path, tree)
    ee.checkpoint.verify(path)
    return ee.load(path, tree)


def random_bytes(shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    if np.dtype(dtype).itemsize == 1 and np.dtype(dtype).name not in ("int8", "uint8"):
        raw = raw % 2  # every type has two values
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", DTYPES + SMALL)
def test_numpy_arrays(name, tmp_path):
    dtype = np.dtype(getattr(jnp, name)) if name in SMALL + ("bfloat16",) else np.dtype(name)
    tree = [random_bytes(shape, dtype) for shape in SHAPES]
    assert_same(roundtrip(tree, tmp_path / "x"), tree)


@pytest.mark.parametrize("name", ["float64", "int64", "uint64", "complex128"])
def test_64_bit_jax_arrays(name, tmp_path):
    with jax.enable_x64(True):
        tree = {"x": jnp.asarray(random_bytes((2, 3), name))}
        assert tree["x"].dtype == name
        assert_same(roundtrip(tree, tmp_path / "x"), tree)
        shapes = eqx.filter_eval_shape(lambda: tree)
    with pytest.raises(ValueError, match="jax has 64-bit types switched off"):
        ee.load(tmp_path / "x", shapes)
    assert_same(ee.load(tmp_path / "x", {"x": np.asarray(tree["x"])}), {"x": np.asarray(tree["x"])})


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys(kind, tmp_path):
    key = jax.random.key(3, impl=kind)
    tree = {"one": key, "many": jax.random.split(key, 6).reshape(2, 3), "none": jax.random.split(key, 2)[:0]}
    got = roundtrip(tree, tmp_path / "x")
    assert_same(got, tree)
    assert jax.random.key_impl(got["one"]) == jax.random.key_impl(key)


NUMBERS = [0, 1, -1, 2**200, -(10**4500), True, False, 0.0, -0.0, 0.1, 5e-324, float("inf"), float("nan")]
NUMBERS += [1j, complex(-0.0, float("inf"))]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: hex(value) if type(value) is int else repr(value))
def test_python_numbers(value, tmp_path):
    ee.save(tmp_path / "x", {"x": value})
    (got,) = ee.load(tmp_path / "x", {"x": type(value)(0)}).values()
    assert type(got) is type(value)
    assert got == value if type(value) is int else repr(got) == repr(value)


TREES = {
    "nothing": {},
    "one leaf": np.arange(3.0),
    "none": {"a": None, "b": [None, ()]},
    "containers": {"a": [1, (jnp.ones(2), 2.5)], "b": Pair(np.zeros(2, np.int8), {"c": jnp.zeros((2, 0))})},
    "odd names": {"a.b": jnp.ones(1), "": jnp.ones(2), "../../x": jnp.ones(3), "ü'\n\"\\": jnp.ones(4)},
    "names of ours": {"<checksums>": jnp.ones(1), "checkpoint.json": jnp.ones(2)},
    "functions": [jax.nn.relu, len, lambda x: x, ft.partial(max, 1), "text", jnp.ones(2)],
    "scalars of numpy": [np.float32(1.5), np.int8(3), np.bool_(True)],
    "strings of numpy": [np.array(["a", "bc"]), jnp.ones(2)],
    "big endian": [np.arange(3.0).astype(">f4").view(np.ndarray)],
    "not contiguous": [np.arange(12.0).reshape(3, 4).T, np.arange(12)[::-2], np.broadcast_to(np.float32(2), (3, 2))],
    "read only": [np.frombuffer(b"12345678", np.int32)],
}


@pytest.mark.parametrize("name", TREES)
def test_trees(name, tmp_path):
    tree = TREES[name]
    got = roundtrip(tree, tmp_path / "x")
    if name == "big endian":
        np.testing.assert_array_equal(got[0], tree[0])
    else:
        assert_same(got, tree)


def test_equal_paths_do_not_collide(tmp_path):
    @jax.tree_util.register_pytree_with_keys_class
    class Twins:
        def __init__(self, *children):
            self.children = children

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.GetAttrKey("same"), child) for child in self.children], None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(*children)

    got = roundtrip(Twins(np.zeros(2), np.ones(2), 3), tmp_path / "x")
    assert [np.mean(child) for child in got.children] == [0, 1, 3]


def test_tied_arrays_are_saved_once_and_stay_tied(tmp_path):
    x = jnp.arange(1000.0)
    got = roundtrip({"a": x, "b": [x], "c": x + 0}, tmp_path / "x")
    assert got["a"] is got["b"][0]
    assert got["a"] is not got["c"]
    assert ee.checkpoint.contents(tmp_path / "x").num_bytes == 8000


def test_other_programs_read_the_arrays(tmp_path):
    tree = {name: random_bytes((2, 3), name) for name in DTYPES if name not in ("bfloat16", "complex128")}
    tree["complex128"] = np.ones((2, 3), np.complex128)
    ee.save(tmp_path / "x", tree)
    (file,) = (tmp_path / "x").glob("*.safetensors")
    arrays = load_file(file)
    for name, x in tree.items():
        found = arrays[f"['{name}']"]
        if name == "complex128":
            found = found.view(np.complex128)[..., 0]
        assert found.dtype == x.dtype
        assert found.tobytes() == x.tobytes()


def test_the_manifest_is_json_to_read(tmp_path):
    ee.save(tmp_path / "x", {"w": jnp.ones((2, 3)), "f": jax.nn.relu}, meta={"note": [1, None, "ü"]})
    manifest = json.loads((tmp_path / "x" / "checkpoint.json").read_text())["manifest"]
    assert manifest["meta"] == {"note": [1, None, "ü"]}
    assert manifest["structure"] == {"<root>": "dict", "['f']": "relu"}
    (entry,) = manifest["entries"]
    assert (entry["path"], entry["shape"], entry["dtype"]) == ("['w']", [2, 3], "float32")


def test_contents(tmp_path):
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 2, key=key), ids=[4, 7], key=jax.random.key(0))
    ee.save(tmp_path / "x", {"e": ensemble, "p": 0.5, "k": jax.random.key(0)}, meta={"a": float("inf")})
    contents = ee.checkpoint.contents(tmp_path / "x")
    assert contents.ids == (4, 7)
    assert contents.leaves == {
        "['e'].stacked.weight": "f32[2,2,3]",
        "['e'].stacked.bias": "f32[2,2]",
        "['e'].ids": "i32[2]",
        "['p']": "0.5",
        "['k']": "key<fry>[]",
    }
    assert contents.meta == {"a": float("inf")}
    assert contents.num_bytes == 4 * (12 + 4 + 2 + 2)
    assert contents.versions["jax"] == jax.__version__
    assert contents == ee.checkpoint.verify(tmp_path / "x")


def test_a_number_of_more_digits_than_python_prints(tmp_path):
    @dataclasses.dataclass
    class Static:
        size: int

    jax.tree_util.register_dataclass(Static, [], ["size"])
    ee.save(tmp_path / "x", {"a": 10**5000, "b": Static(10**5000)})
    assert ee.checkpoint.verify(tmp_path / "x").leaves == {"['a']": hex(10**5000)}
    with pytest.raises(ee.MemberMismatchError, match="the int 0x"):
        ee.load(tmp_path / "x", {"a": 0.5})
    with pytest.raises(ValueError, match=r"`meta\['n'\]` is a number of 16610 bits(.|\n)*hex"):
        ee.save(tmp_path / "x", {}, meta={"n": 10**5000})


arrays = hnp.arrays(
    st.sampled_from(["bool", "int8", "uint16", "float32", "complex64"]), hnp.array_shapes(min_dims=0, min_side=0)
)
leaves = st.one_of(arrays, st.integers(), st.floats(), st.booleans(), st.complex_numbers())
trees = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees)
def test_any_tree(tree, tmp_path):
    assert_same(roundtrip(tree, tmp_path / "x"), tree)


def test_loaded_arrays_may_be_donated(tmp_path):
    """They use the memory that was read into; whoever overwrites it has it alone."""
    tree = {"a": np.arange(2**18, dtype=np.float32), "b": jnp.arange(2**18, dtype=jnp.float32)}
    tree["c"] = tree["b"]
    ee.save(tmp_path / "x", tree)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    first, second = ee.load(tmp_path / "x", like), ee.load(tmp_path / "x", like)
    view = np.asarray(first["b"])
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    np.testing.assert_array_equal(add(first["a"]), tree["a"] + 1)
    np.testing.assert_array_equal(view, tree["a"])
    for leaf in (first["b"], first["c"], *second.values()):
        np.testing.assert_array_equal(leaf, tree["a"])
        assert not leaf.committed
        assert not leaf.weak_type
