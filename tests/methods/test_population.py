"""Populations, replayed by a loop over single members, and comparisons by a loop over folds."""

import dataclasses
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import compare, cross_fit, population, rank
from eqx_ensemble.train import Status

from ..factories import assert_close, assert_same, in_order, relaxed

KEY = jax.random.key(0)
MEMBERS, BATCH, STEPS = 6, 8, 5
RANGES = {"lr": ee.sweep.LogUniform(1e-3, 1e-1)}
OPTIMISER = lambda hyper: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(hyper["lr"]))


def make(key):
    return eqx.nn.MLP(3, "scalar", 8, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    keep = jax.random.bernoulli(key, 0.8, x.shape)
    return jnp.mean((jax.vmap(model)(jnp.where(keep, x, 0.0)) - y) ** 2)


X = jax.random.normal(KEY, (STEPS * BATCH + 16, 3))
DATA, OTHERS = ((X[rows], jnp.sin(X[rows, 0])) for rows in (slice(0, STEPS * BATCH), slice(STEPS * BATCH, None)))
score = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
HELD_OUT = ee.train.Validation(OTHERS, score=score, mode="min")
OPTIONS = {"batch_size": BATCH, "shuffle": False, "progress": False, "key": KEY}
hyper = lambda members=MEMBERS: ee.sweep.draw(RANGES, members, key=KEY)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(make, MEMBERS, key=KEY)


@pytest.fixture(scope="module")
def state(ensemble):
    """A training state in which no two members agree in anything."""
    options = OPTIONS | {"validation": HELD_OUT, "hyper": hyper(), "epochs": 1}
    return ee.fit(ensemble, loss, OPTIMISER, DATA, **options).train_state


TWO = ee.train.init(ee.build(make, 2, key=KEY), optax.sgd(0.1), key=KEY)


def with_scores(scores, status=None, step=0):
    """A state of members with these scores; nothing else of it is looked at."""
    count = len(scores)
    status = np.zeros(count, np.int8) if status is None else np.array(status, np.int8)
    own = np.array(scores, np.float32), status, np.full(count, step, np.int32), ee.member_keys(KEY, count)
    return eqx.tree_at(lambda s: (s.score, s.status, s.step, s.keys), TWO, own)


class Alone:
    """One model, trained as usual with `equinox.filter_jit` and optax, without ensembles."""

    def __init__(self, model, key):
        self.model, self.key, self.step = model, key, 0
        self.opt_state = OPTIMISER({"lr": 0.0}).init(eqx.filter(model, eqx.is_inexact_array))

    def train(self, steps, lr):
        for batch in in_order(DATA, BATCH, self.step + steps)[self.step :]:
            grads = eqx.filter_jit(eqx.filter_grad(loss))(self.model, batch, jax.random.fold_in(self.key, self.step))
            with relaxed():
                updates, self.opt_state = OPTIMISER({"lr": lr}).update(grads, self.opt_state)
            self.model = eqx.apply_updates(self.model, updates)
            self.step += 1


def alone(state):
    keys = jax.vmap(lambda key: jax.random.fold_in(key, zlib.crc32(b"loss")))(state.keys)
    makes = ee.member_keys(KEY, state.num_members)
    return [Alone(make(a), b) for a, b in zip(makes, keys, strict=True)]


def test_rank():
    scores = [0.3, np.nan, np.inf, 0.1, 0.2]
    rank = lambda scores, status=None, mode="min": population.rank(with_scores(scores, status), mode=mode).tolist()
    assert rank(scores) == [3, 4, 0, 2, 1]
    assert rank(scores, [0, 0, 0, 2, 0]) == [4, 0, 2, 3, 1]
    assert rank([1.0, 0.0, 1.0, 0.0]) == [1, 3, 0, 2]
    assert rank([0.3, np.nan, 0.2, 0.4], mode="max") == [3, 0, 2, 1]
    with pytest.raises(ValueError, match="cannot compare members: the scores of all 2 that train are NaN"):
        rank([np.nan, 0.0, np.nan], [0, 2, 0])


@pytest.mark.slow
def test_the_best_train_on_alone(state):
    kept, best = population.keep_best(state, 2), np.sort(np.argsort(state.score)[:2])
    assert np.flatnonzero(kept.status == Status.OK).tolist() == best.tolist()
    options = OPTIONS | {"key": None, "epochs": 1}
    run, whole = (ee.fit(state, loss, OPTIMISER, DATA, **options) for state in (kept, state))
    assert_same(run.ensemble[best], whole.ensemble[best])
    others = np.setdiff1d(range(MEMBERS), best)
    assert_same(run.ensemble[others], state.ensemble[others])


def test_the_worst_take_from_the_best():
    """Members that diverged and scores of NaN are no donors."""
    scores = np.random.default_rng(0).permutation(10)
    order, seen = np.argsort(scores), set()
    for step in range(40):
        donors = population.truncation(with_scores(scores, step=step), fraction=0.5)
        assert set(donors[order[5:]]) <= set(order[:5].tolist())
        assert (donors[order[:5]] == order[:5]).all()
        seen |= set(donors[order[5:]].tolist())
    assert seen == set(order[:5].tolist())
    state = with_scores([0.0, np.nan, 0.2, 0.1, 0.4, 0.3, np.nan, 0.5], [2, 0, 0, 0, 0, 0, 2, 0])
    donors = population.truncation(state, fraction=0.25)
    assert set(donors[[0, 1, 6]]) <= {2, 3}
    assert donors[[2, 3, 4, 5, 7]].tolist() == [2, 3, 4, 5, 7]
    assert population.truncation(with_scores([np.nan, 0.1, np.nan, np.nan]), fraction=0.5).tolist() == [1] * 4
    assert population.truncation(with_scores([1.0, 2.0], [2, 2])).tolist() == [0, 1]


@pytest.mark.slow
def test_what_is_copied_and_what_stays(state):
    donors, new = population.truncation(state), population.exploit(state)
    copies = np.flatnonzero(donors != np.arange(MEMBERS))
    others = np.setdiff1d(range(MEMBERS), copies)
    assert_same(new[others], state[others])
    assert_same((new.params, new.opt_state), jax.tree.map(lambda x: x[donors], (state.params, state.opt_state)))
    assert_same((new.keys, new.step), (state.keys, state.step))
    assert np.isinf(new.best_score[copies]).all()
    assert new.best_step[copies].tolist() == [-1, -1]
    assert_same(jax.tree.map(lambda x: x[copies], new.best[0]), state[donors[copies]].params)
    ratio = np.asarray(new.hyper["lr"] / state.hyper["lr"][donors])[copies]
    np.testing.assert_allclose(np.minimum(abs(ratio - 0.8), abs(ratio - 1.2)), 0.0, atol=1e-6)
    lost = dataclasses.replace(state, status=state.status.at[2].set(2), step=state.step.at[2].set(1))
    new = population.exploit(lost, fraction=0.01, explore=None)
    assert (new.status.tolist(), new.step.tolist()) == ([0] * MEMBERS, [STEPS] * MEMBERS)
    noise = ee.train.init(state.ensemble, optax.noisy_sgd(0.1, key=0), key=KEY)  # only the noise differs
    assert_same(population.copy_members(noise, [0, 0, 0, 3, 4, 5]).opt_state, noise.opt_state)


def test_hyper_parameters_stay_in_their_ranges():
    ranges = {"lr": ee.sweep.LogUniform(0.01, 0.1), "width": ee.sweep.Choice([8, 16, 32])}
    own = {"lr": jnp.array(0.09), "width": jnp.array(16), "other": jnp.array(3.0)}
    keys = jax.random.split(KEY, 100)
    found = [population.perturb_hyper(ranges, resample=0.0)(own, key) for key in keys]
    assert {round(float(one["lr"]), 6) for one in found} == {0.072, 0.1}  # 0.9 * 1.2 is outside
    assert {one["width"] for one in found} == {8, 32}  # a choice moves to a neighbour
    assert all(one["other"] == 3.0 for one in found)
    drawn = {float(population.perturb_hyper(RANGES, resample=1.0)(own, key)["lr"]) for key in keys}
    assert len(drawn) == 100
    assert 1e-3 <= min(drawn) < 2e-3 < 5e-2 < max(drawn) <= 1e-1


def train(ensemble, **options):
    search = {"rounds": 4, "epochs": 2, "fraction": 0.34, "validation": HELD_OUT, "hyper": hyper()}
    options = search | OPTIONS | options | {"explore": population.perturb_hyper(RANGES)}
    return ee.methods.population_based_training(ensemble, loss, OPTIMISER, DATA, **options)


@pytest.fixture(scope="module")
def found(ensemble):
    return train(ensemble)


@pytest.mark.slow
def test_training_is_replayed_by_a_loop_over_single_members(found):
    members = alone(found.run.train_state)
    for r in range(4):
        for i, member in enumerate(members):
            member.train(2 * STEPS, float(found.hyper["lr"][r, i]))
        before = [(member.model, member.opt_state) for member in members]
        for member, donor in zip(members, found.lineage[r].tolist(), strict=True):
            member.model, member.opt_state = before[donor]
    for i, member in enumerate(members):
        assert_close(found.run.train_state.ensemble[i], member.model, 2e-5)  # forty steps of Adam in another program


@pytest.mark.slow
def test_who_was_replaced_explored_and_won(found):
    for r, (scores, row) in enumerate(zip(found.scores[:3], found.lineage[:3], strict=True)):
        order, replaced = np.argsort(scores), row != np.arange(MEMBERS)
        assert set(np.flatnonzero(replaced)) == set(order[-3:])
        assert set(row[replaced]) <= set(order[:3])
        assert ((found.hyper["lr"][r + 1] != found.hyper["lr"][r][row]) == replaced).all()
    for place in range(MEMBERS):
        line = found.ancestors(place)
        assert [found.lineage[r][line[r + 1]] for r in range(3)] == line[:-1].tolist()
        copied_in = [r for r in range(3) if found.lineage[r][place] != place]
        assert found.run.best_step[place] > (2 * STEPS * (copied_in[-1] + 1) if copied_in else 0)


def parts(found):
    return found.run.train_state, found.run.history, found.scores, found.lineage, found.hyper


def kill(state):
    if int(state.step.max()) == 25:
        raise KeyError("killed")


@pytest.mark.slow
def test_killed_it_resumes_bit_for_bit(ensemble, found, tmp_path):
    saving = {"checkpoint": ee.train.Checkpoint(tmp_path / "run.eqx", every=1)}
    with pytest.raises(KeyError):
        train(ensemble, callbacks=kill, **saving)
    assert_same(parts(train(ensemble, **saving)), parts(found))


@pytest.mark.slow
def test_successive_halving():
    """Who continues and how long, replayed by a loop over single members."""
    nine, options = ee.build(make, 9, key=KEY), {"validation": HELD_OUT, "epochs": 1, "hyper": hyper(9)} | OPTIONS
    halve = lambda **more: ee.methods.successive_halving(nine, loss, OPTIMISER, DATA, **options, **more)
    run = halve()
    assert sorted(run.stopped_at.tolist()) == [-1] + [5] * 6 + [15] * 2
    scores = run.history.validation
    assert set(np.argsort(scores[:, 0])[:3]) == set(np.flatnonzero(run.stopped_at != 5))
    still = np.flatnonzero(np.isfinite(scores[:, 2]))
    assert run.stopped_at[still[np.argmin(scores[still, 2])]] == -1
    for i, member in enumerate(alone(run.train_state)):
        member.train(45 if run.stopped_at[i] == -1 else int(run.stopped_at[i]), float(run.hyper["lr"][i]))
        assert_close(run.train_state.ensemble[i], member.model, 2e-5)  # up to 45 steps of Adam in another program
    assert (halve(factor=2, rungs=2).stopped_at == -1).sum() == 4


@pytest.mark.slow
def test_hyperband(tmp_path):
    """Sizes and lengths by the paper's formulas, for R = 9 and eta = 3; no member trains longer than R."""
    options = dict(epochs=9, factor=3, validation=HELD_OUT, checkpoint=tmp_path, **OPTIONS)
    fit = lambda: ee.methods.hyperband(make, RANGES, loss, OPTIMISER, DATA, **options)
    runs = fit()
    steps = [sorted(np.where(run.stopped_at == -1, 45, run.stopped_at).tolist()) for run in runs]
    assert steps == [[5] * 6 + [15] * 2 + [45], [15] * 4 + [45], [45] * 3]
    rates = np.concatenate([run.hyper["lr"] for run in runs])
    assert_same(rates, np.asarray(ee.sweep.draw(RANGES, 17, key=KEY)["lr"]))
    assert_same([run.train_state for run in fit()], [run.train_state for run in runs])


# Comparisons: equal to a loop by hand, bit for bit

SHORT = {"epochs": 2, "batch_size": 6, "progress": False}
ALL = X[:18], jnp.sin(X[:18, 0])
FOLDS = ee.resample.folds(18, 3, key=KEY)
SCORES = {"rmse": ee.scores.rmse, "crps": ee.scores.crps}


def method(rate):
    return lambda data, key: ee.fit(ee.build(make, 2, key=key), loss, optax.sgd(rate), data, key=key, **SHORT).predict


METHODS = {"slow": method(0.01), "fast": method(0.1)}


@pytest.fixture(scope="module")
def columns():
    found = compare(METHODS, ALL, SCORES, folds=FOLDS, seeds=2, key=KEY)
    return {name: np.asarray(found[name]) for name in found}


@pytest.mark.slow
def test_the_loops_by_hand(columns):
    sizes, seconds = ["train_rows", "test_rows"], ["compile_seconds", "run_seconds"]
    assert list(columns) == ["method", "seed", "fold", *sizes, *seconds, "rmse", "crps"]
    assert (columns["train_rows"] == 12).all()
    assert (columns["test_rows"] == 6).all()
    expected = []
    for seed in range(2):
        for fold in range(3):
            key = jax.random.fold_in(jax.random.fold_in(KEY, seed), fold)
            train, test = FOLDS.train[fold], FOLDS.test[fold]
            for name, one in METHODS.items():
                found = one((ALL[0][train], ALL[1][train]), key)(ALL[0][test])
                expected.append((name, seed, fold, *(float(fn(found, ALL[1][test])) for fn in SCORES.values())))
    assert list(zip(*(columns[name] for name in columns if name not in sizes + seconds), strict=True)) == expected


def test_the_first_fit_compiles_and_later_ones_run(columns):
    first, *later = columns["compile_seconds"][::2]
    assert first > max(later)
    assert (columns["compile_seconds"] >= 0).all()
    assert (columns["run_seconds"] > 0).all()


def test_a_comparison_is_ranked(columns):
    found = rank(columns, "crps", "slow")
    gaps = (columns["crps"][1::2] - columns["crps"][::2]).reshape(2, 3).T
    np.testing.assert_allclose(np.asarray(found["difference"])[found["method"] == "fast"], gaps.mean())


def test_members_that_diverge_are_scores_of_nan(columns):
    with pytest.warns(UserWarning, match="diverged"):
        found = compare({"slow": METHODS["slow"], "lost": method(1e30)}, ALL, SCORES, folds=FOLDS, key=KEY)
    np.testing.assert_array_equal(found["crps"][::2], columns["crps"][:6:2])
    assert np.isnan(found["crps"][1::2]).all()
    assert np.isnan(rank(found, "crps", "slow")["probability"][1])


@pytest.mark.slow
def test_every_row_is_predicted_by_those_that_held_it_out():
    ensemble, sgd = ee.build(make, 6, key=KEY), optax.sgd(0.1)
    run, held_out = cross_fit(ensemble, loss, sgd, ALL, FOLDS, x=ALL[0], key=KEY, **SHORT)
    expected = ee.fit(ensemble, loss, sgd, ALL, rows=np.tile(FOLDS.train, (2, 1)), key=KEY, **SHORT)
    assert_same(run.ensemble, expected.ensemble)
    found = np.asarray(expected.predict(ALL[0]))
    for fold in range(3):
        for row in FOLDS.test[fold]:
            np.testing.assert_allclose(held_out.mean[row], found[fold::3, row].mean(0), rtol=1e-5)
    assert held_out.num_members.tolist() == [2] * 18
    data = ALL[0], np.where(np.arange(18) == FOLDS.test[0][0], np.inf, ALL[1])  # a fold that diverges is left out
    with pytest.warns(UserWarning, match="members 1, 2 diverged"):
        _, held_out = cross_fit(ensemble[:3], loss, sgd, data, FOLDS, x=ALL[0], key=KEY, **SHORT)
    assert np.isfinite(held_out.mean[FOLDS.test[0]]).all()
    assert np.isnan(held_out.mean[FOLDS.test[1]]).all()
    with pytest.raises(ValueError, match="as many members for each of 3 folds, got 4"):
        cross_fit(ensemble[:4], loss, sgd, ALL, FOLDS, x=ALL[0], epochs=1, key=KEY)
