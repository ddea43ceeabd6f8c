"""Populations: decisions at ends of epochs, and the same decisions replayed by a loop over single members."""

import dataclasses
import functools as ft
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._keys import tag
from eqx_ensemble.methods import population
from eqx_ensemble.train import Status
from eqx_ensemble.train._blocks import Crew

from ..factories import assert_close, assert_same

KEY = jax.random.key(0)
MEMBERS, BATCH, STEPS = 6, 8, 5
RANGES = {"lr": ee.sweep.LogUniform(1e-3, 1e-1)}
OPTIMISER = lambda hyper: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(hyper["lr"]))


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    keep = jax.random.bernoulli(key, 0.8, x.shape)
    return jnp.mean((jax.vmap(model)(jnp.where(keep, x, 0.0))[:, 0] - y) ** 2)


def score(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def rows(count=STEPS * BATCH, seed=0):
    x = jax.random.normal(jax.random.key(seed), (count, 3))
    return x, jnp.sin(x[:, 0])


DATA = rows()
HELD_OUT = ee.train.Validation(rows(16, 1), score=score, mode="min")
OPTIONS = {"batch_size": BATCH, "shuffle": False, "progress": False, "key": KEY}


def hyper(members=MEMBERS):
    return ee.sweep.draw(RANGES, members, key=KEY)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(make, MEMBERS, key=KEY)


@pytest.fixture(scope="module")
def state(ensemble):
    """A training state in which no two members agree in anything."""
    options = OPTIONS | {"validation": HELD_OUT, "hyper": hyper(), "epochs": 1}
    return ee.fit(ensemble, loss, OPTIMISER, DATA, **options).train_state


@ft.cache
def two_members():
    return ee.train.init(ee.build(make, 2, key=KEY), optax.sgd(0.1), key=KEY)


def with_scores(scores, status=None, step=0):
    """A state of members with these scores; nothing else of it is looked at."""
    count = len(scores)
    status = np.zeros(count, np.int8) if status is None else np.array(status, np.int8)
    own = np.array(scores, np.float32), status, np.full(count, step, np.int32), ee.member_keys(KEY, count)
    return eqx.tree_at(lambda s: (s.score, s.status, s.step, s.keys), two_members(), own)


class Alone:
    """One model, trained as usual with `equinox.filter_jit` and optax, without ensembles."""

    def __init__(self, model, key):
        self.model, self.key, self.step = model, key, 0
        self.opt_state = None

    def train(self, steps, lr):
        optimiser = OPTIMISER({"lr": lr})
        if self.opt_state is None:
            self.opt_state = optimiser.init(eqx.filter(self.model, eqx.is_inexact_array))
        x, y = DATA
        for _ in range(steps):
            at = self.step % STEPS * BATCH
            batch, key = (x[at : at + BATCH], y[at : at + BATCH]), jax.random.fold_in(self.key, self.step)
            grads = eqx.filter_jit(eqx.filter_grad(loss))(self.model, batch, key)
            with jax.numpy_dtype_promotion("standard"):  # as optax needs it
                updates, self.opt_state = optimiser.update(grads, self.opt_state)
            self.model = eqx.apply_updates(self.model, updates)
            self.step += 1


def alone(state):
    keys = jax.vmap(lambda key: jax.random.fold_in(key, tag("loss")))(state.keys)
    makes = ee.member_keys(KEY, state.num_members)
    return [Alone(make(a), b) for a, b in zip(makes, keys, strict=True)]


class TestRank:
    @pytest.mark.parametrize(
        ("scores", "status", "expected"),
        [
            ([0.3, 0.1, 0.2], None, [1, 2, 0]),
            ([0.3, np.nan, np.inf, 0.1, 0.2], None, [3, 4, 0, 2, 1]),
            ([0.3, np.nan, np.inf, 0.1, 0.2], [0, 0, 0, 2, 0], [4, 0, 2, 3, 1]),
            ([1.0, 0.0, 1.0, 0.0], None, [1, 3, 0, 2]),
        ],
    )
    def test_best_first(self, scores, status, expected):
        assert population.rank(with_scores(scores, status)).tolist() == expected

    def test_higher_is_better(self):
        assert population.rank(with_scores([0.3, np.nan, 0.2, 0.4]), mode="max").tolist() == [3, 0, 2, 1]

    def test_scores_that_are_all_undefined(self):
        with pytest.raises(ValueError, match="cannot compare members: the scores of all 2 that train are NaN"):
            population.rank(with_scores([np.nan, 0.0, np.nan], [0, 2, 0]))


def test_the_best_train_on_alone(state):
    kept = population.keep_best(state, 2)
    best = np.sort(np.argsort(state.score)[:2])
    assert np.flatnonzero(kept.status == Status.OK).tolist() == best.tolist()
    assert population.keep_best(kept, 3).status.tolist() == kept.status.tolist()
    run, whole = (
        ee.fit(state, loss, OPTIMISER, DATA, **OPTIONS | {"key": None, "epochs": 1}) for state in (kept, state)
    )
    assert_same(run.ensemble[best], whole.ensemble[best])
    others = np.setdiff1d(range(MEMBERS), best)
    assert_same(run.ensemble[others], state.ensemble[others])


class TestTruncation:
    @pytest.mark.parametrize(("fraction", "count"), [(0.1, 1), (0.2, 2), (0.5, 5)])
    def test_the_worst_take_from_the_best(self, fraction, count):
        scores = np.random.default_rng(0).permutation(10)
        order, seen = np.argsort(scores), set()
        for step in range(40):
            donors = population.truncation(with_scores(scores, step=step), fraction=fraction)
            assert set(donors[order[-count:]]) <= set(order[:count].tolist())
            assert (donors[order[:-count]] == order[:-count]).all()
            seen |= set(donors[order[-count:]].tolist())
        assert seen == set(order[:count].tolist())

    def test_a_diverged_member_is_replaced_and_is_no_donor(self):
        state = with_scores([0.0, np.nan, 0.2, 0.1, 0.4, 0.3, np.nan, 0.5], [2, 0, 0, 0, 0, 0, 2, 0])
        donors = population.truncation(state, fraction=0.25)
        assert set(donors[[0, 1, 6]]) <= {2, 3}
        assert donors[[2, 3, 4, 5, 7]].tolist() == [2, 3, 4, 5, 7]

    def test_a_score_of_nan_is_no_donor_where_few_others_are_left(self):
        assert population.truncation(with_scores([np.nan, 0.1, np.nan, np.nan]), fraction=0.5).tolist() == [1] * 4

    def test_no_member_is_left(self):
        assert population.truncation(with_scores([1.0, 2.0], [2, 2])).tolist() == [0, 1]
        assert population.truncation(with_scores([1.0])).tolist() == [0]

    def test_a_fraction_is_not_rounded_twice(self):
        donors = population.truncation(with_scores(np.arange(50.0)), fraction=0.14)
        assert (donors != np.arange(50)).sum() == 7


class TestCopies:
    def test_what_is_copied_and_what_stays(self, state):
        donors = [0, 1, 0, 3, 4, 3]
        copied = population.copy_members(state, donors)
        params = lambda state, i: jax.tree.map(lambda x: x[i], (state.params, state.opt_state, state.hyper))
        for place, donor in enumerate(donors):
            assert_same(params(copied, place), params(state, donor))
        assert_same((copied.keys, copied.step), (state.keys, state.step))

    def test_noise_stays_ones_own(self, ensemble):
        state = ee.train.init(ensemble, optax.noisy_sgd(0.1, key=0), key=KEY)
        copied = population.copy_members(state, [0, 0, 0, 3, 4, 5])
        assert_same(copied.opt_state, state.opt_state)  # only the noise keys differ between members

    def test_one_that_diverged_trains_again(self, state):
        lost = dataclasses.replace(state, status=state.status.at[2].set(2), step=state.step.at[2].set(1))
        new = population.exploit(lost, fraction=0.01, explore=None)
        assert new.status.tolist() == [0] * MEMBERS
        assert new.step.tolist() == [STEPS] * MEMBERS

    def test_a_copy_begins_a_search_of_its_own(self, state):
        donors = population.truncation(state)
        new = population.exploit(state, explore=None)
        copies = np.flatnonzero(donors != np.arange(MEMBERS))
        assert np.isinf(new.best_score[copies]).all()
        assert new.best_step[copies].tolist() == [-1, -1]
        assert_same(jax.tree.map(lambda x: x[copies], new.best[0]), state[donors[copies]].params)
        others = np.setdiff1d(range(MEMBERS), copies)
        assert_same(new[others], state[others])


class TestExplore:
    def test_within_its_range(self):
        ranges = {"lr": ee.sweep.LogUniform(0.01, 0.1), "width": ee.sweep.Choice([8, 16, 32])}
        fn = population.perturb_hyper(ranges, resample=0.0)
        own = {"lr": jnp.array(0.09), "width": jnp.array(16), "other": jnp.array(3.0)}
        found = [fn(own, jax.random.key(seed)) for seed in range(30)]
        rates = sorted({round(float(one["lr"]), 6) for one in found})
        assert rates == [0.072, 0.1]  # 0.9 * 1.2 is outside
        assert {one["width"] for one in found} == {8, 32}  # a choice moves to a neighbour
        assert all(one["other"] == 3.0 for one in found)

    def test_drawn_again(self):
        fn = population.perturb_hyper(RANGES, resample=1.0)
        found = [fn({"lr": jnp.array(0.02)}, jax.random.key(seed))["lr"] for seed in range(200)]
        assert len(set(found)) == 200
        assert 1e-3 <= min(found) < 2e-3
        assert 5e-2 < max(found) <= 1e-1

    def test_only_copies_change(self, state):
        donors = population.truncation(state)
        ratio = np.asarray(population.exploit(state).hyper["lr"] / state.hyper["lr"][donors])
        copied = donors != np.arange(MEMBERS)
        assert ratio[~copied].tolist() == [1.0] * 4
        np.testing.assert_allclose(np.minimum(abs(ratio[copied] - 0.8), abs(ratio[copied] - 1.2)), 0.0, atol=1e-6)

    def test_whole_numbers_stay_whole(self, state):
        state = dataclasses.replace(state, hyper={"n": jnp.full(MEMBERS, 3)})
        new = population.exploit(state, explore=lambda hyper, key: {"n": 2 * hyper["n"]})
        assert sorted(new.hyper["n"].tolist()) == [3, 3, 3, 3, 6, 6]
        assert new.hyper["n"].dtype == state.hyper["n"].dtype


EXPLORE = population.perturb_hyper(RANGES)
SEARCH = {"rounds": 4, "epochs": 2, "fraction": 0.34, "explore": EXPLORE, "validation": HELD_OUT}


def train(ensemble, loss=loss, **options):
    options = {"hyper": hyper()} | SEARCH | OPTIONS | options
    return ee.methods.population_based_training(ensemble, loss, OPTIMISER, DATA, **options)


@pytest.fixture(scope="module")
def found(ensemble):
    return train(ensemble)


class Killed(BaseException):
    """Ends a call as SIGKILL does: nothing that handles errors sees it."""


def kill_at(step):
    def callback(state):
        if int(state.step.max()) == step:
            raise Killed

    return callback


class TestPopulationBasedTraining:
    def test_replayed_by_a_loop_over_single_members(self, found):
        members = alone(found.run.train_state)
        for r in range(4):
            for i, member in enumerate(members):
                member.train(2 * STEPS, float(found.hyper["lr"][r, i]))
            if r < 3:
                before = [(member.model, member.opt_state) for member in members]
                for member, donor in zip(members, found.lineage[r].tolist(), strict=True):
                    member.model, member.opt_state = before[donor]
        assert (found.lineage[:3] != np.arange(MEMBERS)).sum() == 9
        last = found.run.train_state.ensemble.unstack()
        for i, member in enumerate(members):
            assert_close(last[i], member.model, 2e-5)  # forty steps of Adam in another program

    def test_its_text_is_the_summary_of_its_run(self, found):
        assert repr(found) == f"4 rounds of population-based training\n{found.run!r}"

    def test_only_the_worst_were_replaced_by_the_best(self, found):
        for scores, row in zip(found.scores[:3], found.lineage[:3], strict=True):
            order = np.argsort(scores)
            replaced = np.flatnonzero(row != np.arange(MEMBERS))
            assert set(replaced) == set(order[-3:])
            assert set(row[replaced]) <= set(order[:3])
        assert found.lineage[3].tolist() == list(range(MEMBERS))

    def test_only_those_replaced_explore(self, found):
        for r in range(3):
            copied = found.lineage[r]
            same = found.hyper["lr"][r + 1] == found.hyper["lr"][r][copied]
            assert same[copied == np.arange(MEMBERS)].all()
            assert not same[copied != np.arange(MEMBERS)].any()

    def test_ancestors(self, found):
        for place in range(MEMBERS):
            line = found.ancestors(place)
            assert line[-1] == place
            assert [found.lineage[r][line[r + 1]] for r in range(3)] == line[:-1].tolist()

    def test_one_history(self, found):
        assert found.run.history.loss.shape == (MEMBERS, 4 * 2 * STEPS)
        assert found.run.history.validation.shape == (MEMBERS, 8)
        assert found.run.table()["lr"].tolist() == found.hyper["lr"][-1].tolist()

    def test_best_weights_are_those_since_it_was_copied(self, found):
        for place in range(MEMBERS):
            copied_in = [r for r in range(3) if found.lineage[r][place] != place]
            since = 2 * STEPS * (copied_in[-1] + 1) if copied_in else 0
            assert found.run.best_step[place] > since

    @pytest.mark.parametrize("step", [5, 10, 25, 40])
    def test_killed_it_resumes_bit_for_bit(self, ensemble, found, tmp_path, step):
        saving = {"checkpoint": ee.train.Checkpoint(tmp_path / "run.eqx", every=1)}
        with pytest.raises(Killed):
            train(ensemble, callbacks=kill_at(step), **saving)
        again = train(ensemble, **saving)
        assert_same(parts(again), parts(found))

    def test_members_that_diverge_are_replaced(self, ensemble):
        def faulty(model, batch, key, hyper):
            return jnp.where(hyper["lr"] > 0.5, jnp.nan, loss(model, batch, key))

        rates = {"lr": jnp.array([0.01, 0.9, 0.02, 0.9, 0.03, 0.04])}
        found = train(ensemble, faulty, hyper=rates, explore=ee.train.perturb)
        assert set(found.lineage[0][[1, 3]]) <= {0, 2, 4, 5}
        assert found.run.status.tolist() == [Status.OK] * MEMBERS
        assert np.isfinite(found.run.history.loss[:, 2 * STEPS :]).all()
        assert found.run.table()["lr"].tolist() == found.hyper["lr"][-1].tolist()  # the lineage is what was decided

    def test_all_diverge(self, ensemble):
        faulty = lambda model, batch, key: jnp.nan * loss(model, batch, key)
        with pytest.warns(UserWarning, match="all members diverged"):
            found = train(ensemble, faulty)
        assert found.run.status.tolist() == [Status.DIVERGED] * MEMBERS
        assert len(found.scores) == 0

    def test_all_members_train_in_every_round(self, ensemble):
        with pytest.raises(TypeError, match="takes no `patience`"):
            train(ensemble, patience=2)

    @pytest.mark.usefixtures("interruptible")
    def test_interrupted_before_the_first_round(self, ensemble, monkeypatch):
        call = Crew.call

        def interrupted(crew, *arguments):
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                signal.raise_signal(signal.SIGINT)
                monkeypatch.undo()
            return call(crew, *arguments)

        monkeypatch.setattr(Crew, "call", interrupted)
        found = train(ensemble)
        assert found.run.interrupted
        assert found.run.history.validation.shape == (MEMBERS, 1)
        assert found.scores.shape == found.lineage.shape == found.hyper["lr"].shape == (0, MEMBERS)


def parts(found):
    run = found.run if isinstance(found, ee.methods.Population) else found
    own = run.ensemble, run.train_state, run.history
    return own if run is found else (own, found.scores, found.lineage, found.hyper)


def halve(members=9, loss=loss, **options):
    options = {"hyper": hyper(members), "validation": HELD_OUT, "epochs": 1} | OPTIONS | options
    return ee.methods.successive_halving(ee.build(make, members, key=KEY), loss, OPTIMISER, DATA, **options)


@pytest.fixture(scope="module")
def halved():
    return halve()


class TestSuccessiveHalving:
    def test_which_members_continue_and_how_long(self, halved):
        assert sorted(halved.stopped_at.tolist()) == [-1] + [5] * 6 + [15] * 2
        scores = halved.history.validation
        assert set(np.argsort(scores[:, 0])[:3]) == set(np.flatnonzero(halved.stopped_at != 5))
        still = np.flatnonzero(np.isfinite(scores[:, 2]))
        assert halved.stopped_at[still[np.argmin(scores[still, 2])]] == -1
        assert sorted(set(halved.status.tolist())) == [Status.OK, Status.STOPPED]

    def test_replayed_by_a_loop_over_single_members(self, halved):
        last = halved.train_state.ensemble.unstack()
        for i, member in enumerate(alone(halved.train_state)):
            member.train(45 if halved.stopped_at[i] == -1 else int(halved.stopped_at[i]), float(halved.hyper["lr"][i]))
            assert_close(last[i], member.model, 2e-5)  # up to 45 steps of Adam in another program

    @pytest.mark.parametrize("step", [5, 10, 15, 45])
    def test_killed_it_resumes_bit_for_bit(self, halved, tmp_path, step):
        saving = {"checkpoint": ee.train.Checkpoint(tmp_path / "run.eqx", every=1)}
        with pytest.raises(Killed):
            halve(callbacks=kill_at(step), **saving)
        assert_same(parts(halve(**saving)), parts(halved))

    @pytest.mark.parametrize(("factor", "rungs", "left"), [(2, None, 1), (2, 2, 4), (4, None, 1), (1.4, None, 1)])
    def test_other_factors(self, factor, rungs, left):
        run = halve(factor=factor, rungs=rungs)
        assert (run.stopped_at == -1).sum() == left

    def test_a_score_that_is_no_number_is_dropped_first(self):
        def judged(model, batch, key, hyper):
            return jnp.where(hyper["index"] == 3, jnp.nan, score(model, batch, key))

        validation = ee.train.Validation(HELD_OUT.data, score=judged, mode="min")
        own = {"hyper": hyper(8) | {"index": jnp.arange(8)}, "validation": validation}
        with pytest.warns(UserWarning, match="the validation scores of members 3 are NaN"):
            run = halve(8, factor=2, **own)
        assert sorted(run.stopped_at.tolist()) == [-1, 5, 5, 5, 5, 10, 10, 20]
        assert run.stopped_at[3] == 5


def hyperband(epochs, factor=3, **options):
    options = {"validation": HELD_OUT} | OPTIONS | options
    return ee.methods.hyperband(make, RANGES, loss, OPTIMISER, DATA, epochs=epochs, factor=factor, **options)


def test_hyperband_brackets(tmp_path):
    """Sizes and lengths by the paper's formulas, for R = 9 and eta = 3."""
    runs = hyperband(9, checkpoint=tmp_path)
    assert [len(run.stopped_at) for run in runs] == [9, 5, 3]
    steps = [sorted(np.where(run.stopped_at == -1, run.history.loss.shape[1], run.stopped_at).tolist()) for run in runs]
    assert steps == [[5] * 6 + [15] * 2 + [45], [15] * 4 + [45], [45] * 3]
    rates = np.concatenate([run.hyper["lr"] for run in runs])
    assert_same(rates, np.asarray(ee.sweep.draw(RANGES, 17, key=KEY)["lr"]))
    keys = jnp.concatenate([run.train_state.keys for run in runs])
    assert_same(keys, ee.member_keys(KEY, 17, purpose="fit"))
    assert ee.concatenate([run.best() for run in runs]).num_members == 3
    assert sorted(file.name for file in tmp_path.glob("b*")) == [f"bracket-{i}.eqx" for i in range(3)]
    assert_same([parts(run) for run in hyperband(9, checkpoint=tmp_path)], [parts(run) for run in runs])


@pytest.mark.parametrize(("epochs", "longest"), [(5, [25, 25]), (10, [50, 50, 50])])
def test_no_member_trains_longer_than_requested(epochs, longest):
    assert [run.history.loss.shape[1] for run in hyperband(epochs)] == longest


def test_schedules_of_different_lengths(ensemble):
    lengths = np.linspace(5, 30, MEMBERS).astype(np.float32)
    unit = optax.cosine_decay_schedule(0.05, 100)
    optimiser = lambda hyper: optax.sgd(ee.sweep.rescale_schedule(unit, 100, hyper["length"]))
    run = ee.fit(ensemble, loss, optimiser, DATA, hyper={"length": jnp.asarray(lengths)}, epochs=4, **OPTIONS)
    for i in (0, MEMBERS - 1):
        own = optax.sgd(optax.cosine_decay_schedule(0.05, float(lengths[i])))
        options = OPTIONS | {"key": run.train_state.keys[i : i + 1]}
        single = ee.fit(ensemble[[i]], loss, own, DATA, epochs=4, **options)
        assert_close(run.ensemble[[i]], single.ensemble, 1e-5)
