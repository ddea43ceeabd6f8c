"""Populations: decisions between runs, and the same decisions replayed by a loop over single members."""

import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import population
from eqx_ensemble.train import Status

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


def data(rows=STEPS * BATCH, seed=0):
    x = jax.random.normal(jax.random.key(seed), (rows, 3))
    return x, jnp.sin(x[:, 0])


def hyper(members=MEMBERS):
    return ee.sweep.draw(RANGES, members, key=KEY)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(make, MEMBERS, key=KEY)


@pytest.fixture(scope="module")
def state(ensemble):
    """A training state in which no two members agree in anything."""
    run = ee.fit(ensemble, loss, OPTIMISER, data(), hyper=hyper(), steps=3, batch_size=BATCH, key=KEY)
    return run.train_state


OPTIONS = {"batch_size": BATCH, "shuffle": False, "progress": False, "key": KEY}


def held_out(score=score):
    return ee.train.Validation(data(16, 1), score=score, mode="min")


class Alone:
    """One model, trained as usual with `equinox.filter_jit` and optax, without ensembles."""

    def __init__(self, model, key):
        self.model, self.key, self.step = model, key, 0
        self.opt_state = None

    def train(self, steps, lr):
        optimiser = OPTIMISER({"lr": lr})
        if self.opt_state is None:
            self.opt_state = optimiser.init(eqx.filter(self.model, eqx.is_inexact_array))
        x, y = data()
        for _ in range(steps):
            at = self.step % STEPS * BATCH
            batch, key = (x[at : at + BATCH], y[at : at + BATCH]), jax.random.fold_in(self.key, self.step)
            grads = eqx.filter_jit(eqx.filter_grad(loss))(self.model, batch, key)
            with jax.numpy_dtype_promotion("standard"):  # as optax needs it
                updates, self.opt_state = optimiser.update(grads, self.opt_state)
            self.model = eqx.apply_updates(self.model, updates)
            self.step += 1

    def becomes(self, other):
        self.model, self.opt_state = other.model, other.opt_state


def alone(members):
    keys = ee.member_keys(KEY, members, purpose="loss")
    return [Alone(make(a), b) for a, b in zip(ee.member_keys(KEY, members), keys, strict=True)]


class TestRank:
    def test_best_first(self):
        assert population.rank([0.3, 0.1, 0.2]).tolist() == [1, 2, 0]

    def test_what_is_not_a_number_is_worst(self):
        scores = [0.3, np.nan, np.inf, 0.1, 0.2]
        assert population.rank(scores).tolist() == [3, 4, 0, 2, 1]
        assert population.rank(scores, healthy=[True, True, True, False, True]).tolist() == [4, 0, 2, 3, 1]

    def test_ties_stay_in_order(self):
        assert population.rank([1.0, 0.0, 1.0, 0.0]).tolist() == [1, 3, 0, 2]


class TestSelect:
    def test_everything_moves_together(self, state):
        chosen = population.select(state, [4, 0, 2])
        assert chosen.ids.tolist() == [4, 0, 2]
        for i, place in enumerate([4, 0, 2]):
            of = lambda state, i: jax.tree.map(lambda x: x[i], (state.moving, state.fixed))
            assert_same(of(chosen, i), of(state, place))  # noqa: B023

    def test_they_train_on_as_before(self, state):
        fit = lambda state: ee.fit(state, loss, OPTIMISER, data(), steps=7, batch_size=BATCH, progress=False, key=KEY)
        whole, some = fit(state), fit(population.select(state, [4, 0, 2, 5]))
        assert_close(some.ensemble, whole.ensemble[[4, 0, 2, 5]], 1e-6)  # compiled for another number of members

    @pytest.mark.parametrize(
        ("members", "message"),
        [([0, 6], "from 0 to 5, got 0 to 6"), ([1, 1], r"at most once.*\[1, 1\]"), ([0.5], "integers")],
    )
    def test_refused(self, state, members, message, unhooked):
        with pytest.raises((TypeError, ValueError), match=message):
            population.select(state, members)


