"""Every argument of every plot is given bad values: a figure that is meant, or an error of the library's own."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .. import census
from ..census import Case, array

pytestmark = [pytest.mark.usefixtures("unhooked"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def run():
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 3, key=jax.random.key(0))
    data = array(8, 3), array(8)
    return ee.fit(ensemble, loss, optax.sgd(0.1), data, epochs=2, validation=data, key=jax.random.key(1))


def always(value):
    return lambda: value


CASES = {
    "prediction_bands": {"predictions": lambda: array(3, 6)},
    "rank_histogram": {"counts": always(np.array([3, 4, 2, 5]))},
    "reliability_diagram": {"logits": lambda: array(3, 8, 4), "labels": always(np.arange(8) % 4)},
    "risk_coverage": {"coverage": always(np.array([0.5, 1.0])), "risk": always(np.array([0.0, 0.5]))},
    "training_curves": {},
    "uncertainty_histogram": {"in_distribution": lambda: array(9), "out_of_distribution": lambda: array(7)},
}

# Bad values that are good here; nothing ends in an error of matplotlib's.
OPTIONAL = {"ax": "None"}
UNIT = OPTIONAL | {"unit": "text None"}
ANY_NUMBERS = "-1 0 int64 float32 array"
ACCEPTED = {
    "prediction_bands": UNIT
    | {"predictions": "array"}
    | dict.fromkeys(["x", "targets", "intervals", "weights"], "None"),
    "rank_histogram": OPTIONAL,
    "reliability_diagram": OPTIONAL | {"num_bins": "int64", "weights": "None", "row_weights": "None"},
    "risk_coverage": UNIT,
    "training_curves": UNIT | {"stride": "int64", "level": "float32"},
    "uncertainty_histogram": UNIT
    | {"in_distribution": ANY_NUMBERS, "out_of_distribution": ANY_NUMBERS, "bins": "int64"},
}


def test_every_plot_is_here():
    assert {name for name, value in vars(ee.plot).items() if inspect.isfunction(value)} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_every_option(name, run):
    arguments = {"run": always(run)} if name == "training_curves" else CASES[name]
    accepted, messages = {}, []
    for argument, label, outcome in census.outcomes(Case(getattr(ee.plot, name), arguments)):
        plt.close("all")
        if outcome.kind != "refused":
            accepted.setdefault(argument, []).append(label if outcome.kind == "accepted" else outcome.kind)
            messages.append(f"{outcome.kind} {argument}={label}: {outcome.message[:200]}")
    as_text = {argument: " ".join(labels) for argument, labels in accepted.items()}
    assert as_text == ACCEPTED.get(name, {}), "\n".join(messages)
