"""Damaged text files of a search are errors that name them."""

import pytest

import eqx_ensemble as ee

from .executors import Here
from .test_pbt import train

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a call."""
    folder = tmp_path_factory.mktemp("search")
    call(folder)
    return folder


def call(folder):
    return train(
        ee.fleet.population_based_training, "steps", Here(), shard=3, rounds=2, workers=2, checkpoint=folder
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("call.json", "", "it is not JSON"),
        ("call.json", "[]", "it does not hold a dict"),
        ("round-00/lost.json", "{", "it is not JSON"),
    ],
)
def test_damage(folder, name, text, reason):
    path = folder / name
    before = path.read_text() if path.exists() else None
    path.write_text(text)
    try:
        with pytest.raises(ee.CheckpointCorruptError, match=reason) as found:
            call(folder)
        assert str(path) in str(found.value)
    finally:
        path.unlink() if before is None else path.write_text(before)