class TestClone:
    def test_what_is_copied_and_what_stays(self, state):
        copied = population.clone(state, [0, 1, 0, 3, 4, 3])
        params = lambda state, i: jax.tree.map(lambda x: x[i], (state.params, state.opt_state))
        for place, donor in enumerate([0, 1, 0, 3, 4, 3]):
            assert_same(params(copied, place), params(state, donor))
            assert copied.hyper["lr"][place] == state.hyper["lr"][donor]
        assert_same(copied.fixed.key, state.fixed.key)
        assert_same(copied.ids, state.ids)

    def test_noise_stays_ones_own(self, ensemble):
        state = ee.train.init(ensemble, optax.noisy_sgd(0.1, key=0), key=KEY)
        copied = population.clone(state, [0, 0, 0, 3, 4, 5])
        assert_same(copied.opt_state, state.opt_state)  # only the noise keys differ between members

    def test_one_that_diverged_trains_again(self, state):
        lost = eqx.tree_at(lambda s: (s.status, s.moving.stopped_at, s.moving.fault), state, replace_fn=lambda x: x)
        lost = eqx.tree_at(lambda s: s.status, lost, lost.status.at[2].set(2))
        lost = eqx.tree_at(lambda s: s.moving.stopped_at, lost, lost.moving.stopped_at.at[2].set(1))
        copied = population.clone(lost, [0, 1, 0, 3, 4, 5])
        assert copied.status.tolist() == [0] * MEMBERS
        assert copied.moving.stopped_at.tolist() == [-1] * MEMBERS
        with pytest.raises(ValueError, match="have diverged or stopped: members 2"):
            population.clone(lost, [2, 1, 2, 3, 4, 5])

    def test_one_donor_each(self, state):
        with pytest.raises(ValueError, match=r"one donor per member \(6,\), got \(2,\)"):
            population.clone(state, [0, 1])


def test_stop_leaves_the_others_alone(state):
    stopped = population.stop(state, [1, 4])
    assert stopped.status.tolist() == [0, 1, 0, 0, 1, 0]
    assert stopped.moving.stopped_at.tolist() == [-1, 3, -1, -1, 3, -1]
    fit = lambda state: ee.fit(state, loss, OPTIMISER, data(), steps=4, batch_size=BATCH, progress=False, key=KEY)
    run, whole = fit(stopped), fit(state)
    assert_same(run.ensemble[[0, 2, 3, 5]], whole.ensemble[[0, 2, 3, 5]])
    assert_same(run.ensemble[[1, 4]], state.ensemble[[1, 4]])


