"""Damaged and hostile checkpoints raise an error, and never load as other numbers."""

import hashlib
import json
import os
import pathlib
import resource
import shutil
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import _manifest
from eqx_ensemble.checkpoint import _read as _decode
from eqx_ensemble.checkpoint._snapshot import file_layout

from .damage import HEADERS, HOSTILE, MANIFEST, arrays_file, entry, every_bit, every_length, flip, forge, load, small

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("damage") / "small"
    ee.save(path, small(), meta={"note": "small"})
    assert sum(file.stat().st_size for file in path.iterdir()) <= 4096
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "copy"))


def stack_host(models):
    return jax.tree.map(lambda *leaves: np.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0], *models)


def test_a_sample_of_single_bits(copy):
    silent, count = every_bit(copy, step=41, start=7)
    assert silent == []
    assert count > 200


@pytest.mark.slow
def test_every_single_bit(copy):
    silent, count = every_bit(copy, step=1)
    assert silent == []
    assert count == 8 * sum(file.stat().st_size for file in copy.iterdir())


def test_changed_bits_would_be_silent_without_checksums(copy):
    file = arrays_file(copy)
    data = file.read_bytes()
    flip(file, data, 8 * data.index(np.arange(6, dtype=np.int16).tobytes()) + 1)
    with pytest.raises(ee.CheckpointCorruptError):
        load(copy)
    # The same bit in a file of equinox.
    eqx.tree_serialise_leaves(copy / "x.eqx", small())
    data = (copy / "x.eqx").read_bytes()
    flip(copy / "x.eqx", data, 8 * data.index(np.arange(6, dtype=np.int16).tobytes()) + 1)
    assert eqx.tree_deserialise_leaves(copy / "x.eqx", small())["e"].value[0, 0] == 2


def test_every_length(copy):
    size = sum(file.stat().st_size for file in copy.iterdir())
    assert every_length(copy, step=1) == ([], size + 8)


@pytest.mark.parametrize("name", [MANIFEST, "arrays-0001.safetensors"])
def test_a_missing_file(copy, name):
    (copy / name).unlink()
    with pytest.raises(ee.CheckpointCorruptError, match="is missing") as caught:
        load(copy)
    assert caught.value.file == str(copy / name)


