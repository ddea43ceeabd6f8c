"""Functions of a training state at ends of epochs, which may return another one."""

import functools as ft
import signal
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close, assert_same

KEY, MEMBERS = jax.random.key(5), 4
X = np.asarray(jax.random.normal(jax.random.key(1), (20, 3)))
Y = np.sin(X[:, 0])
DATA = (X, Y)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def optimiser(hyper):
    return optax.adam(hyper["lr"])


RATES = {"lr": jnp.full(MEMBERS, 1e-2)}


@ft.cache
def ensemble():
    return ee.build(make, MEMBERS, key=KEY)


def fit(**options):
    defaults = {"epochs": 4, "batch_size": 8, "hyper": RATES, "key": KEY, "plan": ee.plan.Blocks(2)}
    return ee.fit(ensemble(), loss, optimiser, DATA, **(defaults | options))


def test_states_at_ends_of_epochs():
    seen = []
    run = fit(callbacks=lambda state: seen.append(state))
    assert [np.asarray(state.step).tolist() for state in seen] == [
        [3] * MEMBERS,
        [6] * MEMBERS,
        [9] * MEMBERS,
        [12] * MEMBERS,
    ]
    assert_same(run.ensemble, fit().ensemble)
    assert_same(seen[1].ensemble, fit(epochs=2).ensemble)  # whose memory is its own
    np.testing.assert_allclose(seen[2].loss, run.history.loss[:, 6:9].mean(1), rtol=1e-5)


def test_every_few_epochs_and_at_the_end():
    seen, others = [], []
    run = fit(
        epochs=5, callbacks=[ee.train.every(2, lambda s: seen.append(int(s.step[0]))), lambda s: others.append(s)]
    )
    assert seen == [6, 12, 15]
    assert len(others) == 5
    assert_same(run.ensemble, fit(epochs=5).ensemble)


def test_the_end_is_where_all_members_have_stopped():
    seen = []
    fit(stop=ee.train.Stopping(steps=6), callbacks=ee.train.every(10, seen.append))
    assert [state.step.tolist() for state in seen] == [[6] * MEMBERS]


def test_a_callback_stops_members():
    run = fit(callbacks=lambda state: state.stop(np.arange(MEMBERS) == 1) if state.step[0] == 6 else None)
    assert run.status.tolist() == [0, 1, 0, 0]
    assert run.stopped_at.tolist() == [-1, 6, -1, -1]
    assert_same(run.ensemble[[0, 2, 3]], fit().ensemble[[0, 2, 3]])
    assert_same(run.ensemble[1], fit(epochs=2).ensemble[1])
    over = fit(callbacks=lambda state: state.stop())
    assert over.history.loss.shape == (MEMBERS, 3)


def test_a_callback_changes_hyper_parameters():
    def halve(state):
        return eqx.tree_at(lambda s: s.hyper, state, jax.tree.map(lambda x: x / 2, state.hyper))

    run = fit(callbacks=ee.train.every(2, halve))
    half = fit(epochs=2).train_state
    changed = eqx.tree_at(lambda s: s.hyper, half, {"lr": RATES["lr"] / 2})
    rest = ee.fit(changed, loss, optimiser, DATA, epochs=2, batch_size=8, plan=ee.plan.Blocks(2))
    assert_same(run.ensemble, rest.ensemble)


def test_copies_keep_their_own_streams():
    state = fit(epochs=2).train_state
    copied = ee.methods.population.copy_members(state, [0, 0, 2, 3])
    assert_same(copied.ensemble[1], state.ensemble[0])
    assert_same(jax.tree.map(lambda x: x[1], copied.opt_state), jax.tree.map(lambda x: x[0], state.opt_state))
    assert_same(copied.keys, state.keys)
    on = ee.fit(copied, loss, optimiser, DATA, epochs=1, batch_size=8)
    assert (
        np.abs(np.asarray(on.ensemble.stacked.layers[0].weight[0] - on.ensemble.stacked.layers[0].weight[1])).max() > 0
    )


class TestRevive:
    hyper = {"lr": jnp.array([1e-2, 1e30, 1e-2, 1e-2])}  # the second member diverges in every epoch

    def test_as_a_copy_of_a_healthy_member(self):
        seen = []
        run = fit(hyper=self.hyper, callbacks=[ee.train.revive(), lambda state: seen.append(state)])
        assert run.status.tolist() == [0] * MEMBERS
        first = seen[0]
        donors = [
            i
            for i in (0, 2, 3)
            if jnp.array_equal(first.ensemble[1].layers[0].weight, first.ensemble[i].layers[0].weight)
        ]
        assert len(donors) == 1
        ratio = float(first.hyper["lr"][1]) / 1e-2
        assert min(abs(ratio - 0.8), abs(ratio - 1.2)) < 1e-5
        assert first.step.tolist() == [3, 0, 3, 3]
        assert_same(run.ensemble[[0, 2, 3]], fit(hyper=self.hyper, callbacks=ee.train.revive()).ensemble[[0, 2, 3]])
        assert_same(run.ensemble[[0, 2, 3]], fit().ensemble[[0, 2, 3]])

    def test_as_a_fresh_member(self):
        calm = lambda hyper, key: {"lr": jnp.float32(1e-2)}
        run = fit(hyper=self.hyper, callbacks=ee.train.revive(make, optimiser=optimiser, perturb=calm))
        assert run.status.tolist() == [0] * MEMBERS
        assert run.train_state.step.tolist() == [12, 9, 12, 12]
        assert np.isfinite(run.history.loss[1, 3:]).all()
        with pytest.raises(TypeError, match="optimiser"):
            ee.train.revive(make)


@pytest.mark.parametrize("answer", [True, "state", 3])
def test_other_answers_are_errors_with_the_run_so_far(answer):
    with pytest.raises(TypeError, match="returns a `TrainState`") as caught:
        fit(callbacks=ee.train.every(2, lambda state: answer))
    assert caught.value.run.train_state.step.tolist() == [6] * MEMBERS


def test_an_error_of_a_callback_has_the_run_so_far():
    def fail(state):
        if state.step[0] == 6:
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full") as caught:
        fit(callbacks=fail)
    assert_same(caught.value.run.ensemble, fit(epochs=2).ensemble)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_returns_the_run_so_far():
    fit(epochs=1, history="epochs")  # compiled
    timer = threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    run = fit(epochs=1_000_000, history="epochs")
    timer.join()
    assert run.interrupted
    steps = int(run.train_state.step[0])
    assert steps % 3 == 0
    assert run.history.loss.shape == (MEMBERS, steps // 3)
    assert_close(run.ensemble, fit(epochs=steps // 3, history="epochs").ensemble, 1e-6)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_within_a_callback_and_between_batches():
    def interrupt(state):
        if state.step[0] == 6:
            signal.raise_signal(signal.SIGINT)

    run = fit(callbacks=interrupt)
    assert run.interrupted
    assert_same(run.ensemble, fit(epochs=2).ensemble)

    def batches():
        for i in range(9):
            if i == 4:
                signal.raise_signal(signal.SIGINT)
            yield DATA

    run = fit_batches(batches())
    assert run.interrupted
    assert run.train_state.step.tolist() == [5] * MEMBERS
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def fit_batches(batches):
    return ee.fit(ensemble(), loss, optimiser, batches, steps=9, hyper=RATES, key=KEY)