class TestTruncation:
    @pytest.mark.parametrize(("fraction", "count"), [(0.1, 1), (0.2, 2), (0.5, 5)])
    def test_the_worst_take_from_the_best(self, fraction, count):
        scores = np.random.default_rng(0).permutation(10).astype(float)
        order = np.argsort(scores)
        seen = set()
        for seed in range(40):
            donors = population.truncation(scores, fraction=fraction, key=jax.random.key(seed))
            assert set(donors[order[-count:]]) <= set(order[:count])
            assert (donors[order[:-count]] == order[:-count]).all()
            seen |= set(donors[order[-count:]].tolist())
        assert seen == set(order[:count].tolist())

    def test_a_diverged_member_is_replaced_and_is_no_donor(self):
        scores = [0.0, np.nan, 0.2, 0.1, 0.4, 0.3, np.nan, 0.5]
        healthy = [False, True, True, True, True, True, False, True]
        for seed in range(20):
            donors = population.truncation(scores, healthy, fraction=0.25, key=jax.random.key(seed))
            assert set(donors[[0, 1, 6]]) <= {2, 3}
            assert donors[[2, 3, 4, 5, 7]].tolist() == [2, 3, 4, 5, 7]

    def test_a_score_of_nan_is_no_donor_where_few_others_are_left(self):
        scores = [np.nan, 0.1, np.nan, np.nan]
        for seed in range(10):
            assert population.truncation(scores, fraction=0.5, key=jax.random.key(seed)).tolist() == [1, 1, 1, 1]

    def test_no_member_is_left(self):
        assert population.truncation([1.0, 2.0], [False, False], key=KEY).tolist() == [0, 1]
        assert population.truncation([1.0], key=KEY).tolist() == [0]

    def test_a_fraction_is_not_rounded_twice(self):
        donors = population.truncation(np.arange(50.0), fraction=0.14, key=KEY)
        assert (donors != np.arange(50)).sum() == 7

    def test_statuses_are_no_booleans(self, unhooked):
        with pytest.raises(TypeError, match="run.status == train.Status.OK"):
            population.truncation([1.0, 2.0], np.array([Status.OK, Status.DIVERGED], np.int8), key=KEY)

    @pytest.mark.parametrize("fraction", [0, 0.6, "half"])
    def test_refused(self, fraction, unhooked):
        with pytest.raises(ValueError, match="above 0 and at most 0.5"):
            population.truncation([1.0, 2.0], fraction=fraction, key=KEY)


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

    def test_unknown_name(self):
        with pytest.raises(ValueError, match=r"ranges of \['lr'\].*names \['rate'\]"):
            population.perturb_hyper(RANGES)({"rate": jnp.array(1.0)}, KEY)

    def test_only_those_chosen_change(self, state):
        new = population.set_hyper(state, [1, 3], ee.train.perturb, key=KEY).hyper["lr"]
        ratio = np.asarray(new / state.hyper["lr"])
        assert ratio[[0, 2, 4, 5]].tolist() == [1.0] * 4
        np.testing.assert_allclose(np.minimum(abs(ratio[[1, 3]] - 0.8), abs(ratio[[1, 3]] - 1.2)), 0.0, atol=1e-6)

    def test_whole_numbers_stay_whole(self, ensemble):
        state = ee.train.init(ensemble, lambda h: optax.sgd(0.1), hyper={"n": jnp.full(MEMBERS, 3)}, key=KEY)
        double = population.set_hyper(state, [0], lambda hyper, key: {"n": 2 * hyper["n"]}, key=KEY)
        assert double.hyper["n"].tolist() == [6, 3, 3, 3, 3, 3]
        with pytest.raises(TypeError, match="needs integers"):
            population.set_hyper(state, [0], lambda hyper, key: {"n": 1.2 * float(hyper["n"])}, key=KEY)

    def test_a_function_that_returns_something_else(self, state):
        with pytest.raises(TypeError, match="returns hyper-parameters like those it is given"):
            population.set_hyper(state, [1], lambda hyper, key: hyper["lr"], key=KEY)


@pytest.fixture(scope="module")
def found(ensemble):
    return ee.methods.population_based_training(
        ensemble, loss, OPTIMISER, data(), hyper=hyper(), validation=held_out(), rounds=4, epochs=2,
        fraction=0.34, explore=population.perturb_hyper(RANGES), **OPTIONS,
    )  # fmt: skip


