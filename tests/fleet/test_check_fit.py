"""What `fit` refuses is refused in the caller's process, before a shard is submitted."""

import numpy as np
import pytest

import eqx_ensemble as ee

from .executors import Here
from .test_fit import ENSEMBLE, KEY, MEMBERS, OPTIMISER, RATES, X, Y, adam, mse

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")
DATA = X, Y
REFUSED = {
    "no steps": ({"steps": 0}, ValueError, "`steps` of at least 1, got 0"),
    "both lengths": ({"epochs": 1}, TypeError, "either `epochs` or `steps`, got both"),
    "no length": ({"steps": None}, TypeError, "either `epochs` or `steps`, got neither"),
    "no batch": ({"batch_size": 0}, ValueError, "`batch_size` of at least 1, got 0"),
    "shuffle": ({"shuffle": "own"}, ValueError, "`shuffle` to be `True`, `False` or"),
    "has_aux": ({"has_aux": 1}, TypeError, "`has_aux`"),
    "history": ({"history": "first"}, ValueError, "`history` to be 'all', 'last' or a number of steps"),
    "no key": ({"key": None}, TypeError, "needs one key: for example"),
    "unknown": ({"batchsize": 8}, TypeError, "has no option `batchsize`.\nIts options are `batch_size`, "),
    "unlike any": ({"qqq": 8}, TypeError, "has no option `qqq`.\nIts options are `batch_size`"),
    "loss": ({"loss": 3}, TypeError, r"as a function `loss\(model, batch, key\)`, got 3"),
    "arguments of the loss": ({"loss": lambda model: 0.0}, TypeError, "cannot be called like that"),
    "optimiser": ({"optimiser": 3}, TypeError, "needs an optax optimiser, got 3"),
    "a function as optimiser": ({"optimiser": adam}, TypeError, "got the function `<lambda>`"),
    "unused hyper": ({"hyper": RATES}, TypeError, "got `hyper`, but nothing uses it"),
    "structure": ({"validation": X}, TypeError, "`validation` with the structure of `data`"),
    "lengths of arrays": ({"data": (X, Y[:3])}, ValueError, "arrays of one length in `data`"),
    "rows": ({"rows": np.full((MEMBERS, 2), 37)}, IndexError, "`rows` from 0 to 36"),
    "patience": ({"patience": 1}, TypeError, "`validation=` data with `patience`"),
    "target": ({"stop": ee.train.Stopping(target=1.0)}, TypeError, "`validation=` data with `target`"),
    "limits of members": ({"stop": ee.train.Stopping(steps=[1, 2])}, ValueError, "one `steps` per member in `stop`"),
    "stop": ({"stop": 3}, TypeError, "needs `stop` to be a `train.Stopping`"),
    "none trained": ({"trainable": False}, ValueError, "train"),
    "progress": ({"progress": 3}, TypeError, "`progress`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_before_shards_are_submitted(unhooked, name):
    changes, error, text = REFUSED[name]
    options = {"loss": mse, "optimiser": OPTIMISER, "data": DATA, "steps": 1, "key": KEY} | changes
    executor, arguments = Here(), [options.pop(word) for word in ("loss", "optimiser", "data")]
    with pytest.raises(error, match="`fleet.fit`(.|\n)*" + text):
        ee.fleet.fit(executor, ENSEMBLE, *arguments, **options)
    assert not executor.calls


AGAIN = {"hyper": RATES, "trainable": lambda leaf: True}


@pytest.mark.parametrize("word", AGAIN)
def test_what_a_continued_run_contains(unhooked, word):
    executor, state = Here(), ee.train.init(ENSEMBLE, adam, hyper=RATES, key=KEY)
    with pytest.raises(TypeError, match=f"`fleet.fit` continues a training state, which already contains `{word}`"):
        ee.fleet.fit(executor, state, mse, adam, DATA, steps=1, key=KEY, **{word: AGAIN[word]})
    assert not executor.calls
