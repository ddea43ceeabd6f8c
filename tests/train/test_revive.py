"""Members that diverge and are revived: as a copy of a healthy one, or from a fresh initialisation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Revive, Status

from ..factories import assert_same, grouped

KEY = jax.random.key(0)
MEMBERS, ROWS, BATCH = 6, 40, 8
OPTIMISER = lambda h: optax.adam(h["lr"])


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def faulty_at(step, member):
    """A loss that is NaN for one member at one step before its revival, recognised by its first learning rate."""

    def loss(model, batch, key, hyper):
        x, y = batch
        value = jnp.mean((jax.vmap(model)(x)[:, 0] - y[:, 0]) ** 2)
        here = (hyper["place"] == member) & jnp.any(y[:, 1] == step)
        return jnp.where(here, jnp.nan, value)

    return loss


def data(steps=20):
    """Rows in the order given; each contains the step at which it is used."""
    x = jax.random.normal(KEY, (steps * BATCH, 3))
    return x, jnp.stack([jnp.sin(x[:, 0]), jnp.repeat(jnp.arange(steps), BATCH).astype(float)], axis=1)


def hyper(members=MEMBERS):
    return {"lr": jnp.linspace(1e-3, 2e-2, members), "place": jnp.arange(float(members))}


def fitted(on_diverge, *, step=7, member=2, ensemble=None, steps=20, **options):
    ensemble = ee.build(make, MEMBERS, key=KEY) if ensemble is None else ensemble
    return ee.fit(
        ensemble, faulty_at(step, member), OPTIMISER, data(steps), epochs=1, batch_size=BATCH, shuffle=False,
        hyper=hyper(), on_diverge=on_diverge, progress=False, key=KEY, **grouped(options),
    )  # fmt: skip


def after_divergence(options):
    """A run continued after one of five steps, in which one member diverged in the fourth."""
    with pytest.warns(UserWarning, match="1 member.* diverged"):
        before = fitted("freeze", step=3, steps=5)
    return ee.fit(
        before, faulty_at(9, 2), OPTIMISER, data(5), epochs=1, batch_size=BATCH, shuffle=False, on_diverge=KEPT,
        progress=False, key=KEY, **grouped(options),
    )  # fmt: skip


KEPT = Revive(perturb=None)


class Numbered(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, rate, *, key):
        self.linear = eqx.nn.Linear(3, 1, key=key)
        self.dropout = eqx.nn.Dropout(rate)


def numbered(default):
    rates = {"rate": [0.1, 0.3, 0.5]}
    return ee.build(lambda key, rate=default: Numbered(rate, key=key), zip=rates, key=KEY)


def failed(ensemble, members, **options):
    """A training state in which some members have diverged."""
    state = ee.train.init(ensemble, optax.adam(0.1), key=KEY, **options)
    return eqx.tree_at(lambda state: state.status, state, state.status.at[np.array(members)].set(2))


class TestDonor:
    @pytest.mark.parametrize("plan", [ee.plan.Vmap(), ee.plan.Chunked(4), ee.plan.Sequential()], ids=repr)
    def test_the_others_do_not_change_by_one_bit(self, plan):
        run, clean = fitted("revive", plan=plan), fitted("revive", step=-1, plan=plan)
        others = [0, 1, 3, 4, 5]
        assert_same(run.ensemble[others], clean.ensemble[others])
        np.testing.assert_array_equal(run.history.loss[others], clean.history.loss[others])
        assert run.status.tolist() == [Status.OK] * MEMBERS
        assert clean.revived == []

    def test_it_continues_as_a_copy_of_its_donor(self):
        """Replayed by hand: the donor's weights, optimiser and hyper-parameters, from the step after the fault on."""
        run = fitted(KEPT)
        (event,) = run.revived
        assert (event.member, event.step) == (2, 8)
        assert event.donor in {0, 1, 3, 4, 5}
        donor = run.ensemble.unstack()[event.donor]
        assert_same(run.ensemble.unstack()[2], donor)  # the same rows, the same hyper-parameters, no randomness
        assert jnp.isnan(run.history.loss[2, 7])
        assert jnp.all(jnp.isfinite(run.history.loss[2, 8:]))
        np.testing.assert_array_equal(run.history.loss[2, 8:], run.history.loss[event.donor, 8:])
        assert run.table()["lr"][2] == run.table()["lr"][event.donor]
        assert run.stopped_at.tolist() == [-1] * MEMBERS
        assert run.fault.tolist() == [""] * MEMBERS

    def test_hyper_parameters_are_perturbed(self):
        run = fitted("revive")
        (event,) = run.revived
        ratio = run.table()["lr"][2] / hyper()["lr"][event.donor]
        np.testing.assert_allclose(min(abs(ratio - 0.8), abs(ratio - 1.2)), 0.0, atol=1e-5)
        own = Revive(perturb=lambda h, key: h | {"lr": h["lr"] * 0.5})
        run = fitted(own)
        np.testing.assert_allclose(run.table()["lr"][2], 0.5 * hyper()["lr"][run.revived[0].donor], rtol=1e-6)

    @pytest.mark.parametrize("length", [3, 5, 20])
    def test_when_it_comes_back_does_not_depend_on_chunks(self, length, monkeypatch):
        reference = fitted(KEPT)
        monkeypatch.setattr("eqx_ensemble.train.host._loop._FIRST_STEPS", length)
        run = fitted(KEPT)
        assert run.revived == reference.revived
        assert_same(run.ensemble, reference.ensemble)

    @pytest.mark.parametrize("options", [{}, pytest.param({"scan": False}, marks=pytest.mark.slow)])
    def test_diverged_in_an_earlier_run(self, options):
        """It is revived before the first step of this one, whatever the chunks."""
        run = after_divergence(options)
        assert [(event.member, event.step) for event in run.revived] == [(2, 5)]
        np.testing.assert_array_equal(np.isnan(run.history.loss[2]), [False] * 3 + [True] * 2 + [False] * 5)

    @pytest.mark.slow
    def test_diverged_in_an_earlier_run_of_enough_steps(self):
        run = after_divergence({"stop": ee.train.Stopping(steps=np.array([9, 9, 4, 9, 9, 9]))})
        assert len(run.revived) == 1
        assert run.status[2] == Status.STOPPED
        assert np.isnan(run.history.loss[2, 3:]).all()

    def test_after_so_many_times_it_stays_frozen(self):
        def always(model, batch, key, hyper):
            value = jnp.mean(jax.vmap(model)(batch[0]) ** 2)
            return jnp.where(hyper["place"] == 2, jnp.nan, value)

        ensemble = ee.build(make, MEMBERS, key=KEY)
        how = Revive(perturb=lambda h, key: h | {"place": 2.0}, most=2)
        with pytest.warns(UserWarning, match=r"1 member\(s\) diverged .* 2 at step 2 \(`loss`\)"):
            run = ee.fit(
                ensemble, always, OPTIMISER, data(), epochs=1, batch_size=BATCH, hyper=hyper(), on_diverge=how, key=KEY
            )
        assert [(event.member, event.step) for event in run.revived] == [(2, 1), (2, 2)]
        assert run.status[2] == Status.DIVERGED
        assert run.fault[2] == "loss"

    def test_no_healthy_member_is_left(self):
        nan = lambda model, batch, key: jnp.nan * jnp.mean(jax.vmap(model)(batch[0]))
        ensemble = ee.build(make, 3, key=KEY)
        with pytest.warns(UserWarning, match=r"3 member\(s\) diverged"):
            run = ee.fit(ensemble, nan, optax.sgd(0.1), data(), epochs=1, on_diverge="revive", key=KEY)
        assert run.revived == []

    def test_noise_stays_a_members_own(self):
        optimiser = lambda h: optax.chain(optax.add_noise(0.1, 0.55, 0), optax.sgd(h["lr"]))
        ensemble = ee.build(make, MEMBERS, key=KEY)
        run = ee.fit(
            ensemble, faulty_at(3, 2), optimiser, data(), epochs=1, batch_size=BATCH, shuffle=False, hyper=hyper(),
            on_diverge=KEPT, progress=False, key=KEY,
        )  # fmt: skip
        one, donor = (run.ensemble.unstack()[i] for i in (2, run.revived[0].donor))
        assert not np.array_equal(one.layers[0].weight, donor.layers[0].weight)

    def test_best_weights_are_those_of_the_new_life(self):
        """The best score of the life before is forgotten with its weights."""
        x, y = data()
        score = lambda model, batch, key: jnp.mean(model.layers[0].bias)
        options = {"validation": ee.train.Validation((x, y), score=score, mode="min")}
        run = fitted(KEPT, step=17, **options)
        assert run.best_step[2] == 20