def test_the_error_names_leaf_and_member(tmp_path):
    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    ensemble = ee.from_stacked(stack_host([make(key) for key in jax.random.split(KEY, 4)]))
    ee.save(tmp_path / "x", ensemble)
    file = arrays_file(tmp_path / "x")
    data = file.read_bytes()
    bits = np.asarray(ensemble.stacked.layers[1].weight)[2].tobytes()
    flip(file, data, 8 * data.index(bits) + 5)
    with pytest.raises(ee.CheckpointCorruptError) as caught:
        ee.load(tmp_path / "x", make)
    assert str(caught.value) == (
        f"A checkpoint is damaged: `{file}`, at `.stacked.layers[1].weight`, member 2: the checksum does not match.\n"
        "Load an older checkpoint or another copy: this checkpoint cannot be used."
    )
    assert (caught.value.file, caught.value.leaf, caught.value.member) == (str(file), ".stacked.layers[1].weight", 2)
    with pytest.raises(ee.CheckpointCorruptError, match="member 2"):
        ee.checkpoint.verify(tmp_path / "x")
    # The other members are as they were, and are read without this one.
    others = ee.load(tmp_path / "x", make, members=[0, 1, 3])
    for got, expected in zip(jax.tree.leaves(others.stacked), jax.tree.leaves(ensemble.stacked), strict=True):
        np.testing.assert_array_equal(got, expected[[0, 1, 3]])
    assert others.ids.tolist() == [0, 1, 3]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest(name, copy):
    forge(copy, HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(ee.CheckpointCorruptError) as caught:
            load(copy)
        with pytest.raises(ee.CheckpointCorruptError):
            ee.checkpoint.verify(copy)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000
    str(caught.value).encode()


def test_a_forged_manifest_that_is_right_is_read(copy):
    forge(copy, lambda c: None)
    load(copy)


def test_a_newer_format(copy):
    forge(copy, lambda c: c.update(version=2))
    with pytest.raises(ValueError, match="has version 2 of the checkpoint format"):
        load(copy)


def test_a_huge_manifest_is_not_read(copy):
    with open(copy / MANIFEST, "r+b") as file:
        file.truncate(2**40)
    with pytest.raises(ee.CheckpointCorruptError, match="more than the 16777216 bytes that are read"):
        load(copy)


def test_memory_is_taken_only_for_what_is_expected(copy):
    """A sparse file may claim any size; what `like` does not have is never read."""
    forge(copy, entry(shape=[3, 2**38]))
    with pytest.raises(ee.CheckpointCorruptError, match="it has [0-9]+ bytes, not"):
        load(copy)
    content = json.loads((copy / MANIFEST).read_text())["manifest"]
    manifest = _decode.decode((copy / MANIFEST).read_bytes(), "x")
    assert content["entries"][0]["shape"] == [3, 2**38]
    with open(arrays_file(copy), "r+b") as file:
        plan = file_layout(manifest.entries)
        file.write(plan.header)
        file.truncate(plan.size)
    with pytest.raises(ee.MemberMismatchError, match=r"saved i16\[3,274877906944\], expected i16\[3,2\]"):
        load(copy)


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_header(name, copy):
    file = arrays_file(copy)
    data = file.read_bytes()
    changed = HEADERS[name](data)
    assert changed != data
    assert len(changed) == len(data)
    file.write_bytes(changed)
    with pytest.raises(ee.CheckpointCorruptError, match="header"):
        load(copy)


@pytest.mark.parametrize("name", [MANIFEST, "arrays-0001.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_ordinary_files_are_opened(kind, name, copy, tmp_path):
    (copy / name).rename(tmp_path / "elsewhere")
    if kind == "link":
        (copy / name).symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(copy / name)
    else:
        (copy / name).mkdir()
    with pytest.raises(ee.CheckpointCorruptError, match="symbolic link|no ordinary file"):
        load(copy)


def test_the_folder_itself_may_be_a_link(copy, tmp_path):
    (tmp_path / "latest").symlink_to(copy, target_is_directory=True)
    load(tmp_path / "latest")
    ee.save(tmp_path / "latest", small())
    assert (tmp_path / "latest").is_symlink()
    load(copy)


def test_no_bool_but_true_and_false(tmp_path):
    ee.save(tmp_path / "x", np.array([True, False]))
    file = arrays_file(tmp_path / "x")
    data = bytearray(file.read_bytes())
    data[-2:] = b"\x07\x00"
    file.write_bytes(data)
    checksum = hashlib.sha256(b"\x07\x00").hexdigest()
    forge(tmp_path / "x", entry(checksum=checksum))
    with pytest.raises(ee.CheckpointCorruptError, match="a boolean is neither true nor false"):
        ee.load(tmp_path / "x", np.zeros(2, bool))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_as_manifest(body, sealed):
    if sealed:
        body = b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n"manifest": ' + body + b"}\n"
    with pytest.raises(ee.CheckpointCorruptError):
        _decode.decode(body, "x")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_in_any_field(data):
    """No error other than ours, whatever the manifest contains."""
    content = {"format": _manifest.FORMAT, "version": 1, "file": "arrays-0001.safetensors", "members": [0, 1]}
    content |= {"entries": [{"path": "a", "tensor": "a", "kind": "members", "dtype": "float32", "shape": [2, 3]}]}
    content["entries"][0] |= {"key": None, "checksum": "0"}
    content |= {"numbers": [{"path": "b", "type": "int", "value": "0x1"}], "structure": {}, "meta": None, "step": 1}
    content |= {"score": 1.0, "versions": {}}
    places = [content, content["entries"][0], content["numbers"][0]]
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(json_values)
    body = json.dumps(content).encode()
    sealed = b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n"manifest": ' + body + b"}\n"
    try:
        _decode.decode(sealed, "x")
    except (ee.CheckpointCorruptError, ValueError):
        pass


@pytest.mark.slow
def test_random_bits_of_a_larger_checkpoint(tmp_path):
    tree = {"w": np.random.default_rng(0).normal(size=(8, 500)), "b": np.arange(500)}
    ee.save(tmp_path / "x", tree)
    file = arrays_file(tmp_path / "x")
    data = file.read_bytes()
    bits = np.random.default_rng(1).integers(0, 8 * len(data), 5_000)
    for bit in bits.tolist():
        flip(file, data, bit)
        with pytest.raises(ee.CheckpointCorruptError):
            ee.load(tmp_path / "x", tree)


def test_what_cannot_be_opened(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match="found no checkpoint at"):
        load(tmp_path / "none")
    (tmp_path / "file.eqx").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="tree_deserialise_leaves"):
        load(tmp_path / "file.eqx")
    with pytest.raises(FileNotFoundError, match="a folder with files of single models .`file.eqx`"):
        load(tmp_path)


def test_open_files_are_closed(copy):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for _ in range(3):
        load(copy)
    file = arrays_file(copy)
    file.write_bytes(file.read_bytes()[:-1])
    for _ in range(20):
        with pytest.raises(ee.CheckpointCorruptError):
            load(copy)
    assert before == (len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0) <= limit


def test_jax_arrays_are_as_safe(tmp_path):
    tree = {"w": jnp.arange(6.0)}
    ee.save(tmp_path / "x", tree)
    file = arrays_file(tmp_path / "x")
    data = file.read_bytes()
    flip(file, data, 8 * data.index(np.arange(6, dtype=np.float32).tobytes()) + 40)
    with pytest.raises(ee.CheckpointCorruptError, match=r"at `\['w'\]`: the checksum"):
        ee.load(tmp_path / "x", tree)
