import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X, Y = jnp.ones((6, 2)), jnp.zeros((6, 1))


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def first_state(optimiser):
    return ee.train.init(ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 3, key=KEY), optimiser, key=KEY)


@pytest.fixture
def batches():
    own = lambda x: ee.Each(jnp.broadcast_to(x, (3, *x.shape)))
    return {"shared": (X[:0], Y[:0]), "own": (own(X[:0]), own(Y[:0])), "NumPy": (np.asarray(X)[:0], np.asarray(Y)[:0])}


@pytest.mark.parametrize("kind", ["shared", "own", "NumPy"])
@pytest.mark.parametrize("plan", [None, ee.plan.Sequential()])
def test_a_batch_without_rows_is_refused(kind, plan, batches):
    sgd = optax.sgd(0.1)
    step, state = ee.train.make_step(loss, sgd, plan=plan), first_state(sgd)
    with pytest.raises(ValueError, match=r"`train.make_step` needs at least one row in a batch, got none"):
        step(state, batches[kind])
    state, metrics = step(state, (X[:1], Y[:1]))
    assert np.isfinite(metrics.loss).all()
    assert (state.status == 0).all()


def test_data_of_another_number_of_members():
    sgd = optax.sgd(0.1)
    with pytest.raises(
        ee.MemberMismatchError, match=r"`train.make_step` needs .* the same number of members, got 3 and 2"
    ):
        ee.train.make_step(loss, sgd)(first_state(sgd), (ee.Each(jnp.ones((2, 6, 2))), Y))


def test_a_part_without_rows_is_not():
    sgd = optax.sgd(0.1)
    step = ee.train.make_step(lambda model, batch, key: loss(model, batch[:2], key), sgd)
    assert np.isfinite(step(first_state(sgd), (X, Y, jnp.zeros((0, 3))))[1].loss).all()


@pytest.mark.parametrize(("made", "taken", "words"), [
    (optax.adam(0.1), optax.sgd(0.1), "holds ScaleByAdamState, EmptyState; this optimiser's would hold EmptyState"),
    (optax.sgd(0.1), optax.adam(0.1), "holds EmptyState, EmptyState; this optimiser's would hold ScaleByAdamState"),
    (optax.adam(0.1), optax.adam(0.1, mu_dtype=jnp.bfloat16), "arrays of other shapes or dtypes"),
])  # fmt: skip
def test_the_state_of_another_optimiser_is_refused(made, taken, words):
    state = first_state(made)
    with pytest.raises(TypeError, match="`train.make_step` got a training state that another optimiser made") as error:
        ee.train.make_step(loss, taken)(state, (X, Y))
    assert words in str(error.value)
    with pytest.raises(TypeError, match=r"`fit` got a training state that another optimiser made"):
        ee.fit(state, loss, taken, (X, Y), epochs=1, key=KEY)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_number_of_the_state_from_numpy(dtype):
    """NumPy's arrays count with the dtype that they have in JAX."""
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    state, rates = first_state(sgd), np.array([0.1, 0.2, 0.3], dtype)
    state = eqx.tree_at(lambda state: state.opt_state.hyperparams["learning_rate"], state, rates)
    plain = eqx.tree_at(
        lambda state: state.opt_state.hyperparams["learning_rate"], state, jnp.asarray(rates, "float32")
    )
    weights = [ee.fit(one, loss, sgd, (X, Y), steps=2, key=KEY).ensemble.stacked.weight for one in (state, plain)]
    np.testing.assert_array_equal(*weights)


def test_an_equal_optimiser_is_not():
    state = first_state(optax.adam(0.1))
    state, _ = ee.train.make_step(loss, optax.adam(0.2))(state, (X, Y))
    assert int(state.step) == 1


def test_hyper_parameters_that_nothing_uses_are_refused():
    ensemble = first_state(optax.sgd(0.1)).ensemble
    state = ee.train.init(ensemble, optax.sgd(0.1), hyper={"rate": jnp.ones(3)}, key=KEY)
    with pytest.raises(TypeError, match="`train.make_step` got `hyper`, but nothing uses it"):
        ee.train.make_step(loss, optax.sgd(0.1))(state, (X, Y))


def test_a_part_of_the_batch_for_each_member_that_is_not_marked():
    """Each member would be compared with the targets of all."""
    step, state = ee.train.make_step(loss, optax.sgd(0.1)), first_state(optax.sgd(0.1))
    x, y = (jnp.stack([part] * 3) for part in (X, Y))
    step(state, (ee.Each(x), ee.Each(y)))
    for beside in (ee.Each(x), X):
        with pytest.warns(UserWarning, match=r"`train.make_step` gives all of `batch\[1\]`.*mark it `Each`"):
            ee.train.make_step(lambda model, batch, key: loss(model, (batch[0], batch[1][0]), key), optax.sgd(0.1))(
                state, (beside, y)
            )
