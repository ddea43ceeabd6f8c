"""Saving and loading: the tree that was saved, bit for bit, or an error that names file and leaf."""

import collections
import functools as ft
import os
import pathlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file

import eqx_ensemble as ee
from eqx_ensemble import _save

from .factories import CASES, Attention

KEY = jax.random.key(5)


def linear(key):
    return eqx.nn.Linear(3, 2, key=key)


def narrow(key):
    return eqx.nn.MLP(3, 1, 4, 1, key=key)


def assert_same(got, expected):
    """Bit for bit, with the same types, dtypes and structure."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not eqx.is_array(y):
            name = lambda leaf: getattr(leaf, "__name__", repr(leaf))
            assert (type(x), name(x)) == (type(y), name(y))
            continue
        assert (type(x), x.dtype, x.shape) == (type(y), y.dtype, y.shape)
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def assert_restored(tree, path):
    ee.save(path, tree)
    assert_same(ee.load(path, tree), tree)


@ft.cache
def built(name):
    """An ensemble of three, with its state where there is one."""
    return ee.build(CASES[name].make, 3, key=KEY)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(linear, 4, key=KEY)


@pytest.fixture
def path(tmp_path, ensemble):
    ee.save(tmp_path / "e", ensemble)
    return tmp_path / "e"


SMALL = ("int2", "int4", "uint4", "float8_e4m3fn", "float8_e5m2")
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
Pair = collections.namedtuple("Pair", ["left", "right"])


class TestWhatIsSavedComesBack:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", CASES)
    def test_every_kind_of_model(self, name, tmp_path):
        make, made = CASES[name].make, built(name)
        ee.save(tmp_path / "e", made)
        for like in (make, made, eqx.filter_eval_shape(lambda key: ee.build(make, 3, key=key), KEY)):
            assert_same(ee.load(tmp_path / "e", like), made)
        some = ee.load(tmp_path / "e", make, members=[2, 0])
        expected = tuple(ee.tree.take(x, [2, 0]) for x in made) if isinstance(made, tuple) else made[[2, 0]]
        assert_same(some, expected)

    @pytest.mark.parametrize("name", [*DTYPES, "bfloat16", *SMALL])
    def test_every_dtype(self, name, tmp_path):
        dtype = np.dtype(name)
        raw = lambda shape: np.arange(np.prod(shape, dtype=int) * dtype.itemsize, dtype=np.uint8) % 2
        assert_restored(
            [raw(shape).view(dtype).reshape(shape) for shape in [(), (3,), (2, 3), (0,), (2, 0)]], tmp_path / "x"
        )

    def test_64_bits(self, tmp_path):
        with jax.enable_x64(True):
            tree = {"x": jnp.arange(3.0)}
            assert_restored(tree, tmp_path / "x")
            shapes = eqx.filter_eval_shape(lambda: tree)
        with pytest.raises(ValueError, match="needs 64 bits"):
            ee.load(tmp_path / "x", shapes)

    @pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
    def test_keys(self, kind, tmp_path):
        key = jax.random.key(3, impl=kind)
        assert_restored({"one": key, "many": jax.random.split(key, 6).reshape(2, 3)}, tmp_path / "x")

    @pytest.mark.parametrize("value", [0, -(2**200), True, -0.0, 5e-324, float("inf"), float("nan"), 1j, -0.0 - 1j])
    def test_numbers(self, value, tmp_path):
        ee.save(tmp_path / "x", {"x": value})
        (got,) = ee.load(tmp_path / "x", {"x": type(value)(0)}).values()
        assert (type(got), repr(got)) == (type(value), repr(value))

    def test_trees(self, tmp_path):
        same = jnp.arange(3.0)
        for i, tree in enumerate([
            {}, np.arange(3.0), {"a": None, "b": [None, ()]}, {"a": [1, (same, 2.5)], "b": Pair(same, {"c": same})},
            {"a.b": jnp.ones(1), "": jnp.ones(2), "ü'\n\"\\": jnp.ones(3), "sha256": jnp.ones(4), "__metadata__": same},
            [jax.nn.relu, len, "text", jnp.ones(2)], [np.float32(1.5), np.int8(3), np.bool_(True)],
            [np.arange(12.0).reshape(3, 4).T, np.arange(12)[::-2], np.broadcast_to(np.float32(2), (3, 2))],
        ]):  # fmt: skip
            assert_restored(tree, tmp_path / str(i))

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.recursive(
            hnp.arrays(st.sampled_from(["bool", "uint16", "float32"]), hnp.array_shapes(min_dims=0, min_side=0))
            | st.integers()
            | st.floats(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=10,
        )
    )
    def test_any_tree(self, tmp_path, tree):
        assert_restored(tree, tmp_path / "x")

    def test_big_endian(self, tmp_path):
        ee.save(tmp_path / "x", np.arange(3.0).astype(">f4"))
        np.testing.assert_array_equal(ee.load(tmp_path / "x", np.zeros(3, np.float32)), [0, 1, 2])

    def test_equal_paths(self, tmp_path):
        @jax.tree_util.register_pytree_with_keys_class
        class Twins:
            def __init__(self, *children):
                self.children = children

            def tree_flatten_with_keys(self):
                return [(jax.tree_util.GetAttrKey("same"), child) for child in self.children], None

            @classmethod
            def tree_unflatten(cls, aux, children):
                return cls(*children)

        ee.save(tmp_path / "x", Twins(np.zeros(2), np.ones(2), 3))
        got = ee.load(tmp_path / "x", Twins(np.zeros(2), np.ones(2), 0))
        assert [np.mean(child) for child in got.children] == [0, 1, 3]

    def test_shared_leaves(self, tmp_path):
        made = ee.build(narrow, 3, shared=lambda model: model.layers[0], key=KEY)
        ee.save(tmp_path / "e", made)
        assert_same(ee.load(tmp_path / "e", narrow), made)
        assert_same(ee.load(tmp_path / "e", narrow, members=[1]), made[[1]])

    def test_arguments_of_the_members(self, tmp_path):
        make = lambda key, p: eqx.nn.Sequential([linear(key), eqx.nn.Dropout(jnp.asarray(p))])
        made = ee.build(make, 3, zip={"p": jnp.array([0.1, 0.2, 0.3])}, key=KEY)
        ee.save(tmp_path / "e", made)
        assert_same(ee.load(tmp_path / "e", lambda key: make(key, 0.0)), made)
        with pytest.raises(
            TypeError, match=r"(?s)calls the function that makes one member with a key alone.*`build` took"
        ):
            ee.load(tmp_path / "e", make)

    def test_one_model_a_training_state_and_a_run(self, tmp_path, ensemble):
        model = Attention(KEY)
        ee.save(tmp_path / "m", model)
        assert_same(ee.load(tmp_path / "m", Attention), model)
        state = ee.train.init(ensemble, optax.adam(1e-3), key=KEY)
        assert_restored(state, tmp_path / "s")
        loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
        run = ee.fit(ensemble, loss, optax.sgd(0.1), jnp.ones((4, 3)), steps=1, key=KEY)
        assert_restored(run, tmp_path / "r")

    def test_a_maker_that_cannot_be_traced(self, tmp_path):
        def make(key):
            return eqx.tree_at(lambda m: m.bias, linear(key), jnp.asarray(np.asarray(jax.random.normal(key, (2,)))))

        made = ee.stack([make(key) for key in jax.random.split(KEY, 2)])
        ee.save(tmp_path / "e", made)
        assert_same(ee.load(tmp_path / "e", make), made)

    def test_on_the_devices_of_like(self, tmp_path, ensemble):
        sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("members",)), PartitionSpec("members"))
        spread = jax.tree.map(lambda x: jax.device_put(x, sharding), ensemble)
        ee.save(tmp_path / "e", spread)
        got = ee.load(tmp_path / "e", spread)
        assert got.stacked.weight.sharding == sharding
        assert len(ee.load(tmp_path / "e", linear).stacked.weight.devices()) == 1
        assert_same(jax.device_put(got, jax.devices()[0]), ensemble)

    def test_arrays_may_be_donated(self, path):
        first, second = ee.load(path, linear), ee.load(path, linear)
        before = np.array(second.stacked.weight)
        jax.jit(lambda x: x + 1, donate_argnums=0)(first.stacked.weight).block_until_ready()
        np.testing.assert_array_equal(second.stacked.weight, before)

    def test_growing_is_as_having_built_more(self, tmp_path):
        ee.save(tmp_path / "e", ee.build(linear, 3, key=KEY))
        grown = ee.concatenate([ee.load(tmp_path / "e", linear), ee.build(linear, key=ee.member_keys(KEY, 5)[3:])])
        assert_same(grown, ee.build(linear, 5, key=KEY))


class TestMembers:
    def test_in_any_way_an_ensemble_is_indexed(self, path, ensemble):
        mask = np.array([True, False, False, True])
        for index in ([0, 3], slice(1, None, 2), mask, np.array([-1, 0]), jnp.array([2]), range(2)):
            rows = list(index) if isinstance(index, range) else index
            assert_same(ee.load(path, linear, members=index), ensemble[rows])
        assert_same(ee.load(path, ensemble[:2], members=[3]), ensemble[[3]])

    def test_others_are_not_read(self, path, ensemble):
        """Damage of member 1 is seen by who reads it, and by nobody else."""
        weight = np.asarray(ensemble.stacked.weight[1]).tobytes()
        data = bytearray(path.read_bytes())
        data[data.index(weight)] ^= 1
        path.write_bytes(data)
        assert_same(ee.load(path, linear, members=[0, 2, 3]), ensemble[[0, 2, 3]])
        for index in (None, [0, 1]):
            with pytest.raises(
                ee.CheckpointCorruptError, match="damaged at `.stacked.weight`, member 1: its SHA"
            ) as caught:
                ee.load(path, linear, members=index)
            assert (caught.value.file, caught.value.leaf, caught.value.member) == (str(path), ".stacked.weight", 1)

    def test_of_trees_around_ensembles(self, tmp_path, ensemble):
        tree = {"e": ensemble, "x": ee.Each(jnp.arange(8).reshape(4, 2)), "lr": 0.1, "scale": jnp.ones(4)}
        ee.save(tmp_path / "t", tree)
        got = ee.load(tmp_path / "t", tree, members=[1, 2])
        expected = {"e": ensemble[[1, 2]], "x": ee.Each(jnp.array([[2, 3], [4, 5]])), "lr": 0.1, "scale": jnp.ones(4)}
        assert_same(got, expected)

    @pytest.mark.parametrize("other", [lambda e: e[:3], lambda e: ee.Each(jnp.ones(3))])
    def test_of_different_numbers_of_members(self, tmp_path, ensemble, other):
        tree = {"a": other(ensemble), "e": ensemble}
        assert_restored(tree, tmp_path / "t")
        with pytest.raises(ValueError, match=r"cannot choose members of .*has a different number of members"):
            ee.load(tmp_path / "t", tree, members=[0])

    @pytest.mark.parametrize(
        ("members", "error", "message"),
        [
            (
                1,
                TypeError,
                r"needs a list of positions as `members`, got 1.\nOne model is `load\(path, like, members=\[1\]",
            ),
            ([4], IndexError, "index 4 is out of bounds"),
            ([1, 1], ValueError, "1"),
            ([], ValueError, "selects no member"),
        ],
    )
    def test_that_are_not_there(self, path, unhooked, members, error, message):
        with pytest.raises(error, match=message):
            ee.load(path, linear, members=members)

    def test_where_there_are_none(self, tmp_path):
        ee.save(tmp_path / "m", linear(KEY))
        with pytest.raises(ValueError, match="cannot choose members of .*, which was saved without an ensemble"):
            ee.load(tmp_path / "m", linear, members=[0])


class TestAnotherTreeIsRefused:
    def test_with_both_sides_of_each_difference(self, tmp_path, unhooked):
        ee.save(tmp_path / "e", ee.build(linear, 2, key=KEY))
        with pytest.raises(ee.MemberMismatchError) as caught:
            ee.load(tmp_path / "e", lambda key: eqx.nn.Linear(4, 2, use_bias=False, key=key))
        assert str(caught.value) == (
            f"`load` needs a `like` with the leaves of `{tmp_path}/e`.\n"
            "  at `.stacked.weight`: saved float32[2,2,3], expected float32[2,2,4]\n"
            "  at `.stacked`: saved Linear(in_features=3, out_features=2, use_bias=True), expected "
            "Linear(in_features=4, out_features=2, use_bias=False)\n"
            "  at `.stacked.bias`: saved float32[2,2], expected None\n"
            "`like` is the function that made one member, or a tree of the same structure as the one that was saved."
        )

    @pytest.mark.parametrize(
        ("like", "message"),
        [
            (lambda key: eqx.nn.MLP(3, 1, 4, 1, activation=jnp.tanh, key=key), "saved relu, expected tanh"),
            (lambda key: eqx.nn.MLP(3, 1, 4, 3, key=key), r"\[2\].weight`: saved None, expected float32\[2,4,4\]"),
            (lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, narrow(key)),
             r"saved float32\[2,4,3\], expected bfloat16\[2,4,3\]"),
            (lambda key: eqx.nn.Linear(3, 1, key=key), r"\.stacked`: saved MLP\(.*, expected Linear\("),
            (narrow(KEY), "`: saved .*, expected"),
            (ee.build(narrow, 3, key=KEY), r"saved float32\[2,4,3\], expected float32\[3,4,3\]"),
        ],
    )  # fmt: skip
    def test_of_another_model(self, tmp_path, like, message):
        ee.save(tmp_path / "e", ee.build(narrow, 2, key=KEY))
        with pytest.raises(ee.MemberMismatchError, match=message):
            ee.load(tmp_path / "e", like)

    KINDS = {"float": 0.5, "array": jnp.ones(()), "int": 3, "bool": True, "key": jax.random.key(0), "none": None}

    @pytest.mark.parametrize("expected", KINDS)
    @pytest.mark.parametrize("saved", KINDS)
    def test_of_another_kind_of_leaf(self, saved, expected, tmp_path):
        ee.save(tmp_path / "x", {"x": self.KINDS[saved]})
        if saved == expected:
            ee.load(tmp_path / "x", {"x": self.KINDS[expected]})
        else:
            with pytest.raises(ee.MemberMismatchError, match=r"at `\['x'\]`: saved .*, expected "):
                ee.load(tmp_path / "x", {"x": self.KINDS[expected]})

    def test_keys_of_another_generator(self, tmp_path):
        ee.save(tmp_path / "k", {"key": jax.random.key(0)})
        with pytest.raises(ee.MemberMismatchError, match=r"saved key<fry>\[\], expected key<rbg>\[\]"):
            ee.load(tmp_path / "k", {"key": jax.random.key(0, impl="rbg")})

    def test_a_run_of_fit(self, tmp_path, ensemble):
        loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
        ee.fit(ensemble, loss, optax.sgd(0.1), jnp.ones((4, 3)), steps=2, checkpoint=tmp_path / "x", key=KEY)
        with pytest.raises(ValueError, match=r"(?s)holds a run of `fit`.*The same call of `fit` returns the run"):
            ee.load(tmp_path / "x", linear)

    def test_nothing(self, path):
        with pytest.raises(TypeError, match="needs `like`: the function that makes one member"):
            ee.load(path, None)


class TestDamage:
    def test_every_bit_is_watched(self, tmp_path):
        """No flipped bit of a file is read as another tree."""
        tree = {"w": np.arange(4, dtype=np.float32), "n": 3, "k": np.arange(2, dtype=np.int8)}
        ee.save(tmp_path / "x", tree, meta={"a": [1, "b"]})
        data = (tmp_path / "x").read_bytes()
        rng = np.random.default_rng(0)
        for place in [*range(120), *rng.integers(120, len(data), 400), *range(len(data) - 150, len(data))]:
            flipped = bytearray(data)
            flipped[place] ^= 1 << rng.integers(8)
            (tmp_path / "x").write_bytes(flipped)
            with pytest.raises(ee.CheckpointCorruptError, match="damaged"):
                ee.load(tmp_path / "x", tree)

    def test_every_length_is_watched(self, path, ensemble):
        data = path.read_bytes()
        for length in [*range(0, len(data), 53), len(data) - 1]:
            path.write_bytes(data[:length])
            with pytest.raises(ee.CheckpointCorruptError, match="damaged"):
                ee.load(path, linear)
        path.write_bytes(data + b"\0")
        with pytest.raises(ee.CheckpointCorruptError, match="its length has changed"):
            ee.contents(path)

    @pytest.mark.parametrize(
        "text", [b"", b"hello, world", b"{}", (2**40).to_bytes(8, "little"), b"\x02" + bytes(7) + b"[]"]
    )
    def test_files_of_others(self, tmp_path, text):
        file = tmp_path / "x"
        file.write_bytes(text)
        for call in (lambda: ee.load(file, linear), lambda: ee.contents(file)):
            with pytest.raises(ee.CheckpointCorruptError, match="`.*/x` is damaged, or was not written by `save`"):
                call()
        with pytest.raises(FileExistsError, match="was not written by `save`, and is not overwritten"):
            ee.save(file, linear(KEY))
        assert file.read_bytes() == text

    def test_a_safetensors_file_of_others(self, tmp_path, path):
        from safetensors.numpy import save_file

        save_file({"w": np.ones(2)}, tmp_path / "x", {"format": "np"})
        with pytest.raises(FileExistsError, match="was not written by `save`"):
            ee.save(tmp_path / "x", linear(KEY))

    def test_folders(self, tmp_path):
        with pytest.raises(IsADirectoryError):
            ee.load(tmp_path, linear)
        with pytest.raises(FileExistsError, match="was not written by `save`"):
            ee.save(tmp_path, linear(KEY))
        with pytest.raises(FileNotFoundError):
            ee.load(tmp_path / "nothing", linear)


class TestAFileIsOldOrNew:
    @pytest.mark.parametrize("place", ["save_file", "_sync", "replace"])
    def test_where_writing_fails(self, tmp_path, monkeypatch, path, ensemble, place):
        def fail(*arguments, **options):
            raise OSError(28, "No space left on device")

        owner = {"save_file": sys.modules["safetensors.numpy"], "_sync": _save, "replace": os}[place]
        with monkeypatch.context() as patched:
            patched.setattr(owner, place, fail)
            with pytest.raises(OSError, match="No space left on device"):
                ee.save(path, ensemble[:2])
        assert_same(ee.load(path, linear), ensemble)
        assert [file.name for file in tmp_path.iterdir()] == ["e"]

    def test_on_a_full_disk(self, path, ensemble):
        """A limit of the size of files, which the system enforces as it does a full disk."""
        program = (
            "import resource, signal, jax, equinox as eqx, eqx_ensemble as ee\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
            "try:\n"
            f"    ee.save({str(path)!r}, eqx.nn.Linear(1000, 100, key=jax.random.key(0)))\n"
            "except OSError as error:\n"
            "    print('refused')\n"
        )
        # Python would cut off the bytecode that it writes, and read it later.
        command = [sys.executable, "-B", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == "refused\n"
        assert_same(ee.load(path, linear), ensemble)
        assert [file.name for file in path.parent.iterdir()] == ["e"]

    def test_it_is_replaced(self, path, ensemble):
        ee.save(path, ensemble[:2])
        assert_same(ee.load(path, linear), ensemble[:2])

    def test_who_may_read_it(self, tmp_path, ensemble):
        before = os.umask(0o027)
        try:
            ee.save(tmp_path / "e", ensemble)
        finally:
            os.umask(before)
        assert (tmp_path / "e").stat().st_mode & 0o777 == 0o640
        (tmp_path / "e").chmod(0o600)
        ee.save(tmp_path / "e", ensemble)
        assert (tmp_path / "e").stat().st_mode & 0o777 == 0o600

    def test_links_and_folders(self, tmp_path, path, ensemble):
        (tmp_path / "link").symlink_to(path)
        ee.save(tmp_path / "link", ensemble[:2])
        assert (tmp_path / "link").is_symlink()
        assert_same(ee.load(path, linear), ensemble[:2])
        ee.save(str(tmp_path / "a" / "b" / "e"), ensemble)
        assert_same(ee.load(pathlib.Path(tmp_path, "a", "b", "e"), linear), ensemble)


class TestWhatIsNotSaved:
    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            (
                lambda path: ee.save(path, linear),
                TypeError,
                "needs an ensemble or a model to save, not its constructor",
            ),
            (
                lambda path: ee.save(path, jnp.ones(2), meta=jnp.ones(2)),
                TypeError,
                "keeps `meta` as JSON: Object of type",
            ),
            (
                lambda path: jax.jit(lambda x: ee.save(path, {"x": x}))(1.0),
                TypeError,
                r"`\['x'\]` is traced: call it outs",
            ),
            (lambda path: ee.save(3, jnp.ones(2)), TypeError, "`path`"),
        ],
    )
    def test_is_said(self, path, ensemble, unhooked, call, error, message):
        with pytest.raises(error, match=message):
            call(path)
        assert_same(ee.load(path, linear), ensemble)


class TestContents:
    def test_of_a_file(self, tmp_path):
        ensemble = ee.build(linear, 2, key=KEY)
        ee.save(
            tmp_path / "x", {"e": ensemble, "p": 0.5, "k": jax.random.key(0)}, meta={"a": [float("inf"), None, "ü"]}
        )
        contents = ee.contents(tmp_path / "x")
        assert contents.leaves == {
            "['e'].stacked.weight": "float32[2,2,3]",
            "['e'].stacked.bias": "float32[2,2]",
            "['k']": "key<fry>[]",
            "['p']": "float",
        }
        assert contents.meta == {"a": [float("inf"), None, "ü"]}
        assert contents.versions["jax"] == jax.__version__

    def test_other_programs_read_the_arrays(self, path, ensemble):
        np.testing.assert_array_equal(load_file(path)[".stacked.weight"], ensemble.stacked.weight)
        with safe_open(path, "numpy") as file:
            np.testing.assert_array_equal(file.get_slice(".stacked.weight")[2:3], ensemble.stacked.weight[2:3])
