"""Random combinations of options: members over workers are those of one `fit`, bit for bit under `Sequential`."""

import random

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import grouped
from .executors import Here
from .test_fit import ENSEMBLE, KEY, MEMBERS, OPTIMISER, RATES, SEQUENTIAL, X, Y, adam, assert_equal, mse, noisy

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

OWN = np.stack([X + i for i in range(MEMBERS)])
CHOICES = {
    "optimiser": ({"optimiser": OPTIMISER}, {"optimiser": adam, "hyper": RATES},
                  {"optimiser": lambda h: optax.sgd(h["rate"]), "hyper": {"rate": jnp.array([0.1, 1e30] * 3 + [0.1])}}),
    "rows": ({}, {"rows": ee.resample.bootstrap(37, MEMBERS, key=KEY)}),
    "loss": ({"loss": mse}, {"loss": noisy, "has_aux": True}),
    "shuffle": ({}, {"shuffle": "shared"}),
    "limits": ({}, {"stop": ee.train.Stopping(steps=np.arange(MEMBERS) + 3)}, {"min_delta": 0.01, "patience": 1}),
    "history": ({}, {"history": 3}, {"history": "last"}),
    "length": ({"epochs": 2}, {"steps": 7}, {"epochs": 3}),
    "size": ({"batch_size": 8}, {"batch_size": 37}),
}  # fmt: skip
DATA = {"shared": ((X, Y), (X[:9], Y[:9])), "own": ((ee.Each(OWN), Y), (ee.Each(OWN[:, :9]), Y[:9]))}


def draw(seed):
    """The options of a call, its data, and how it is divided."""
    draws = random.Random(seed)
    options = {word: value for name in CHOICES for word, value in draws.choice(CHOICES[name]).items()}
    data, validation = DATA[draws.choice(sorted(DATA))]
    if "patience" in options or draws.random() < 0.5:
        options["validation"] = validation
    if options.get("shuffle") == "shared":
        options.pop("rows", None)
    if "patience" in options:
        options.pop("steps", None)
        options.setdefault("epochs", 3)
    how = {"shard": draws.randint(2, 5), "saves": draws.random() < 0.4, "kills": draws.choice([(), (0,), (1,)])}
    return options, data, how | {"goes_on": draws.random() < 0.3}


@pytest.mark.filterwarnings("ignore:.*diverged", "ignore:`patience` stopped no member", "ignore:.*that are NaN")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 25))])
def test_shards_are_one_fit(seed, tmp_path):
    options, data, how = draw(seed)
    loss, optimiser = options.pop("loss"), options.pop("optimiser")
    options |= {"plan": SEQUENTIAL, "key": KEY}
    expected = ee.fit(ENSEMBLE, loss, optimiser, data, **grouped(options))
    made = []

    def executor():
        made.append(Here(kills=() if made else how["kills"]))
        return made[-1]

    divided = {"shard": how["shard"], "checkpoint": tmp_path if how["saves"] else None}
    found = ee.fleet.fit(executor, ENSEMBLE, loss, optimiser, data, **divided, **grouped(options))
    assert_equal(found, expected)
    assert len(made) == 1 + bool(how["kills"])
    if how["goes_on"] and (expected.status == ee.train.Status.OK).any():
        options = {word: value for word, value in options.items() if word not in ("hyper", "stop", "patience")}
        found = ee.fleet.fit(executor, found, loss, optimiser, data, shard=how["shard"], **grouped(options))
        assert_equal(found, ee.fit(expected, loss, optimiser, data, **grouped(options)))