class TestFresh:
    def test_it_starts_from_another_initialisation(self):
        how = Revive(make, perturb=None)
        run, again = fitted(how), fitted(how)
        assert run.revived == [(2, 8, None)]
        assert_same(run.ensemble, again.ensemble)
        first = ee.build(make, MEMBERS, key=KEY)
        assert not np.allclose(run.ensemble.unstack()[2].layers[0].weight, first[2].layers[0].weight, atol=0.2)
        assert run.status[2] == Status.OK
        assert run.train_state.opt_state[0].count.tolist() == [20, 20, 12, 20, 20, 20]

    def test_two_at_once_are_different(self):
        def both(model, batch, key, hyper):
            value = jnp.mean(jax.vmap(model)(batch[0]) ** 2)
            return jnp.where((hyper["place"] < 2) & jnp.any(batch[1][:, 1] == 4), jnp.nan, value)

        ensemble = ee.build(make, MEMBERS, key=KEY)
        run = ee.fit(
            ensemble, both, OPTIMISER, data(), epochs=1, batch_size=BATCH, shuffle=False, hyper=hyper(),
            on_diverge=Revive(make), progress=False, key=KEY,
        )  # fmt: skip
        assert [event.member for event in run.revived] == [0, 1]
        assert not np.allclose(run.ensemble[0].layers[0].weight, run.ensemble[1].layers[0].weight, atol=0.1)

    def test_stateful_members(self):
        class Net(eqx.Module):
            linear: eqx.nn.Linear
            norm: eqx.nn.BatchNorm

            def __init__(self, key):
                self.linear = eqx.nn.Linear(3, 4, key=key)
                self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")

            def __call__(self, x, state):
                return self.norm(self.linear(x), state)

        def loss(model, state, batch, key, hyper):
            x, y = batch
            call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            out, state = call(x, state)
            here = (hyper["place"] == 2) & jnp.any(y[:, 1] == 7)
            return jnp.where(here, jnp.nan, jnp.mean((out[:, 0] - y[:, 0]) ** 2)), state

        fresh = eqx.nn.make_with_state(Net)
        ensemble, state = ee.build(fresh, MEMBERS, key=KEY)
        for how in (Revive(fresh), KEPT):
            run = ee.fit(
                ensemble, loss, OPTIMISER, data(), epochs=1, batch_size=BATCH, shuffle=False, state=state,
                hyper=hyper(), on_diverge=how, progress=False, key=KEY,
            )  # fmt: skip
            assert len(run.revived) == 1
            assert run.status.tolist() == [Status.OK] * MEMBERS

    @pytest.mark.parametrize("default", [0.2, 0.1, 0.3])  # the first member's own is none of the others'
    def test_numbers_stay_a_members_own(self, default):
        lost = failed(numbered(default), [1, 2])
        state, events = ee.train.revive(lost, optax.adam(0.1), Revive(lambda key: Numbered(default, key=key)), key=KEY)
        assert [event.member for event in events] == [1, 2]
        assert [member.dropout.p for member in state.ensemble] == [0.1, 0.3, 0.5]
        assert not np.allclose(state.ensemble[2].linear.weight, lost.ensemble[2].linear.weight)

    def test_trained_numbers_start_again(self):
        lost = failed(numbered(0.2), [1], trainable=eqx.is_inexact_array_like)
        state, _ = ee.train.revive(lost, optax.adam(0.1), Revive(lambda key: Numbered(0.2, key=key)), key=KEY)
        assert [member.dropout.p for member in state.ensemble] == [0.1, 0.2, 0.5]

    @pytest.mark.usefixtures("unhooked")
    def test_other_numbers_that_all_share_are_refused(self):
        shared = ee.build(lambda key: Numbered(0.1, key=key), 3, key=KEY)
        with pytest.raises(ee.MemberMismatchError, match=r"Revive\(make\)(.|\n)*expected 0.1, got 0.2"):
            ee.train.revive(
                failed(shared, [1]), optax.adam(0.1), Revive(lambda key: Numbered(0.2, key=key)), key=KEY
            )  # fmt: skip

    @pytest.mark.usefixtures("unhooked")
    def test_another_kind_of_model_is_refused(self):
        wider = lambda key: eqx.nn.MLP(3, 1, 9, 1, key=key)
        with pytest.raises(ee.MemberMismatchError, match=r"Revive\(make\)"):
            fitted(Revive(wider))


