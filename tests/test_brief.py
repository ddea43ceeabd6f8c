"""What results say of themselves: short, with what matters, and where to find what is not there."""

import contextlib
import copy
import importlib
import pickle
import pkgutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._progress import progress_line

from .factories import mse

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (32, 3))
DATA = X, X.sum(1, keepdims=True)
# Parts of models and of optimiser states, which are shown as Equinox shows models; and what is shown in other ways.
LAYERS = {"Frozen", "LowRank", "RandomisedPrior", "SNGP", "Scale", "SpectralState"}
OTHERS = {"Ensemble", "Run", "TrainState", "Population", "Contents", "Checkpoint"}


def results():
    """The public Modules and named tuples, by name."""
    found = {}
    for module in pkgutil.walk_packages(ee.__path__, "eqx_ensemble."):
        if not any(part.startswith("_") for part in module.name.split(".")):
            found |= vars(importlib.import_module(module.name))
    found |= {name: getattr(ee, name) for name in dir(ee)}
    return {
        name: x
        for name, x in sorted(found.items())
        if isinstance(x, type) and issubclass(x, eqx.Module | tuple) and x.__module__.startswith("eqx_ensemble")
        if not name.startswith(("_", "Abstract"))
    }


RESULTS = results()
ROWS = jnp.ones((20, 3))  # twenty lines as JAX shows it


def filled(kind):
    """A result with an array in each field."""
    if issubclass(kind, tuple):
        return kind(*[ROWS] * len(kind._fields))
    made = object.__new__(kind)
    for name in kind.__dataclass_fields__:
        object.__setattr__(made, name, ROWS)
    return made


@pytest.mark.parametrize("name", sorted(RESULTS.keys() - LAYERS - OTHERS))
def test_a_result_is_at_most_ten_lines(name):
    lines = repr(filled(RESULTS[name])).splitlines()
    assert lines[0].startswith(f"{name}(")
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 80


LINES = []  # of progress, as they end


@contextlib.contextmanager
def shown_line(**options):
    with progress_line(**options | {"show": True}) as bar:
        yield bar
        LINES.append(str(bar))


@pytest.fixture(scope="module")
def run():
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=KEY)
    hyper = {"lr": jnp.array([1e-2, jnp.inf, 1e-1, 1e-3])}
    stop = ee.train.Stopping(steps=[99, 99, 1, 99])
    options = {"hyper": hyper, "validation": DATA, "epochs": 3, "stop": stop, "key": KEY}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eqx_ensemble.train._fit.progress_line", shown_line)
        with pytest.warns(UserWarning, match="diverged"):
            return ee.fit(ensemble, mse, lambda h: optax.sgd(h["lr"]), DATA, **options)


def test_runs_and_states(run):
    title, status, *lines = repr(run).splitlines()
    assert title == "Run of 4 members of `Linear`, 3 steps"
    assert status == "  status   2 ok, 1 stopped (2), 1 diverged (1)"
    assert [line.split()[0] for line in lines] == ["loss", "best", "time"]
    state = "TrainState[Linear](num_members=4, step=3, status=2 ok, 1 stopped (2), 1 diverged (1))"
    assert repr(run.train_state) == state
    assert repr(run.ensemble) == "Ensemble[Linear](num_members=4)"
    population = ee.methods.Population(run, np.ones((5, 4)), np.ones((5, 4), int), run.hyper)
    assert repr(population) == f"5 rounds of population-based training\n{run!r}"
    assert repr(ee.train.make_step(mse, optax.sgd(0.1))) == "Step(plan=Vmap())"
    assert repr(ee.train.Stopping(steps=np.ones(1000))) == "Stopping(steps=f64[1000](numpy))"
    assert repr(ee.plan.Blocks(4)) == "Blocks(size=4)"
    jax.make_jaxpr(lambda state: [repr(state), state.step][1])(run.train_state)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("losses", "`Run` has no attribute `losses`; see `run.history.loss`."),
        ("best_model", "see `run.best()`"),
        ("opt_state", "see `run.train_state`"),
        ("nothing", "`Run` has no attribute `nothing`."),
    ],
)
def test_a_run_tells_where_it_is(run, name, said):
    with pytest.raises(AttributeError, match="no attribute") as caught:
        getattr(run, name)
    assert said in str(caught.value)


def test_an_ensemble_tells_where_it_is(run):
    with pytest.raises(AttributeError, match="see `ensemble.stacked.weight`"):
        run.ensemble.weight  # noqa: B018
    with pytest.raises(AttributeError, match=r"see `ensemble.unstack\(\)`"):
        run.ensemble.members  # noqa: B018
    assert not hasattr(run, "losses")
    assert not hasattr(object.__new__(ee.Ensemble), "stacked")
    for again in (copy.deepcopy(run), pickle.loads(pickle.dumps(run)), jax.tree.map(lambda x: x, run)):
        np.testing.assert_array_equal(again.ensemble.stacked.weight, run.ensemble.stacked.weight)


def test_a_progress_line_counts_epochs_or_steps(run, monkeypatch):
    assert LINES[0].startswith("fit, 4 members: epoch 3/3 |")
    assert LINES[0].endswith(f", 2 training, best {np.min(run.best_score):.4g}]")
    monkeypatch.setattr("eqx_ensemble.train._fit.progress_line", shown_line)
    ee.fit(run.ensemble, mse, optax.sgd(0.01), [DATA], steps=2, key=KEY)
    assert LINES[1].startswith("fit, 4 members: step 2/2 |")
    assert ", 4 training, loss " in LINES[1]


def test_a_loss_without_data():
    def loss(model, batch, key):
        assert batch is None
        return jnp.mean(jax.vmap(model)(jax.random.normal(key, (4, 3))) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=KEY)
    fit = lambda data, **options: ee.fit(ensemble, loss, optax.sgd(0.1), data, epochs=2, key=KEY, **options)
    run = fit(None)
    assert run.history.loss.shape == (4, 200)
    assert run.num_rows is None
    assert (run.history.loss[:, -1] < 0.1 * run.history.loss[:, 0]).all()
    with pytest.raises(TypeError, match="only for data in arrays"):
        fit(None, batch_size=8)
