import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

from ..factories import CASES, ConvBatchNorm

KEY, ROWS = jax.random.key(0), 10


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key), 4, key=KEY)


def rows(count=ROWS):
    return jax.random.normal(jax.random.key(1), (count, 3))


def looped(ensemble, x, fn=lambda model, x: model(x)):
    return np.stack([np.stack([fn(member, row) for row in x]) for member in ensemble.unstack()])


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [4, 256])
def test_is_the_loop_over_members_and_rows(ensemble, batch_size):
    out = ee.predict(ensemble, rows(), batch_size=batch_size)
    assert out.shape == (4, ROWS, 2)
    np.testing.assert_allclose(out, looped(ensemble, rows()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [ee.plan.Vmap(), ee.plan.Blocks(1), ee.plan.Blocks(3)], ids=repr)
def test_a_plan_changes_nothing(ensemble, plan):
    expected = ee.predict(ensemble, rows())
    np.testing.assert_allclose(ee.predict(ensemble, rows(), plan=plan, batch_size=4), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_inputs_and_outputs_may_be_trees(ensemble):
    inputs = {"a": rows(), "b": [rows()[:, 0]]}
    fn = lambda model, x: {"out": model(x["a"]), "sum": (model(x["a"]) + x["b"][0],)}
    out = ee.predict(ensemble, inputs, fn=fn, batch_size=4)
    expected = looped(ensemble, rows())
    np.testing.assert_allclose(out["out"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out["sum"][0], expected + np.asarray(rows())[:, :1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_numpy_and_integer_inputs():
    ensemble = ee.build(lambda key: eqx.nn.Embedding(7, 3, key=key), 2, key=KEY)
    tokens = np.array([0, 6, 3, 3, 1])
    expected = looped(ensemble, jnp.asarray(tokens))
    np.testing.assert_array_equal(ee.predict(ensemble, tokens, batch_size=2), expected)


@pytest.mark.slow
def test_inputs_of_their_own(ensemble):
    own = jnp.stack([rows(), 2 * rows(), rows()[::-1], -rows()])
    out = ee.predict(ensemble, ee.Each(own), batch_size=4)
    expected = np.stack([np.stack([member(row) for row in own[i]]) for i, member in enumerate(ensemble)])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    mixed = ee.predict(ensemble, (ee.Each(own), rows()), fn=lambda model, x: model(x[0]) + model(x[1]))
    np.testing.assert_allclose(mixed, expected + looped(ensemble, rows()), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_state_in_inference_mode():
    ensemble, state = ee.build(eqx.nn.make_with_state(ConvBatchNorm), 2, key=KEY)
    x = jax.random.normal(jax.random.key(1), (5, 25))

    def trained(model, state):  # untrained statistics are meaningless
        _, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return state

    state = ee.map_members(trained)(ensemble, state)
    out = ee.predict(ensemble, x, state=state, batch_size=2)
    assert out.shape == (2, 5, 2)
    for i, member in enumerate(ensemble.unstack()):
        member, own = eqx.nn.inference_mode(member), ee.tree.take(state, i)
        np.testing.assert_allclose(out[i], jnp.stack([member(row, own)[0] for row in x]), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def dropping():
    def make(key):
        return eqx.nn.Sequential([eqx.nn.Linear(3, 64, key=key), eqx.nn.Dropout(0.5)])

    return ee.stack([make(KEY)] * 3)


def test_inference_mode_is_the_default(dropping):
    x = jnp.ones((4, 3))
    assert (np.asarray(ee.predict(dropping, x)) != 0).all()
    assert not dropping.stacked.layers[1].inference
    with pytest.raises(RuntimeError, match="key"):
        ee.predict(dropping, x, inference=False)


def test_a_key_is_never_ignored(dropping):
    """In inference mode dropout uses no key: which is meant is to be said."""
    x = jnp.ones((4, 3))
    with pytest.raises(ValueError, match="with `key` needs `inference`"):
        ee.predict(dropping, x, key=KEY)
    kept = ee.predict(dropping, x, key=KEY, inference=True)
    np.testing.assert_array_equal(kept, ee.predict(dropping, x))


@pytest.mark.slow
def test_monte_carlo_dropout_is_the_loop_over_passes(dropping):
    """As the documentation writes it."""
    x, passes = jnp.ones((4, 3)), jax.random.split(KEY, 3)
    one_pass = lambda key: ee.predict(dropping, x, inference=False, key=key)
    drawn = jax.vmap(one_pass)(passes)
    for i, own in enumerate(passes):
        for m, (member, key) in enumerate(zip(dropping, ee.member_keys(own, 3, purpose="predict"), strict=True)):
            want = [member(row, key=jax.random.fold_in(key, r)) for r, row in enumerate(x)]
            np.testing.assert_allclose(drawn[i, m], jnp.stack(want), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_monte_carlo_dropout_is_drawn_per_row_and_member(dropping):
    x = jnp.ones((7, 3))
    mask = np.asarray(ee.predict(dropping, x, inference=False, key=KEY)) == 0
    assert len(np.unique(mask.reshape(21, 64), axis=0)) == 21
    for batch_size in (1, 3):
        smaller = np.asarray(ee.predict(dropping, x, inference=False, key=KEY, batch_size=batch_size)) == 0
        np.testing.assert_array_equal(smaller, mask)
    keys, some = ee.member_keys(KEY, 3, purpose="predict"), np.array([2, 0])
    of_some = ee.predict(dropping[some], x, inference=False, key=keys[some])
    np.testing.assert_array_equal(np.asarray(of_some) == 0, mask[some])
    np.testing.assert_array_equal(np.asarray(ee.predict(dropping, x[:3], inference=False, key=KEY)) == 0, mask[:, :3])
    other = np.asarray(ee.predict(dropping, x, inference=False, key=jax.random.key(1))) == 0
    assert (other != mask).any()
    alone = dropping[1](x[5], key=jax.random.fold_in(keys[1], 5))
    np.testing.assert_array_equal(np.asarray(alone) == 0, mask[1, 5])


def test_fn_with_key_and_state():
    ensemble, state = ee.build(CASES["conv and batch norm"].make, 2, key=KEY)
    seen = ee.predict(
        ensemble,
        jnp.ones((3, 25)),
        state=state,
        key=KEY,
        inference=True,
        fn=lambda model, x, state, key: jax.random.normal(key, (2,)) + 0 * jnp.sum(model.conv.weight),
    )
    assert len(np.unique(np.asarray(seen).reshape(6, 2), axis=0)) == 6


def test_batches_of_one_size_compile_once(ensemble):
    traces = []

    def fn(model, x):
        traces.append(x.shape)
        return model(x)

    ee.predict(ensemble, rows(), fn=fn, batch_size=4)
    ee.predict(ensemble, rows(11), fn=fn, batch_size=4)
    assert traces == [(3,)]


def test_rows_that_are_not_finite_are_predicted(ensemble):
    x = rows().at[2, 0].set(jnp.nan)
    out = np.asarray(ee.predict(ensemble, x))
    assert np.isnan(out[:, 2]).all()
    assert np.isfinite(np.delete(out, 2, axis=1)).all()


def test_threads_compute_in_double_precision_too():
    with jax.enable_x64(True):
        ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, dtype=jnp.float64, key=key), 3, key=jax.random.key(0))
        x = np.random.default_rng(0).normal(size=(100, 2))
        whole = jax.vmap(lambda x: ensemble(x), out_axes=1)(x)
        np.testing.assert_allclose(ee.predict(ensemble, x, batch_size=10), whole, rtol=1e-14)