def test_in_ones_own_loop():
    ensemble, x = ee.build(make, MEMBERS, key=KEY), data()
    loss, optimiser = faulty_at(3, 2), OPTIMISER
    state = ee.train.init(ensemble, optimiser, hyper=hyper(), key=KEY)
    step = ee.train.make_step(loss, optimiser)
    events = []
    for i in range(10):
        batch = jax.tree.map(lambda x, i=i: x[i * BATCH : (i + 1) * BATCH], x)
        state, metrics = step(state, batch)
        state, revived = ee.train.revive(state, optimiser, KEPT, key=KEY)
        events += revived
    assert [(event.member, event.step) for event in events] == [(2, 4)]
    assert metrics.status.tolist() == [0] * MEMBERS
    assert_same(state.ensemble.unstack()[2], state.ensemble.unstack()[events[0].donor])


def test_batches_of_ones_own():
    x, y = data()
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    ensemble = ee.build(make, MEMBERS, key=KEY)
    run = ee.fit(
        ensemble, faulty_at(7, 2), OPTIMISER, batches, epochs=1, hyper=hyper(), on_diverge=KEPT, progress=False, key=KEY
    )
    assert run.revived == fitted(KEPT).revived


def test_with_members_that_left_the_arrays(monkeypatch):
    """Three quarters have stopped and left; one of those that train fails and comes back in its place."""
    pays = "eqx_ensemble.train.host._loop.Pacing.pays"
    monkeypatch.setattr(pays, lambda self, width, before, steps_left: width < before)
    members = 16
    ensemble = ee.build(make, members, key=KEY)
    max_steps = np.where(np.arange(members) % 4 == 1, 200, 10)
    run = ee.fit(
        ensemble,
        faulty_at(60, 5),
        OPTIMISER,
        data(100),
        epochs=1,
        batch_size=BATCH,
        shuffle=False,
        hyper=hyper(members),
        stop=ee.train.Stopping(steps=max_steps),
        on_diverge=KEPT,
        progress=False,
        key=KEY,
    )
    (event,) = run.revived
    assert (event.member, event.step) == (5, 61)
    assert event.donor in {1, 9, 13}
    assert_same(run.ensemble.unstack()[5], run.ensemble.unstack()[event.donor])
    assert run.table()["lr"][5] == run.table()["lr"][event.donor]
    assert run.stopped_at.tolist() == np.where(np.arange(members) % 4 == 1, -1, 10).tolist()


