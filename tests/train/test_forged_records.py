"""Metadata that were changed, under a checksum that was made for them, raise our errors or change nothing."""

import json
import os
import random
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import Checkpoints
from eqx_ensemble.checkpoint._record import InvalidRecordError
from eqx_ensemble.train.data._source import decode

from ..checkpoint.damage import forge, forge_each
from ..factories import assert_same

KEY = jax.random.key(0)
X = np.arange(24.0, dtype=np.float32).reshape(8, 3)


def loss(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


class Batches:
    """Batches from an iterator whose state has every kind of value."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 4:
            self.position += 1
            yield X[2 * self.position - 2 : 2 * self.position]
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "kinds": {1: (b"x", np.arange(2.0), [None, 0.5])}}

    def load_state_dict(self, state):
        assert type(state["position"]) is int
        ((blob, array, values),) = state["kinds"].values()
        if (list(state["kinds"]), blob, array.tolist(), values) != ([1], b"x", [0, 1], [None, 0.5]):
            raise KeyError("kinds")
        self.position = range(5)[state["position"]]


def unharmed(do, check, path, change):
    """Whether an action raises one of our errors, with the path; otherwise its result is checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = do()
        except (ValueError, FileNotFoundError) as error:
            text = str(error)
            assert str(path) in text or "`fit` cannot resume: " in text, (change, text)
            return True
    check(result)
    return False


def test_a_model(tmp_path):
    make = lambda key: {"a": eqx.nn.Linear(3, 1, key=key), "n": 3, "x": 0.5}
    path, ensemble = tmp_path / "x", ee.build(make, 2, key=KEY)
    ee.save(path, ensemble, meta={"note": [1, {"a": 2.0}]})
    raised = []
    for change in forge_each(path, random.Random(0), 250):
        raised.append(unharmed(lambda: ee.load(path, make), lambda found: assert_same(found, ensemble), path, change))
        unharmed(lambda: repr(ee.checkpoint.contents(path)), lambda found: None, path, change)
    assert sum(raised) > 120


@pytest.mark.parametrize("under", [("meta", "fit"), ("meta", "fit", "place"), ()], ids=["record", "place", "manifest"])
def test_a_run_of_fit(under, tmp_path):
    def run():
        start = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
        return ee.fit(start, loss, optax.sgd(0.1), Batches(), steps=6, checkpoint=tmp_path, progress=False, key=KEY)

    whole = run()
    path = Checkpoints(tmp_path).path(6)
    assert json.loads((path / "checkpoint.json").read_text())["manifest"]["meta"]["fit"]["place"][1] == 2
    raised = []
    for change in forge_each(path, random.Random(1), 25, under=under):
        same = lambda found: assert_same((found.ensemble, found.history.loss), (whole.ensemble, whole.history.loss))
        raised.append(unharmed(run, same, tmp_path, change))
    assert sum(raised) > 8
    assert_same(run().ensemble, whole.ensemble)


def test_another_beginning(tmp_path):
    """A count that could be right, but is not that of the call."""
    start = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
    run = lambda: ee.fit(start, loss, optax.sgd(0.1), X, steps=4, checkpoint=tmp_path, progress=False, key=KEY)
    run()
    forge(Checkpoints(tmp_path).path(4), lambda content: content["meta"]["fit"].update(begun=3))
    with pytest.raises(ee.CheckpointCorruptError, match="`begun` is not the step at which this call begins"):
        run()


def test_a_file_cannot_import_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(InvalidRecordError, match="torch is not imported"):
        decode({"": ["tensor", {"dtype": "float32", "shape": [0], "base64": ""}]})
    assert "torch" not in sys.modules


@pytest.mark.parametrize("content", ["[" * 4096, "mine", "{}", "1" * 4096])
def test_a_lock_that_is_not_ours(content, tmp_path):
    (tmp_path / "fit.lock").write_text(content)
    start = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
    with pytest.raises(FileExistsError, match="fit.lock` is the file of a lock .* not written by `fit`"):
        ee.fit(start, loss, optax.sgd(0.1), X, steps=2, checkpoint=tmp_path, progress=False, key=KEY)
    assert (tmp_path / "fit.lock").read_text() == content


def test_a_lock_that_is_a_pipe_or_deep(tmp_path):
    start = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
    run = lambda: ee.fit(start, loss, optax.sgd(0.1), X, steps=2, checkpoint=tmp_path, progress=False, key=KEY)
    os.mkfifo(tmp_path / "fit.lock")
    with pytest.raises(ee.CheckpointCorruptError, match="fit.lock`: it is no ordinary file"):
        run()
    (tmp_path / "fit.lock").unlink()
    (tmp_path / "fit.lock").write_text('{"host": "' + '": ' + "[" * 4000)
    run()  # its writer is gone
    assert not (tmp_path / "fit.lock").exists()
