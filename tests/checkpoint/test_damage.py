"""Whatever happens to the bytes of a checkpoint, and whatever somebody writes there: an error, never other numbers."""

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
from eqx_ensemble.checkpoint._layout import layout

MANIFEST = "checkpoint.json"
KEY = jax.random.key(0)


def small():
    """A tree with members, whose checkpoint is below 4 KiB."""
    return {"e": ee.Each(np.arange(6, dtype=np.int16).reshape(3, 2)), "s": np.array([1.5]), "n": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("damage") / "small"
    ee.save(path, small(), meta={"note": "small"})
    assert sum(file.stat().st_size for file in path.iterdir()) <= 4096
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "copy"))


def arrays_file(path):
    (file,) = path.glob("*.safetensors")
    return file


def stack_host(models):
    return jax.tree.map(lambda *leaves: np.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0], *models)


def load(path):
    return ee.load(path, small())


def flip(file, data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    file.write_bytes(changed)


def every_bit(path, step, start=0):
    """Flips single bits in both files, and asks what was noticed: a list of what was not."""
    silent, count = [], 0
    for file in list(path.iterdir()):
        data = file.read_bytes()
        for bit in range(start, 8 * len(data), step):
            flip(file, data, bit)
            count += 1
            try:
                load(path)
                named = None
            except ee.CheckpointCorruptError as error:
                named = error.file
            if named != str(file):
                silent.append((file.name, bit))
        file.write_bytes(data)
    load(path)
    return silent, count


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


@pytest.mark.parametrize("name", [MANIFEST, "arrays-0001.safetensors"])
def test_every_length(copy, name):
    data = (copy / name).read_bytes()
    for length in range(len(data)):
        (copy / name).write_bytes(data[:length])
        with pytest.raises(ee.CheckpointCorruptError, match=name):
            load(copy)
    for more in (b"\0", b" ", b"\n", data):
        (copy / name).write_bytes(data + more)
        with pytest.raises(ee.CheckpointCorruptError, match=name):
            load(copy)


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
        "Load an older checkpoint or another copy: what is left of this one cannot be told from what was saved."
    )
    assert (caught.value.file, caught.value.leaf, caught.value.member) == (str(file), ".stacked.layers[1].weight", 2)
    with pytest.raises(ee.CheckpointCorruptError, match="member 2"):
        ee.checkpoint.verify(tmp_path / "x")
    # The other members are as they were, and are read without this one.
    others = ee.load(tmp_path / "x", make, members=[0, 1, 3])
    for got, expected in zip(jax.tree.leaves(others.stacked), jax.tree.leaves(ensemble.stacked), strict=True):
        np.testing.assert_array_equal(got, expected[[0, 1, 3]])
    assert others.ids.tolist() == [0, 1, 3]


def forge(path, change):
    """Writes a manifest with some changes under a checksum that is right."""
    file = path / MANIFEST
    content = json.loads(file.read_text())["manifest"]
    changed = change(content)
    content = content if changed is None else changed
    write_manifest(path, content if isinstance(content, bytes) else json.dumps(content).encode())


def write_manifest(path, body):
    seal = b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n"manifest": '
    (path / MANIFEST).write_bytes(seal + body + b"}\n")


def entry(**fields):
    return lambda content: content["entries"][0].update(fields)


def first_number(**fields):
    return lambda content: content["numbers"][0].update(fields)