@pytest.mark.parametrize("wrong", [{"make": 3}, {"perturb": "x"}, {"most": 0}])
def test_wrong_options(wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        Revive(**wrong)


@pytest.mark.parametrize("scan", [True, False])
def test_before_a_smaller_last_batch(scan):
    """A member that fails in the last full batch trains on the rest of the epoch, as on a full batch."""
    x, y = data(3)
    options = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "progress": False, "key": KEY}
    options |= {"plan": ee.plan.Vmap(scan=scan), "hyper": hyper(), "on_diverge": "revive"}
    ensemble = ee.build(make, MEMBERS, key=KEY)
    runs = [
        ee.fit(ensemble, faulty_at(1, 2), OPTIMISER, (x[:rows], y[:rows]), **options)
        for rows in (3 * BATCH, 3 * BATCH - 1)
    ]
    assert [[(revival.member, revival.step) for revival in run.revived] for run in runs][0][0] == (2, 2)
    assert runs[1].revived[0].step == 2
    assert np.isfinite(runs[1].history.loss[2, 2])


def test_members_called_one_after_another_take_each_step_once():
    """Also if the last member fails in the smaller last batch: the others do not take the next step without it."""
    x, y = data(3)
    rows = 3 * BATCH - 1
    options = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "hyper": hyper(), "progress": False, "key": KEY}
    ensemble, loss, rest = ee.build(make, MEMBERS, key=KEY), faulty_at(2, MEMBERS - 1), (x[:rows], y[:rows])
    train = lambda plan: ee.fit(ensemble, loss, OPTIMISER, rest, plan=plan, on_diverge=KEPT, **options)
    losses = [train(ee.plan.Sequential(scan=scan)).history.loss for scan in (True, False)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