class TestPopulationBasedTraining:
    def test_replayed_by_a_loop_over_single_members(self, found):
        members = alone(MEMBERS)
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
        assert len(repr(found)) < 3000

    def test_only_the_worst_were_replaced_by_the_best(self, found):
        for scores, row in zip(found.scores[:3], found.lineage[:3], strict=True):
            order = np.argsort(scores)
            replaced = np.flatnonzero(row != np.arange(MEMBERS))
            assert set(replaced) == set(order[-3:])
            assert set(row[replaced]) <= set(order[:3])
        assert found.lineage[3].tolist() == list(range(MEMBERS))

    def test_donors_follow_from_the_key(self, found):
        keys = jax.random.split(KEY, 4)
        for r in range(3):
            donors = population.truncation(found.scores[r], fraction=0.34, key=keys[r + 1])
            assert found.lineage[r].tolist() == donors.tolist()

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

    def test_what_a_copy_found_before_is_forgotten(self, ensemble):
        """A score that nothing after the copying can reach."""

        def judged(model, batch, key, hyper):
            fresh = jnp.all(model.layers[0].bias == 0.125)  # only before any training
            return jnp.where(fresh, -1.0, score(model, batch, key) + hyper["rank"])

        made = ee.build(lambda key: eqx.tree_at(lambda m: m.layers[0].bias, make(key), jnp.full(8, 0.125)), 4, key=KEY)
        hyper = {"rank": jnp.arange(4.0), "lr": jnp.array([0.01, 0.01, 0.01, 0.0])}
        found = ee.methods.population_based_training(
            made, loss, OPTIMISER, data(), hyper=hyper, validation=held_out(judged), rounds=2, epochs=1, fraction=0.25,
            explore=lambda hyper, key: hyper | {"lr": jnp.array(0.01)}, **OPTIONS,
        )  # fmt: skip
        replaced = int(np.flatnonzero(found.lineage[0] != np.arange(4))[0])
        assert replaced != 3  # it never moved, has the best score of all, and is the donor
        assert found.run.best_score[3] == -1.0
        assert found.run.best_step[replaced] == 2 * STEPS

    def test_one_program_for_all_rounds(self, ensemble, compiled):
        optimiser = lambda hyper: optax.sgd(hyper["lr"])
        with compiled() as names:
            ee.methods.population_based_training(
                ensemble, loss, optimiser, data(), hyper=hyper(), validation=held_out(), rounds=3, epochs=1, **OPTIONS
            )
        assert names.count("run_chunk") == 1

    def test_lineage_and_ids_survive_a_file(self, found, tmp_path):
        state = found.run.train_state
        kept = {"state": (state.moving, state.hyper, state.ids), "lineage": found.lineage, "hyper": found.hyper}
        ee.save(tmp_path / "population", kept)
        assert_same(ee.load(tmp_path / "population", like=kept), kept)

    def test_a_member_that_diverged_never_gives(self, ensemble):
        def faulty(model, batch, key, hyper):
            return jnp.where(hyper["lr"] > 0.5, jnp.nan, loss(model, batch, key))

        rates = {"lr": jnp.array([0.01, 0.9, 0.02, 0.9, 0.03, 0.04])}
        found = ee.methods.population_based_training(
            ensemble, faulty, OPTIMISER, data(), hyper=rates, validation=held_out(), rounds=2, epochs=1, **OPTIONS
        )
        assert set(found.lineage[0][[1, 3]]) <= {0, 2, 4, 5}
        assert found.run.status.tolist() == [Status.OK] * MEMBERS
        assert np.isfinite(found.run.history.loss[:, STEPS:]).all()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hyper": None}, "needs `hyper`"),
            ({"hyper": {"lr": 0.1}}, "hyper"),
            ({"validation": None}, "needs `validation=`"),
            ({"rounds": 0}, "`rounds`"),
            ({"fraction": 0.9}, "at most 0.5"),
            ({"patience": 2}, "does not take `patience`"),
            ({"on_diverge": "revive"}, "replaces diverged members"),
            ({"explore": lambda hyper, key: None}, "`explore` needs a function that returns hyper-parameters"),
        ],
    )
    def test_refused(self, ensemble, changes, message, unhooked):
        options = {"hyper": hyper(), "validation": held_out(), "rounds": 2, "epochs": 1} | OPTIONS | changes
        with pytest.raises((TypeError, ValueError), match=message):
            ee.methods.population_based_training(ensemble, loss, OPTIMISER, data(), **options)

    def test_rounds_of_steps_over_batches_are_refused(self, ensemble):
        options = OPTIONS | {"shuffle": True, "batch_size": None}
        with pytest.raises(TypeError, match="needs `epochs`, not `steps`"):
            ee.methods.population_based_training(
                ensemble,
                loss,
                OPTIMISER,
                [data(8)],
                hyper=hyper(),
                validation=held_out(),
                rounds=2,
                steps=1,
                **options,
            )  # fmt: skip

    @pytest.mark.parametrize("rounds", [1, 3])
    def test_all_diverge(self, ensemble, rounds):
        faulty = lambda model, batch, key: jnp.nan * loss(model, batch, key)
        with pytest.warns(UserWarning, match=r"6 member\(s\) diverged"):
            found = ee.methods.population_based_training(
                ensemble, faulty, OPTIMISER, data(), hyper=hyper(), validation=held_out(), rounds=rounds, epochs=1,
                **OPTIONS,
            )  # fmt: skip
        assert found.run.status.tolist() == [Status.DIVERGED] * MEMBERS
        assert found.scores.shape == (1, MEMBERS)

    def test_interrupted_before_the_first_validation(self, ensemble, interruptible):
        def batches():
            yield data(8)
            signal.raise_signal(signal.SIGINT)
            yield data(8)
            yield data(8)

        found = ee.methods.population_based_training(
            ensemble, loss, OPTIMISER, batches(), hyper=hyper(), validation=held_out(), rounds=3, epochs=1,
            progress=False, key=KEY,
        )  # fmt: skip
        assert found.run.interrupted
        assert found.scores.shape == (1, MEMBERS)


