"""Damaged text files of a search are errors that name them."""

import pytest

import eqx_ensemble as ee

from .executors import Here
from .test_pbt import train

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of a call with and without `asynchronous=True`."""

    def of(asynchronous):
        folder = tmp_path_factory.mktemp("search")
        call(folder, asynchronous)
        return folder

    return {asynchronous: of(asynchronous) for asynchronous in (False, True)}


def call(folder, asynchronous):
    return train(
        ee.fleet.population_based_training, "steps", Here(), shard=3, rounds=2, workers=2, checkpoint=folder,
        asynchronous=asynchronous,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asynchronous", "name", "text", "reason"),
    [
        (False, "call.json", "", "it is not JSON"),
        (False, "call.json", "[]", "it does not hold a dict"),
        (False, "round-00/lost.json", "{", "it is not JSON"),
        (True, "order.jsonl", "{\n", "it is not JSON"),
        (True, "order.jsonl", None, "a line of it is not a job"),
    ],
)
def test_damage(folders, asynchronous, name, text, reason):
    path = folders[asynchronous] / name
    before = path.read_text() if path.exists() else None
    path.write_text(before.split("\n")[0] + "\n[[], 0]\n" if text is None else text)
    try:
        with pytest.raises(ee.CheckpointCorruptError, match=reason) as found:
            call(folders[asynchronous], asynchronous)
        assert str(path) in str(found.value)
    finally:
        path.unlink() if before is None else path.write_text(before)
