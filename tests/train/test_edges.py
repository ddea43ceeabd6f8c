"""What a plain loop over one member does with unusual input, the members of a fit do."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY, MEMBERS = jax.random.key(0), 3
X = np.asarray(jax.random.normal(jax.random.key(1), (8, 2)))
BATCHES = [(X[:4], X[:4].sum(1)), (X[4:], X[4:].sum(1))]


def loss(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[0])[:, 0] - batch[1]) ** 2)


@ft.cache
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), MEMBERS, key=KEY)


def fit(start=None, loss=loss, optimiser=optax.sgd(0.1), **options):  # noqa: B008
    options = {"epochs": 2, "key": KEY, **options}
    return ee.fit(ensemble() if start is None else start, loss, optimiser, BATCHES, **options)


def alone(i, optimiser, scale=1.0, batches=2 * BATCHES):  # noqa: B006
    """Member `i` after the same steps in a plain loop."""
    model, state = ensemble()[i], optimiser.init(eqx.filter(ensemble()[i], eqx.is_array))
    for batch in batches:
        grads = eqx.filter_grad(lambda model, batch=batch: scale * loss(model, batch, None))(model)
        updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
    return model


def assert_close(model, other):
    for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_loss_that_calls_python_is_not_mistaken_for_another_one():
    def scaled(scale):
        host = lambda x: np.float32(scale) * x
        by_host = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((), np.float32), x, vmap_method="sequential")
        return lambda model, batch, key: by_host(jnp.float32(1)) * loss(model, batch, key)

    data = X, X.sum(1)
    for scale in (1.0, 2.0):
        run = ee.fit(ensemble(), scaled(scale), optax.sgd(0.1), data, steps=2, batch_size=8, key=KEY)
        assert_close(run.ensemble[1], alone(1, optax.sgd(0.1), scale, 2 * [data]))


def with_aux(model, batch, key):
    return loss(model, batch, key), {"first": batch[1] > 0}


def test_a_run_continues_only_with_its_auxiliary_outputs():
    run = fit()
    with pytest.raises(ee.MemberMismatchError, match="same auxiliary outputs"):
        fit(run, with_aux, has_aux=True)  # before it trains: afterwards its result would be lost
    more = fit(run.train_state, with_aux, has_aux=True)
    with pytest.raises(ee.MemberMismatchError, match="same auxiliary outputs"):
        ee.concatenate([run, more])
    np.testing.assert_array_equal(more.history.aux["first"][2], [batch[1] > 0 for batch in 2 * BATCHES])


def test_scores_of_two_modes_are_not_compared():
    low = fit(validation=BATCHES[0])
    highest = ee.train.Validation(BATCHES[0], score=lambda *args: -loss(*args), mode="max")
    high = fit(validation=highest)
    np.testing.assert_allclose(high.best_score, -low.best_score, rtol=1e-6)
    with pytest.raises(ee.MemberMismatchError, match="one `mode`"):
        ee.concatenate([low, high])
    with pytest.raises(ValueError, match="best scores of `mode` 'min', not 'max'"):
        fit(low, validation=highest)


def test_members_are_stopped_by_masks_and_by_indices():
    state = ee.train.init(ensemble(), optax.sgd(0.1), key=KEY)
    for where in (1, [1], np.array([False, True, False]), jnp.arange(MEMBERS) == 1):
        assert state.stop(where).status.tolist() == [0, 1, 0]
    assert state.stop([0, 1, 2]).status.tolist() == state.stop().status.tolist() == [1, 1, 1]


def test_boolean_auxiliary_outputs_of_arrays():
    run = ee.fit(ensemble(), with_aux, optax.sgd(0.1), (X, X.sum(1)), steps=2, batch_size=8, has_aux=True, key=KEY)
    found = np.sort(run.history.aux["first"], axis=2)  # rows in an order of each member's own
    np.testing.assert_array_equal(found, np.broadcast_to(np.sort(X.sum(1) > 0), (MEMBERS, 2, 8)))


@pytest.mark.slow
def test_optimisers_that_wrap_and_that_are_not_called():
    wrapped = optax.MultiSteps(optax.adam(0.1), 2)
    with jax.numpy_dtype_promotion("standard"):  # of optax
        assert_close(fit(optimiser=wrapped).ensemble[2], alone(2, wrapped))
    with pytest.raises(TypeError, match="needs `hyper=`"):
        fit(optimiser=optax.adam)  # of which optax makes one that ascends


def test_scores_are_numbers():
    scored = lambda score: fit(validation=ee.train.Validation(BATCHES[0], score=score, mode="min")).best_score
    one = lambda model, batch, key: loss(model, batch, key)[None]
    np.testing.assert_array_equal(scored(one), fit(validation=BATCHES[0]).best_score)
    with pytest.raises(TypeError, match=r"cannot reshape array of shape \(4,\)"):
        scored(lambda model, batch, key: batch[1])


def test_predictions_that_are_no_arrays_do_not_depend_on_the_number_of_rows():
    for rows in (3, 4, 8):
        values, name = ee.predict(ensemble(), X[:rows], batch_size=4, fn=lambda model, x: (model(x), "name"))
        np.testing.assert_allclose(values[1], jax.vmap(ensemble()[1])(X[:rows]), rtol=1e-5)
        assert name == "name"


def test_the_text_of_an_ensemble_that_shares_arrays():
    shares = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), MEMBERS, shared=lambda model: model.weight, key=KEY)
    assert str(shares) == "Ensemble[Linear](num_members=3)"


def test_one_member_of_a_run_continues_whatever_the_type_of_its_index():
    run = fit()
    whole = fit(run, key=None)
    for i in (1, np.argsort(run.train_state.loss)[1], jnp.asarray(1)):
        for start in (run[i], run.train_state[i]):
            assert len(start.ensemble) == 1
            assert_close(fit(start, key=None).ensemble[0], whole.ensemble[int(i)])


@pytest.mark.parametrize("plan", [ee.plan.Vmap(), ee.plan.Blocks(2)])
def test_an_error_of_the_running_loss_is_not_hidden(plan):
    calls = []

    def host(x):
        calls.append(x)
        if len(calls) > 2 * MEMBERS:
            raise OSError("no connection")
        return np.float32(1)

    def remote(model, batch, key):
        one = jax.pure_callback(host, jax.ShapeDtypeStruct((), np.float32), batch[0][0, 0], vmap_method="sequential")
        return one * loss(model, batch, key)

    with pytest.raises(Exception, match="no connection"):
        ee.fit(ensemble(), remote, optax.sgd(0.1), (X, X.sum(1)), epochs=9, batch_size=8, plan=plan, key=KEY)