@pytest.fixture(scope="module")
def run():
    ensemble = ee.build(make, 9, key=KEY)
    return ee.methods.successive_halving(
        ensemble, loss, OPTIMISER, data(), hyper=hyper(9), validation=held_out(), epochs=1, **OPTIONS
    )


class TestSuccessiveHalving:
    def test_which_members_continue_and_how_long(self, run):
        assert sorted(run.stopped_at.tolist()) == [-1] + [5] * 6 + [15] * 2
        scores, first = run.history.validation, np.sort(run.stopped_at)[1:]
        assert set(np.argsort(scores[:, 0])[:3]) == set(np.flatnonzero((run.stopped_at == -1) | (run.stopped_at == 15)))
        assert first[0] == 5
        still = np.flatnonzero(np.isfinite(scores[:, 2]))
        assert run.stopped_at[still[np.argmin(scores[still, 2])]] == -1
        assert sorted(set(run.status.tolist())) == [Status.OK, Status.STOPPED]

    def test_replayed_by_a_loop_over_single_members(self, run):
        last = run.train_state.ensemble.unstack()
        for i, member in enumerate(alone(9)):
            member.train(45 if run.stopped_at[i] == -1 else int(run.stopped_at[i]), float(run.table()["lr"][i]))
            assert_close(last[i], member.model, 2e-5)  # up to 45 steps of Adam in another program

    @pytest.mark.parametrize(("factor", "rungs", "left"), [(2, None, 1), (2, 2, 4), (4, None, 1), (1.4, None, 1)])
    def test_other_factors(self, factor, rungs, left):
        ensemble = ee.build(make, 9, key=KEY)
        run = ee.methods.successive_halving(
            ensemble, loss, OPTIMISER, data(), hyper=hyper(9), validation=held_out(), steps=3, factor=factor,
            rungs=rungs, **OPTIONS,
        )  # fmt: skip
        assert (run.stopped_at == -1).sum() == left

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"factor": 1}, "`factor` to be above 1"),
            ({"rungs": 0}, "`rungs`"),
            ({"validation": None}, "needs `validation=`"),
            ({"epochs": None}, "either `epochs` or `steps`, got neither"),
        ],
    )
    def test_refused(self, ensemble, changes, message, unhooked):
        options = {"hyper": hyper(), "validation": held_out(), "epochs": 1} | OPTIONS | changes
        with pytest.raises((TypeError, ValueError), match=message):
            ee.methods.successive_halving(ensemble, loss, OPTIMISER, data(), **options)


