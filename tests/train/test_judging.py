"""Which scores are better, and by how much: invalid arguments, and the functions that rank members by them."""

import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import grouped

KEY = jax.random.key(0)
ROWS = (jnp.linspace(-1, 1, 12)[:, None], jnp.ones((12, 1)))
RATES = jnp.asarray([0.001, 0.3, 0.02, 0.1])


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def negative(model, batch, key):
    return -loss(model, batch, key)


def sgd(hyper):
    return optax.sgd(hyper["lr"])


def built():
    return ee.build(lambda key: eqx.nn.Linear(1, 1, key=key), 4, key=KEY)


def fitted(**options):
    options = {"epochs": 2, "key": KEY, "hyper": {"lr": RATES}} | options
    return ee.fit(built(), loss, sgd, ROWS, **grouped(options))


# `mode="max"` of a score is `mode="min"` of its negative, in every function that ranks


@pytest.fixture(scope="module")
def pair():
    return fitted(validation=ROWS), fitted(validation=ee.train.Validation(ROWS, score=negative, mode="max"))


def test_a_run(pair):
    low, high = pair
    assert (low.mode, high.mode) == ("min", "max")
    np.testing.assert_array_equal(high.best_score, -low.best_score)
    np.testing.assert_array_equal(high.table()["validation"], -low.table()["validation"])
    assert low.best(2).ids.tolist() == high.best(2).ids.tolist() == np.argsort(low.best_score)[:2].tolist()
    accuracy = [0.1, 0.2, 0.9, 0.3]
    assert low.best(by=accuracy, mode="max").ids.tolist() == [2]
    assert high.best(by=accuracy, mode="min").ids.tolist() == [0]


def test_runs_that_go_on(pair):
    low, high = pair
    options = {"epochs": 1, "validation": ROWS, "key": KEY}
    more = ee.fit(high, loss, sgd, ROWS, **grouped(options | {"score": negative, "mode": "max"}))
    np.testing.assert_array_equal(more.best_score, -ee.fit(low, loss, sgd, ROWS, **options).best_score)
    with pytest.raises(ValueError, match=r"chosen with `mode='max'`, got `mode='min'`"):
        ee.fit(high, loss, sgd, ROWS, **grouped(options | {"score": negative, "mode": "min"}))


def test_no_score_yet():
    with pytest.warns(UserWarning, match="diverged"):
        run = fitted(
            epochs=1,
            batch_size=1,
            hyper={"lr": RATES.at[2].set(1e30)},
            validation=ee.train.Validation(ROWS, score=negative, mode="max"),
        )
    assert np.isneginf(run.best_score).tolist() == [False, False, True, False]
    assert run.best_step.tolist() == [12, 12, -1, 12]
    assert run.best(3).ids.tolist() == np.argsort(-run.best_score)[:3].tolist()


def test_halving():
    options = {"hyper": {"lr": RATES}, "validation": ROWS, "epochs": 1, "factor": 2, "key": KEY}
    halved = lambda **more: ee.methods.successive_halving(built(), loss, sgd, ROWS, **grouped(options | more))
    low, high = halved(), halved(score=negative, mode="max")
    assert low.stopped_at.tolist() == high.stopped_at.tolist()
    assert sorted(low.stopped_at.tolist()) == [-1, 1, 1, 2]
    assert (low.stopped_at == -1).nonzero()[0] == np.argmin(low.best_score)


def test_population():
    options = {"hyper": {"lr": RATES}, "validation": ROWS, "epochs": 1, "rounds": 2, "fraction": 0.25, "key": KEY}
    grown = lambda **more: ee.methods.population_based_training(built(), loss, sgd, ROWS, **grouped(options | more))
    low, high = grown(), grown(score=negative, mode="max")
    assert low.lineage.tolist() == high.lineage.tolist()
    donor, loser = np.argmin(low.scores[0]), np.argmax(low.scores[0])
    assert low.lineage[0, loser] == donor
    np.testing.assert_array_equal(low.scores, -high.scores)


def test_decisions():
    scores, healthy = np.array([0.3, np.nan, 0.1, 0.2]), np.array([True, True, True, False])
    rank = ee.methods.population.rank
    assert rank(scores, healthy=healthy, mode="max").tolist() == rank(-scores, healthy=healthy).tolist() == [0, 2, 3, 1]
    donors = ee.methods.population.truncation(scores, fraction=0.25, mode="max", key=KEY)
    assert donors.tolist() == [0, 0, 2, 3]  # the one without a score is the worst, and gets the highest's