DEEP = b"[" * 100_000 + b"]" * 100_000
HOSTILE = {
    "a path out of the folder": lambda c: c.update(file="../arrays-0001.safetensors"),
    "an absolute path": lambda c: c.update(file="/etc/passwd"),
    "a folder as file": lambda c: c.update(file="."),
    "a zero byte in the name": lambda c: c.update(file="arrays-0001\0.safetensors"),
    "a number that is no ASCII": lambda c: c.update(file="arrays-٣.safetensors"),
    "the file as a list": lambda c: c.update(file=["arrays-0001.safetensors"]),
    "a missing file": lambda c: c.update(file="arrays-0002.safetensors"),
    "negative sizes": entry(shape=[-3, -2]),
    "NaN sizes": entry(shape=[float("nan"), 2]),
    "infinite sizes": entry(shape=[float("inf"), 2]),
    "sizes with a fraction": entry(shape=[3.0, 2]),
    "booleans as sizes": entry(shape=[True, 2]),
    "a huge size": entry(shape=[3, 10**30]),
    "a size of a petabyte": entry(shape=[3, 10**15]),
    "a product that wraps around": entry(shape=[3, 2**32, 2**32]),
    "a huge size next to zero": entry(shape=[3, 2**62, 0]),
    "a thousand axes": entry(shape=[3] + [1] * 1000),
    "other sizes": entry(shape=[3, 3]),
    "an unknown dtype": entry(dtype="object"),
    "a dtype with fields": entry(dtype="i4,i4"),
    "another dtype": entry(dtype="float16"),
    "an unknown kind": entry(kind="other"),
    "another kind": entry(kind="shared"),
    "keys of an unknown generator": entry(key="os.system"),
    "keys of the wrong dtype": entry(key="threefry2x32"),
    "a checksum of the wrong type": entry(checksum=1),
    "another checksum": entry(checksum="0" * 64),
    "a tensor that is not there": entry(tensor="other"),
    "a leaf twice": lambda c: c["entries"].append(c["entries"][0]),
    "the name of the checksums": entry(path="<checksums>", tensor="<checksums>"),
    "an unknown field of a leaf": entry(offset=0),
    "a missing field of a leaf": lambda c: c["entries"][0].pop("shape"),
    "a leaf that is no object": lambda c: c["entries"].append(1),
    "no leaves": lambda c: c.update(entries=None),
    "many leaves that are not there": lambda c: c.update(
        entries=[c["entries"][1] | {"path": str(i)} for i in range(10**3)]
    ),
    "members out of range": lambda c: c.update(members=[0, 1, 2**31]),
    "members twice": lambda c: c.update(members=[0, 1, 1]),
    "more members": lambda c: c.update(members=[0, 1, 2, 3]),
    "no members": lambda c: c.update(members=None),
    "an unknown field": lambda c: c.update(more=1),
    "a missing field": lambda c: c.pop("meta"),
    "no format": lambda c: c.pop("format"),
    "a step that is no integer": lambda c: c.update(step="1"),
    "a score that is no number": lambda c: c.update(score=[1]),
    "structure of numbers": lambda c: c.update(structure={"a": 1}),
    "a number of an unknown type": first_number(type="eval"),
    "a number with code": first_number(value="__import__('os')"),
    "a number too large": first_number(type="float", value="0x1p99999"),
    "a list": lambda c: [c],
    "a text": lambda c: b'"text"',
    "nothing": lambda c: b"",
    "no JSON": lambda c: b"{",
    "no UTF-8": lambda c: b'{"format": "\xff\xfe"}',
    "deep JSON": lambda c: DEEP,
    "deep objects": lambda c: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a key twice": lambda c: b'{"format": 1, "format": 2}',
    "an integer of a million digits": lambda c: b'{"format": ' + b"9" * 10**6 + b"}",
    "UTF-16": lambda c: json.dumps(c).encode("utf-16"),
}


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
    with pytest.raises(ee.CheckpointCorruptError, match="more than the 16777216 that are read"):
        load(copy)


def test_memory_is_taken_only_for_what_is_expected(copy):
    """A sparse file may claim any size; what `like` does not have is never read."""
    forge(copy, entry(shape=[3, 2**38]))
    with pytest.raises(ee.CheckpointCorruptError, match="it has [0-9]+ bytes, not"):
        load(copy)
    content = json.loads((copy / MANIFEST).read_text())["manifest"]
    manifest = _manifest.decode((copy / MANIFEST).read_bytes(), "x")
    assert content["entries"][0]["shape"] == [3, 2**38]
    with open(arrays_file(copy), "r+b") as file:
        plan = layout(manifest.entries)
        file.write(plan.header)
        file.truncate(plan.size)
    with pytest.raises(ee.MemberMismatchError, match=r"saved i16\[3,274877906944\], expected i16\[3,2\]"):
        load(copy)


HEADERS = {
    "a huge header": lambda data: (2**62).to_bytes(8, "little") + data[8:],
    "a header without an end": lambda data: (2**64 - 1).to_bytes(8, "little") + data[8:],
    "an empty header": lambda data: bytes(8) + data[8:],
    "overlapping offsets": lambda data: data.replace(b'"data_offsets":[0,8]', b'"data_offsets":[4,8]'),
    "another order": lambda data: data.replace(b'"dtype":"F64"', b'"dtype":"I64"'),
    "deep JSON": lambda data: data[:8] + DEEP[: len(data) - 8].ljust(len(data) - 8),
}


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
        _manifest.decode(body, "x")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_in_any_field(data):
    """No other error than ours, whatever stands in the manifest."""
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
        _manifest.decode(sealed, "x")
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
    with pytest.raises(NotADirectoryError, match="load_members"):
        load(tmp_path / "file.eqx")
    with pytest.raises(ee.CheckpointCorruptError, match="checkpoint.json`: the file is missing"):
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