def test_a_score_that_is_no_number_is_dropped_first():
    ensemble = ee.build(make, 8, key=KEY)

    def judged(model, batch, key, hyper):
        return jnp.where(hyper["index"] == 3, jnp.nan, score(model, batch, key))

    with pytest.warns(UserWarning, match="that are NaN, .* 3 at step 5"):
        run = ee.methods.successive_halving(
            ensemble, loss, optax.sgd(0.05), data(), hyper={"index": jnp.arange(8)}, validation=held_out(judged),
            epochs=1, factor=2, **OPTIONS,
        )  # fmt: skip
    assert sorted(run.stopped_at.tolist()) == [-1, 5, 5, 5, 5, 10, 10, 20]
    assert run.stopped_at[3] == 5


@pytest.mark.parametrize(("epochs", "longest"), [(5, [5, 5]), (8, [8, 8]), (10, [10, 10, 10])])
def test_no_member_trains_longer_than_requested(epochs, longest):
    runs = ee.methods.hyperband(make, RANGES, loss, OPTIMISER, data(8), validation=held_out(), epochs=epochs, **OPTIONS)
    assert [run.history.loss.shape[1] for run in runs] == longest


def test_hyperband_decides_itself(unhooked):
    with pytest.raises(TypeError, match="does not take `steps`"):
        ee.methods.hyperband(
            make, RANGES, loss, OPTIMISER, data(8), validation=held_out(), epochs=3, steps=4, **OPTIONS
        )


def test_hyperband_brackets():
    """Sizes and lengths by the paper's formulas, for R = 9 and eta = 3."""
    runs = ee.methods.hyperband(make, RANGES, loss, OPTIMISER, data(), validation=held_out(), epochs=9, **OPTIONS)
    assert [len(run.stopped_at) for run in runs] == [9, 5, 3]
    steps = [sorted(np.where(run.stopped_at == -1, run.history.loss.shape[1], run.stopped_at).tolist()) for run in runs]
    assert steps == [[5] * 6 + [15] * 2 + [45], [15] * 4 + [45], [45] * 3]
    ids = np.concatenate([run.ensemble.ids for run in runs])
    assert ids.tolist() == list(range(17))
    rates = np.concatenate([run.table()["lr"] for run in runs])
    assert_same(rates, np.asarray(ee.sweep.draw(RANGES, 17, key=KEY)["lr"]))
    assert ee.concatenate([run.best() for run in runs]).num_members == 3


def test_schedules_of_different_lengths(ensemble):
    lengths = np.linspace(5, 30, MEMBERS).astype(np.float32)
    unit = optax.cosine_decay_schedule(0.05, 100)
    optimiser = lambda hyper: optax.sgd(ee.sweep.rescale_schedule(unit, 100, hyper["length"]))
    run = ee.fit(
        ensemble, loss, optimiser, data(), hyper={"length": jnp.asarray(lengths)}, steps=20, batch_size=BATCH,
        shuffle=False, progress=False, key=KEY,
    )  # fmt: skip
    for i in range(MEMBERS):
        own = optax.sgd(optax.cosine_decay_schedule(0.05, float(lengths[i])))
        single = ee.fit(
            ensemble[[i]], loss, own, data(), steps=20, batch_size=BATCH, shuffle=False, progress=False, key=KEY
        )
        assert_close(run.ensemble[[i]], single.ensemble, 1e-5)


def test_a_schedule_that_looks_at_its_length_is_explained(ensemble):
    optimiser = lambda hyper: optax.sgd(optax.cosine_decay_schedule(0.05, hyper["length"]))
    with pytest.raises(TypeError, match=r"sweep\.rescale_schedule"):
        ee.fit(ensemble, loss, optimiser, data(), hyper={"length": jnp.full(MEMBERS, 10)}, steps=1, key=KEY)
