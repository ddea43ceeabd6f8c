"""Checkpoints of shards: what a repeated call takes from its folder, and what it refuses."""

import contextlib

import pytest

import eqx_ensemble as ee
from eqx_ensemble.fleet._check import check_folder

from ..factories import grouped
from .executors import Here
from .test_fit import ENSEMBLE, KEY, OPTIMISER, SEQUENTIAL, X, Y, assert_equal, mse

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")
OPTIONS = {"batch_size": 8, "plan": SEQUENTIAL, "epochs": 2, "key": KEY}


def fit(executor, folder, loss=mse, **more):
    return ee.fleet.fit(executor, ENSEMBLE, loss, OPTIMISER, (X, Y), **grouped(OPTIONS | more | {"checkpoint": folder}))


@pytest.fixture(scope="module")
def expected():
    return ee.fit(ENSEMBLE, mse, OPTIMISER, (X, Y), **OPTIONS)


def test_another_number_of_workers_has_the_shards_of_the_call_before(tmp_path, expected):
    fit(Here(), tmp_path, workers=1, shard=2)
    before = {path.name for path in tmp_path.iterdir()}
    for workers in (1, 5):
        executor = Here()
        assert_equal(fit(executor, tmp_path, workers=workers), expected)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_another_size_of_shards_is_refused(tmp_path):
    fit(Here(), tmp_path, shard=2)
    with pytest.raises(
        ValueError, match=r"are from a division into \d shards, and `shard=4` makes \d.\nLeave `shard` out"
    ):
        fit(Here(), tmp_path, shard=4)


def test_another_loss_is_refused_whatever_the_number_of_workers(tmp_path):
    fit(Here(), tmp_path, shard=2)
    with pytest.raises(ValueError, match="loss"):
        fit(Here(), tmp_path, workers=7, loss=lambda model, batch, key: 2 * mse(model, batch, key))


def test_a_few_members_of_another_call(tmp_path):
    fit(Here(), tmp_path, shard=2)
    with pytest.raises(ValueError, match=r"shards, and this call has 1.\nChoose another folder"):
        ee.fleet.fit(Here(), ENSEMBLE[:3], mse, OPTIMISER, (X, Y), checkpoint=tmp_path, **OPTIONS)


@pytest.mark.parametrize("kill", [1, 2])
def test_never_is_about_calls_and_not_about_shards(tmp_path, expected, kill):
    """A shard whose worker dies goes on from what it saved itself."""
    executor = lambda: Here(kills=[kill]) if not any(tmp_path.iterdir()) else Here()
    assert_equal(fit(executor, tmp_path, shard=2, resume="never", checkpoint_every=1), expected)
    with pytest.raises(FileExistsError, match=r"`fleet.fit` must not resume, and .* holds checkpoints of shards"):
        fit(Here(), tmp_path, resume="never")


def test_must_needs_a_call_that_began_and_not_all_of_its_shards(tmp_path, expected):
    with pytest.raises(FileNotFoundError, match=r"`fleet.fit` must resume, and found no checkpoint in"):
        fit(Here(), tmp_path, resume="must")
    with pytest.warns(UserWarning, match="returns without"):
        fit(Here(kills=[1]), tmp_path, shard=2, retries=0, workers=1)
    assert_equal(fit(Here(), tmp_path, resume="must"), expected)


def test_long_messages_are_cut():
    def loss(model, batch, key):
        raise ValueError("begin" + "x" * 1_000_000 + "end")

    with pytest.raises(ValueError, match=r"(?s)^begin.*characters left out.*end\n") as caught:
        fit(Here(), None, loss=loss)
    assert sum(map(len, caught.value.__notes__)) < 50_000


def test_the_folder_of_one_fit_is_refused(tmp_path, unhooked):
    ee.fit(ENSEMBLE, mse, OPTIMISER, (X, Y), checkpoint=tmp_path, **OPTIONS)
    with pytest.raises(FileExistsError, match="is the folder of a run of `fit`.\nChoose another"):
        fit(Here(), tmp_path, shard=4)


def test_a_checkpoint_and_a_file_are_refused(tmp_path, unhooked):
    ee.save(tmp_path / "a", ENSEMBLE)
    with pytest.raises(FileExistsError, match="`fleet.fit` needs a folder for checkpoints .* a single checkpoint"):
        fit(Here(), tmp_path / "a")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="is not a checkpoint, so nothing is overwritten"):
        fit(Here(), tmp_path / "file")


class Elsewhere(Here):
    """Runs calls in another working directory, as workers that began in it do."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def submit(self, fn, /, *args):
        with contextlib.chdir(self.folder):
            return super().submit(fn, *args)


def test_a_relative_folder_is_that_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_folder("runs").folder == tmp_path / "runs"
    assert check_folder(tmp_path).folder == tmp_path
    assert check_folder(None) is None


@pytest.mark.slow
def test_workers_in_another_directory(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    options = {"steps": 2, "key": KEY, "shard": 4, "checkpoint": "runs", "validation": (X, Y)}
    found = [
        ee.fleet.fit(Elsewhere(there), ENSEMBLE, mse, OPTIMISER, (X, Y), **grouped(options | {"resume": how}))
        for how in ("auto", "must")
    ]
    assert_equal(found[1], found[0])
    assert [path.name for path in here.iterdir()] == ["runs"]
    assert list(there.iterdir()) == []
