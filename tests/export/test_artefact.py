"""The saved archive: its content, and that damage is always detected."""

import json
import zipfile
import zlib
from io import BytesIO

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export as jax_export
from safetensors.flax import load_file

import eqx_ensemble as ee

KEY, FLOAT = jax.random.key(4), str(jnp.result_type(float))


@pytest.fixture(scope="module")
def ensemble():
    make = lambda key: eqx.nn.Linear(3, 2, key=key)
    return ee.build(make, ids=[7, 2, 5], key=KEY)


@pytest.fixture(scope="module")
def artefact(ensemble):
    return ee.export(ensemble, shapes=(3,), combine=ee.combine.mean, platforms=["cpu"])


@pytest.fixture(scope="module")
def saved(artefact, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "made" / "on the way" / "e.zip"
    artefact.save(path)
    return path.read_bytes()


def read(data, name="program.bin"):
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return archive.read(name)


def test_what_is_in_it(artefact, saved):
    with zipfile.ZipFile(BytesIO(saved)) as archive:
        assert archive.namelist() == ["program.bin", "export.json"]
        assert archive.testzip() is None
        assert {entry.date_time[0] for entry in archive.infolist()} == {1980}  # none, so that bytes are the same
    assert read(saved) == bytes(artefact.program.serialize())
    about = json.loads(read(saved, "export.json"))
    assert about == artefact.about
    assert about.pop("versions").keys() >= {"eqx_ensemble", "jax", "jaxlib"}
    assert about == {
        "members": 3,
        "ids": [7, 2, 5],
        "inputs": [{"name": "x", "dtype": FLOAT, "shape": ["batch", 3]}],
        "outputs": [{"name": "out", "dtype": FLOAT, "shape": ["batch", 2]}],
        "leaves": [],
        "platforms": ["cpu"],
        "calling_convention_version": artefact.program.calling_convention_version,
    }


@pytest.mark.parametrize("options", [{}, {"leaves": "beside", "symbolic_members": True}], ids=["inside", "beside"])
def test_no_rows_give_no_rows(ensemble, options):
    for combine, shape in ((None, (3, 0, 2)), (ee.combine.mean, (0, 2))):
        artefact = ee.export(ensemble, shapes={"a": (3,)}, fn=lambda m, x: m(x["a"]), combine=combine, **options)
        assert artefact({"a": jnp.ones((0, 3))}).shape == shape
        found = artefact({"a": jnp.ones((1, 3))})
        assert found.shape == tuple(1 if size == 0 else size for size in shape)
    fixed = ee.export(ensemble, shapes=(3,), batch_size=4)
    with pytest.raises(ValueError, match="[Ss]hape"):
        fixed(jnp.ones((0, 3)))


def test_any_number_of_members_says_so(ensemble):
    artefact = ee.export(ensemble, shapes=(3,), leaves="beside", symbolic_members=True)
    assert artefact.about["members"] == "any number"
    assert artefact.about["outputs"] == [{"name": "out", "dtype": FLOAT, "shape": ["members", "batch", 2]}]


def test_equal_artefacts_are_equal_bytes(ensemble, artefact, saved, tmp_path):
    path = tmp_path / "e.zip"
    path.write_text("something else")
    artefact.save(path)
    assert path.read_bytes() == saved
    assert [file.name for file in tmp_path.iterdir()] == ["e.zip"]


def test_leaves_beside(tmp_path):
    make = lambda key: eqx.nn.Linear(3, 2, dtype=jnp.bfloat16, key=key)
    ensemble = ee.build(make, 3, key=KEY)
    artefact = ee.export(ensemble, shapes=jax.ShapeDtypeStruct((3,), jnp.bfloat16), leaves="beside")
    artefact.save(tmp_path / "e.zip")
    with zipfile.ZipFile(tmp_path / "e.zip") as archive:
        assert archive.namelist() == ["program.bin", "leaves.safetensors", "export.json"]
        leaves = load_file(archive.extract("leaves.safetensors", tmp_path))
    assert sorted(leaves) == ["model.bias", "model.weight"]
    for name, leaf in leaves.items():
        own = getattr(ensemble.stacked, name.removeprefix("model."))
        assert leaf.dtype == own.dtype
        np.testing.assert_array_equal(leaf, own)


DAMAGED = (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, EOFError, ValueError, OSError, zlib.error)
"""What `zipfile` raises, by the part that is damaged; a name that changed is a KeyError."""


def test_no_flipped_bit_is_silent(saved):
    good = read(saved)
    start = saved.index(good)
    inside = range(8 * start, 8 * (start + len(good)))
    around = sorted({*range(8 * len(saved))} - {*inside})
    random = np.random.default_rng(0).choice(inside, 2000, replace=False)
    noticed = {True: 0, False: 0}
    for part, bits in ((True, random), (False, around)):
        for bit in bits:
            data = bytearray(saved)
            data[bit // 8] ^= 1 << bit % 8
            try:
                assert read(data) == good, f"bit {bit}"  # such as one of a date
            except DAMAGED:
                noticed[part] += 1
    assert noticed[True] == len(random)
    assert 0 < noticed[False] < len(around)


def test_jax_alone_notices_no_flipped_weight(ensemble, artefact):
    """Why there is a checksum."""
    data = bytearray(artefact.program.serialize())
    weight = np.asarray(ensemble.stacked.weight)
    place = data.index(weight.tobytes())
    data[place + weight.itemsize - 1] ^= 1 << 7  # the sign of the first weight
    x = jnp.ones((1, 3))
    assert np.abs(jax_export.deserialize(data).call(x) - artefact(x)).max() > 0.1


def test_no_file_cut_short_is_silent(saved):
    for length in range(len(saved)):
        with pytest.raises(DAMAGED):
            read(saved[:length])


def test_a_write_that_fails_leaves_what_was_there(artefact, tmp_path, monkeypatch):
    path = tmp_path / "e.zip"
    path.write_text("what was there")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eqx_ensemble.checkpoint._disk.sync", full)
    with pytest.raises(OSError, match="bytes are free in"):
        artefact.save(path)
    assert path.read_text() == "what was there"
    assert [file.name for file in tmp_path.iterdir()] == ["e.zip"]