# What is refused

REFUSED = {
    "min_delta nan": ({"min_delta": float("nan")}, ValueError, "`train.Validation` needs `min_delta`"),
    "min_delta inf": ({"min_delta": np.inf}, ValueError, "`train.Validation` needs `min_delta`"),
    "min_delta negative": ({"min_delta": -1.0}, ValueError, "`train.Validation` needs `min_delta`"),
    "min_delta text": ({"min_delta": "0.1"}, TypeError, "`train.Validation` needs `min_delta` to be a number"),
    "min_delta array": ({"min_delta": np.zeros(3)}, TypeError, "`train.Validation` needs `min_delta` to be a number"),
    "min_delta flag": ({"min_delta": True}, TypeError, "`train.Validation` needs `min_delta` to be a number"),
    "smooth nan": ({"smooth": np.nan}, ValueError, "`train.Validation` needs `smooth` to be between 0 and 1, got nan"),
    "smooth negative": ({"smooth": -0.1}, ValueError, "`train.Validation` needs `smooth` to be between 0 and 1"),
    "smooth one": ({"smooth": 1}, ValueError, "needs `smooth` below 1, got 1: the average would never move"),
    "smooth array": ({"smooth": np.zeros(3)}, TypeError, "`train.Validation` needs `smooth` to be a number"),
    "mode": ({"mode": "higher"}, ValueError, "`train.Validation` needs `mode` to be one of 'min', 'max', got 'higher'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, unhooked):
    options, kind, text = REFUSED[case]
    with pytest.raises(kind, match=re.escape(text)):
        ee.train.Validation(ROWS, **options)


def test_no_data(unhooked):
    with pytest.raises(TypeError, match=r"`train\.Validation` needs data to score members on, got `None`"):
        ee.train.Validation(None, score=loss, mode="min")


@pytest.mark.parametrize("name", ["Run.best", "methods.population.rank"])
def test_no_such_mode(name, pair, unhooked):
    call = pair[0].best if name == "Run.best" else lambda mode: ee.methods.population.rank([1.0], mode=mode)
    with pytest.raises(ValueError, match=f"`{name}` needs `mode` to be one of 'min', 'max', got 'higher'"):
        call(mode="higher")


def test_numpy_numbers_are_numbers(unhooked):
    runs = [
        fitted(validation=ee.train.Validation(ROWS, min_delta=delta), patience=1)
        for delta in (0.5, np.float32(0.5), np.float64(0.5))
    ]
    assert len({tuple(run.stopped_at.tolist()) for run in runs}) == 1


@pytest.mark.parametrize("name", ["member", "loss", "validation", "best_step", "status", "stopped_at"])
def test_names_that_the_table_has_itself(name):
    with pytest.raises(ValueError, match=rf"`train.init` needs names(.|\n)*hyper\['{name}'\](.|\n)*the run's results"):
        ee.train.init(built(), lambda h: optax.sgd(h["lr"]), hyper={"lr": RATES, name: RATES}, key=KEY)


def test_names_that_become_one(pair):
    assert set(pair[0].table()) == {"lr", "member", "loss", "validation", "best_step", "status", "stopped_at"}
    hyper = {"lr": RATES, "a.b": RATES, "a": {"b": RATES}}
    with pytest.raises(ValueError, match=r"clashes with the column `a.b` of `hyper\['a'\]\['b'\]`"):
        ee.train.init(built(), sgd, hyper=hyper, key=KEY)


def test_the_loss_is_not_maximised():
    with pytest.raises(TypeError, match='`train.Validation` got `mode="max"` without `score`'):
        fitted(validation=ee.train.Validation(ROWS, mode="max"))


@pytest.mark.parametrize("name", ["best", "ranking"])
def test_scores_of_ones_own_need_a_mode(name, pair, stateful_run):
    run = pair[0] if name == "best" else stateful_run
    with pytest.raises(TypeError, match=f"`Run.{name}` needs `mode` with `by`"):
        getattr(run, name)(by=[0.1, 0.2, 0.9, 0.3])


def test_the_best_score_has_its_mode(pair):
    for run, other in zip(pair, ("max", "min"), strict=True):
        with pytest.raises(ValueError, match=rf"`Run.best` ranks by `best_score`(.|\n)*got `mode='{other}'`"):
            run.best(1, mode=other)
        assert run.best(1, mode=run.mode).ids.tolist() == run.best(1).ids.tolist()


def test_the_best_of_infinite_scores(pair):
    assert pair[0].best(2, by=[-np.inf, 1.0, np.inf, np.nan], mode="min").ids.tolist() == [0, 1]
    assert pair[0].best(2, by=[-np.inf, 1.0, np.inf, np.nan], mode="max").ids.tolist() == [2, 1]
    with pytest.raises(ValueError, match="at most 2, the number of healthy members"):
        pair[0].best(3, by=[-np.inf, 1.0, np.inf, np.nan], mode="min")
    with pytest.raises(TypeError, match=r"one score per member in `by`, got 'accuracy'"):
        pair[0].best(by="accuracy", mode="max")


# States of the best members


class Counting(eqx.Module):
    """A line, and the number of times that it was called."""

    line: eqx.nn.Linear
    calls: eqx.nn.StateIndex

    def __init__(self, key):
        self.line = eqx.nn.Linear(1, 1, key=key)
        self.calls = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, x, state):
        return self.line(x), state.set(self.calls, state.get(self.calls) + 1.0)


def stateful_loss(model, state, batch, key):
    x, y = batch
    mean = jnp.mean((jax.vmap(model.line)(x) - y) ** 2)
    return mean, model(x[0], state)[1]


@pytest.fixture(scope="module")
def stateful_run():
    ensemble, state = ee.build(eqx.nn.make_with_state(Counting), 4, key=KEY)
    state = state.set(ensemble.stacked.calls, 100.0 * jnp.arange(4.0))
    hyper = {"lr": RATES}
    return ee.fit(ensemble, stateful_loss, sgd, ROWS, state=state, hyper=hyper, validation=ROWS, epochs=2, key=KEY)


def test_the_best_come_with_their_states(stateful_run):
    with pytest.raises(TypeError, match=r"`best = run\[run.ranking\(...\)\]` has `best.ensemble` and `best.state`"):
        stateful_run.best(4)
    best = stateful_run[stateful_run.ranking()]
    ensemble, state, ids = best.ensemble, best.state, np.asarray(best.ensemble.ids)
    np.testing.assert_array_equal(best.hyper["lr"], RATES[ids])
    np.testing.assert_array_equal(stateful_run.ranking(2), ids[:2])
    assert ids.tolist() == np.argsort(stateful_run.best_score).tolist() != [0, 1, 2, 3]
    assert (np.asarray(state.get(ensemble.stacked.calls)) // 100).tolist() == ids.tolist()
    x = ROWS[0][:3]
    members = lambda ensemble, state: np.asarray(ee.predict(ensemble, x, state=state))
    np.testing.assert_array_equal(members(ensemble, state), members(stateful_run.ensemble, stateful_run.state)[ids])
    assert "best" in str(stateful_run)


class TestTrainingDataAsValidation:
    @pytest.fixture(autouse=True)
    def shown(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    @pytest.mark.parametrize("wrap", [lambda x: x, np.asarray, ee.Each], ids=["jax", "numpy", "each"])
    def test_is_warned_of(self, wrap):
        x, y = (jnp.ones((3, 8, 1)), jnp.zeros((3, 8, 1))) if wrap is ee.Each else (jnp.ones((8, 1)), jnp.zeros((8, 1)))
        data = wrap(x), wrap(y)
        ensemble = ee.build(lambda key: eqx.nn.Linear(1, 1, key=key), 3, key=KEY)
        mse = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
        train = lambda validation: ee.fit(ensemble, mse, optax.sgd(0.1), data, validation=validation, epochs=1, key=KEY)
        with pytest.warns(UserWarning, match="`fit` got the training data as `validation`"):
            train(data)
        with pytest.warns(UserWarning, match="`fit` got the training data as `validation`"):
            train(jax.tree.map(lambda x: x + 0, data))  # a copy
        train((data[0], jax.tree.map(lambda y: y + 3, data[1])))  # the same inputs, other targets
