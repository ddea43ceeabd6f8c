"""`fit` gives what a plain loop of Equinox and optax over one member gives, whatever the options."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import CASES, assert_close, assert_same
from ..factories import data as factory_data
from ..marking import slow_but
from .reference import Member, key_of_member

KEY, MEMBERS, ROWS, BATCH = jax.random.key(5), 3, 20, 8
X = np.asarray(jax.random.normal(jax.random.key(1), (ROWS, 3)))
Y = np.sin(X[:, 0]) + 0.1 * X[:, 1]
RATES = np.array([1e-2, 1e-1, 3e-2], np.float32)
HELD_OUT = (X[::2] + 0.1, Y[::2])


def loss(model, batch, key):
    x, y = batch
    x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)  # dropout of inputs, by the member's key
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def score(model, batch, key):
    x, y = batch
    return jnp.mean(jnp.abs(jax.vmap(model)(x)[:, 0] - y))


def optimiser(rate):
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))


@ft.cache
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), MEMBERS, key=KEY)


def fit(**options):
    defaults = {"batch_size": BATCH, "hyper": RATES, "key": KEY, "plan": ee.plan.Blocks(2)}
    return ee.fit(ensemble(), loss, optimiser, (X, Y), **(defaults | options))


def check(run, *, models=None, data=(X, Y), own_rows=None, scorer=None, **options):
    """Compares every member with a plain loop."""
    for i in range(MEMBERS):
        member = Member(loss, optimiser, hyper=jnp.asarray(RATES[i]), score=scorer)
        rows = None if own_rows is None else own_rows[i]
        one = data(i) if callable(data) else data
        model = ensemble()[i] if models is None else models[i]
        alone = member.fit(model, one, key=key_of_member(KEY, i), rows=rows, **({"batch_size": BATCH} | options))
        assert_close(run.train_state.ensemble[i], alone.model, 1e-5)
        assert_close(run.ensemble[i], alone.best if options.get("validation") is not None else alone.model, 1e-5)
        losses = alone.losses[: run.history.loss.shape[1]]
        np.testing.assert_allclose(run.history.loss[i], losses, rtol=1e-5, atol=1e-6)
        assert np.isnan(alone.losses[run.history.loss.shape[1] :]).all()
        assert run.status[i] == alone.status
        assert run.train_state.step[i] == alone.step
        if options.get("validation") is not None:
            scores = alone.scores[: run.history.validation.shape[1]]
            np.testing.assert_allclose(run.history.validation[i], scores, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(run.best_score[i], alone.best_score, rtol=1e-5)
            assert run.best_step[i] == alone.best_step


@pytest.mark.parametrize("batch_size", [5, 8, 20, 32])
def test_epochs_of_full_batches(batch_size):
    run = fit(epochs=3, batch_size=batch_size)
    check(run, steps=3 * -(-ROWS // min(batch_size, ROWS)), batch_size=batch_size)


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_steps_end_within_an_epoch(steps):
    check(fit(steps=steps), steps=steps)


def test_rows_in_their_order():
    check(fit(epochs=2, shuffle=False), steps=6, shuffle=False)


def test_rows_of_their_own():
    rows = ee.resample.bootstrap(ROWS, MEMBERS, key=KEY)
    run = fit(epochs=2, rows=rows)
    check(run, steps=6, own_rows=np.asarray(rows))
    np.testing.assert_array_equal(run.rows, rows)


def test_data_of_their_own():
    x = np.stack([X + 0.1 * i for i in range(MEMBERS)])
    run = ee.fit(
        ensemble(), loss, optimiser, (ee.Each(x), Y), epochs=2, batch_size=BATCH, hyper=RATES, key=KEY,
        plan=ee.plan.Blocks(2), validation=(ee.Each(x), Y),
    )  # fmt: skip
    for i in range(MEMBERS):
        member = Member(loss, optimiser, hyper=jnp.asarray(RATES[i]))
        alone = member.fit(
            ensemble()[i], (x[i], Y), steps=6, key=key_of_member(KEY, i), batch_size=BATCH, validation=(x[i], Y)
        )
        assert_close(run.ensemble[i], alone.best, 1e-5)
        np.testing.assert_allclose(run.history.validation[i], alone.scores, rtol=1e-5)


@pytest.mark.parametrize("patience", [None, 1, 2])
def test_best_weights_and_patience(patience):
    validation = ee.train.Validation(HELD_OUT, score=score, mode="min", min_delta=1e-3)
    run = fit(epochs=12, validation=validation, patience=patience)
    check(run, steps=36, validation=HELD_OUT, scorer=score, patience=patience, min_delta=1e-3)
    assert patience is None or (run.status == ee.train.Status.STOPPED).any(), "nobody stopped, which compares nothing"


def test_higher_scores_are_better():
    near = lambda model, batch, key: jnp.mean(jnp.abs(jax.vmap(model)(batch[0])[:, 0] - batch[1]) < 0.3)
    run = fit(epochs=5, validation=ee.train.Validation(HELD_OUT, score=near, mode="max"), patience=2)
    check(run, steps=15, validation=HELD_OUT, scorer=near, mode="max", patience=2)


def test_targets_and_limits():
    stop = ee.train.Stopping(target=0.25, steps=[6, 9, 30])
    run = fit(epochs=12, validation=HELD_OUT, stop=stop)
    for i, most in enumerate([6, 9, 30]):
        alone = Member(loss, optimiser, hyper=jnp.asarray(RATES[i])).fit(
            ensemble()[i], (X, Y), steps=36, key=key_of_member(KEY, i), batch_size=BATCH, validation=HELD_OUT,
            target=0.25, most=most,
        )  # fmt: skip
        assert (run.status[i], run.train_state.step[i]) == (alone.status, alone.step)
        assert_close(run.ensemble[i], alone.best, 1e-5)


def test_members_stop_after_some_seconds():
    run = fit(epochs=10_000, stop=ee.train.Stopping(seconds=0.5), history="epochs")
    assert (run.status == ee.train.Status.STOPPED).all()
    assert run.seconds < 60


def test_a_diverged_member_gets_back_what_it_had_at_the_start_of_the_epoch():
    def breaks(model, batch, key, hyper):
        value = loss(model, batch, key)
        return jnp.where(hyper["fault"] & (jnp.abs(value) < hyper["below"]), jnp.nan, value)

    first = fit(epochs=8).history.loss[1]
    hyper = {
        "fault": jnp.array([False, True, False]),
        "below": jnp.full(3, np.sort(first)[4] + 1e-6),
        "lr": jnp.asarray(RATES),
    }
    options = {"batch_size": BATCH, "epochs": 8, "key": KEY, "hyper": hyper, "plan": ee.plan.Blocks(2)}
    with pytest.warns(UserWarning, match="members 1 diverged"):
        run = ee.fit(ensemble(), breaks, lambda hyper: optimiser(hyper["lr"]), (X, Y), **options)
    at = int(run.stopped_at[1])
    assert at % 3 == 0
    assert run.status.tolist() == [0, 2, 0]
    assert_close(run.ensemble[1], (fit(steps=at).ensemble if at else ensemble())[1], 1e-6)
    assert np.isnan(run.history.loss[1, at : at + 3]).any()
    assert np.isnan(run.history.loss[1, at + 3 :]).all()
    with pytest.raises(ee.train.DivergedError) as caught:
        ee.fit(ensemble(), breaks, lambda hyper: optimiser(hyper["lr"]), (X, Y), on_diverge="raise", **options)
    assert caught.value.run.status[1] == 2


def test_weights_that_are_not_finite_count_though_the_loss_is():
    rooted = lambda model, batch, key, hyper: loss(model, batch, key) + jnp.sqrt(hyper * model.layers[0].bias[0] ** 2)
    with pytest.warns(UserWarning, match="members 1 diverged"):  # the root's derivative at zero is not finite
        run = ee.fit(
            ensemble(), rooted, lambda _: optax.sgd(0.1), (X, Y), steps=1, hyper=np.float32([1, 0, 1]), key=KEY
        )
    assert np.isfinite(run.history.loss).all()
    assert_same(run.ensemble[1], ensemble()[1])


def test_a_long_epoch_is_kept_in_parts():
    x, y, rates = np.tile(X, (30, 1)), np.tile(Y, 30), RATES / 10  # with large ones, rounding grows in 700 steps
    worst = ee.train.Validation(HELD_OUT, score=score, mode="max")  # the first score is the highest
    run = ee.fit(ensemble(), loss, optimiser, (x, y), steps=700, batch_size=1, hyper=rates, key=KEY, validation=worst)
    for i in range(MEMBERS):
        member = Member(loss, optimiser, hyper=jnp.asarray(rates[i]), score=score)
        alone = member.fit(
            ensemble()[i], (x, y), steps=700, key=key_of_member(KEY, i), batch_size=1, validation=HELD_OUT,
            mode="max",
        )  # fmt: skip
        assert_close(run.train_state.ensemble[i], alone.model, 2e-4)
        np.testing.assert_allclose(run.history.validation[i], alone.scores, rtol=1e-3)
        assert run.best_step[i] == alone.best_step
    np.testing.assert_array_equal(run.history.validation_step, [600, 700])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    slow_but(
        ["conv and batch norm", "bfloat16"],
        ["conv and batch norm", "attention and dropout", "tied weights", "bfloat16"],
    ),
)
def test_other_models(name):
    case, whole = CASES[name], factory_data()
    adam = optax.adam(1e-2, eps=case.eps)
    made = ee.build(case.make, MEMBERS, key=KEY)
    members, state = made if case.stateful else (made, None)
    run = ee.fit(members, case.loss, adam, whole, epochs=3, batch_size=BATCH, state=state, key=KEY)
    for i in range(MEMBERS):
        own = None if state is None else ee.tree.take(state, i)
        member = Member(case.loss, adam)
        alone = member.fit(members[i], whole, steps=9, key=key_of_member(KEY, i), batch_size=BATCH, state=own)
        assert_close(run.ensemble[i], alone.model, 5 * case.rtol)


def test_auxiliary_outputs_and_means_of_epochs():
    with_aux = lambda model, batch, key: (loss(model, batch, key), {"rows": batch[1], "n": jnp.int32(3)})
    options = {"batch_size": BATCH, "hyper": RATES, "key": KEY, "has_aux": True, "epochs": 2}
    run = ee.fit(ensemble(), with_aux, optimiser, (X, Y), **options)
    assert_same(run.ensemble, ee.fit(ensemble(), loss, optimiser, (X, Y), **(options | {"has_aux": False})).ensemble)
    assert run.history.aux["rows"].shape == (MEMBERS, 6, BATCH)
    np.testing.assert_allclose(np.sort(run.history.aux["rows"][1].reshape(-1)[:ROWS]), np.sort(Y), rtol=1e-6)
    assert (run.history.aux["n"] == 3).all()
    thin = ee.fit(ensemble(), with_aux, optimiser, (X, Y), history="epochs", **options)
    np.testing.assert_allclose(thin.history.loss, run.history.loss.reshape(MEMBERS, 2, 3).mean(-1), rtol=1e-5)
    np.testing.assert_array_equal(thin.history.aux["rows"], run.history.aux["rows"][:, [2, 5]])
    np.testing.assert_array_equal(thin.history.step, [3, 6])


@pytest.mark.slow
def test_auxiliary_outputs_on_devices_that_share_rows():
    with_aux = lambda model, batch, key: (loss(model, batch, key), jnp.stack([batch[1][0], jnp.mean(batch[1])]))
    options = {"batch_size": BATCH, "hyper": RATES, "key": KEY, "has_aux": True, "steps": 4}
    run = ee.fit(ensemble(), with_aux, optimiser, (X, Y), mesh=ee.make_mesh(1, 4), **options)
    alone = ee.fit(ensemble(), with_aux, optimiser, (X, Y), **options)
    np.testing.assert_allclose(run.history.aux, alone.history.aux, rtol=1e-6)


def test_frozen_and_shared_leaves_stay():
    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    members = ee.build(make, MEMBERS, shared=lambda model: model.layers[0], key=KEY)
    trainable = eqx.tree_at(lambda m: m.layers[1].weight, jax.tree.map(lambda _: False, members[0]), replace=True)
    run = ee.fit(members, loss, optax.adam(1e-2), (X, Y), epochs=2, trainable=trainable, key=KEY)
    assert run.ensemble.axes == members.axes
    before, after = members.stacked, run.ensemble.stacked
    assert_same((before.layers[0], before.layers[1].bias), (after.layers[0], after.layers[1].bias))
    assert (before.layers[1].weight != after.layers[1].weight).all()
    opt_state = run.train_state.opt_state[0].mu
    assert opt_state.layers[0].weight is None


class TestGoingOn:
    def test_two_runs_are_one(self):
        whole, half = fit(epochs=6, validation=HELD_OUT), fit(epochs=3, validation=HELD_OUT)
        on = ee.fit(
            half, loss, optimiser, (X, Y), epochs=3, batch_size=BATCH, validation=HELD_OUT, plan=ee.plan.Blocks(2)
        )
        assert_same(on.ensemble, whole.ensemble)
        for got, expected in zip(jax.tree.leaves(on.history), jax.tree.leaves(whole.history), strict=True):
            np.testing.assert_array_equal(got, expected)

    def test_some_members_go_on_as_within_the_whole(self):
        half, whole = fit(epochs=2), fit(epochs=4)
        options = {"epochs": 2, "batch_size": BATCH, "plan": ee.plan.Blocks(2)}
        some = ee.fit(half[[2, 0]], loss, optimiser, (X, Y), **options)
        assert_same(some.ensemble, whole.ensemble[[2, 0]])
        joined = ee.concatenate([some[[1]], ee.fit(half[1:2], loss, optimiser, (X, Y), **options), some[[0]]])
        assert_same(joined.ensemble, whole.ensemble)
        np.testing.assert_array_equal(joined.history.loss, whole.history.loss)

    def test_a_state_goes_on_and_stays_whole(self):
        state = ee.train.init(ensemble(), optimiser, hyper=RATES, key=KEY)
        for plan in (ee.plan.Vmap(), ee.plan.Blocks(2)):
            run = ee.fit(state, loss, optimiser, (X, Y), epochs=2, batch_size=BATCH, plan=plan)
            assert_close(run.ensemble, fit(epochs=2).ensemble, 1e-6)
        assert np.isfinite(np.asarray(state.params.layers[0].weight)).all()  # its arrays were not donated

    def test_other_rates(self):
        half = fit(epochs=2).train_state
        changed = eqx.tree_at(lambda state: state.hyper, half, half.hyper * 0)
        run = ee.fit(changed, loss, optimiser, (X, Y), epochs=2, batch_size=BATCH)
        assert_same(run.ensemble, half.ensemble)


def test_a_state_of_members_of_one_is_one_of_many():
    """Members trained with slices of the keys are those of the whole, whatever their number."""
    keys = ee.member_keys(KEY, MEMBERS, purpose="fit")
    whole = fit(epochs=2, plan=ee.plan.Blocks(1))
    for i in range(MEMBERS):
        alone = ee.fit(
            ensemble()[[i]], loss, optimiser, (X, Y), epochs=2, batch_size=BATCH, hyper=RATES[[i]], key=keys[i : i + 1],
            plan=ee.plan.Blocks(1),
        )  # fmt: skip
        assert_same(alone.ensemble[0], whole.ensemble[i])


def test_a_member_past_its_limit_trains_no_further():
    run = fit(epochs=2)
    more = fit_more(run, steps=[6, 99, 7])
    assert more.train_state.step.tolist() == [6, 12, 9]
    assert_close(more.ensemble[0], run.ensemble[0], 0)


def fit_more(run, *, steps):
    stop = ee.train.Stopping(steps=steps)
    return ee.fit(run, loss, optimiser, (X, Y), epochs=2, batch_size=BATCH, stop=stop, plan=ee.plan.Blocks(2))


@pytest.mark.parametrize("limits", [{"target": np.nan}, {"steps": -1}, {"seconds": [1.0, np.nan]}])
def test_limits_that_no_member_could_meet(limits):
    with pytest.raises(ValueError, match=f"`{next(iter(limits))}`"):
        ee.train.Stopping(**limits)


@pytest.mark.parametrize("min_delta", [-1.0, np.nan])
def test_an_improvement_is_not_negative(min_delta):
    with pytest.raises(ValueError, match="`min_delta`"):
        ee.train.Validation(HELD_OUT, min_delta=min_delta)
