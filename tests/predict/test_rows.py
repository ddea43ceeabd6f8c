"""Any number of rows: none, fewer than a batch, more. What fills a batch is never seen."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

from ..factories import CASES

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key), 4, key=KEY)


def rows(count):
    return jax.random.normal(jax.random.key(1), (count, 3))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [16])
def test_any_number_of_rows_is_the_loop(ensemble, batch_size):
    whole = np.stack([jax.vmap(member)(rows(19)) for member in ensemble.unstack()])
    for count in (0, 1, 3, 4, 5, 6, 8, 9, 15, 16, 17, 19):
        for x in (rows(19)[:count], np.asarray(rows(19))[:count]):
            out = ee.predict(ensemble, x, batch_size=batch_size)
            np.testing.assert_allclose(out, whole[:, :count], rtol=1e-5, atol=1e-6)
            combined = ee.predict(ensemble, x, batch_size=batch_size, combine=ee.combine.moments)
            np.testing.assert_allclose(combined.mean, whole[:, :count].mean(0), rtol=1e-5, atol=1e-6)
            assert combined.variance.shape == (count, 2)


@pytest.mark.slow
def test_few_sizes_are_compiled(ensemble):
    sizes = set()

    def combine(predictions):
        sizes.add(predictions.shape[1])
        return jnp.mean(predictions, axis=0)

    for count in (1, 2, 3, 5, 7, 8, 11, 17, 23, 24, 25):
        assert ee.predict(ensemble, rows(count), batch_size=24, combine=combine).shape == (count, 2)
    assert sizes == {1, 2, 4, 8, 16, 24}


@pytest.mark.slow
def test_a_row_that_fills_a_batch_changes_no_random_number():
    make = lambda key: eqx.nn.Sequential([eqx.nn.Linear(5, 5, key=key), eqx.nn.Dropout(0.5)])
    ensemble, x = ee.build(make, 3, key=KEY), jnp.ones((7, 5))
    want = ee.predict(ensemble, x, batch_size=7, inference=False, key=KEY)
    for count in (7, 5):
        found = ee.predict(ensemble, x[:count], inference=False, key=KEY)
        np.testing.assert_allclose(found, want[:, :count], rtol=1e-5)
    assert (np.asarray(want) == 0).any()


KINDS = {
    "numpy": np.linspace(0, 1, 5, dtype=np.float32),
    "integers": np.arange(5),
    "booleans": jnp.arange(5) > 2,
    "bfloat16": jnp.linspace(0, 1, 5, dtype=jnp.bfloat16),
    "weak": jnp.full(5, 0.5),
    "keys": jax.random.split(KEY, 5),
    "on another device": jax.device_put(jnp.arange(5.0), jax.devices()[1]),
}


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_kind_stay_what_they_are(kind, count):
    """In particular a weakly typed row leaves the dtype of a bfloat16 model as it is."""
    x = KINDS[kind]
    ensemble = ee.from_stacked(jnp.ones(2, jnp.bfloat16))
    asis = lambda model, x: (x, model * x if kind == "weak" else model)
    got, product = ee.predict(ensemble, x[:count], fn=asis, batch_size=64)
    assert got.dtype == jnp.asarray(x).dtype
    assert product.dtype == jnp.bfloat16
    assert got.shape == (2, count)
    data = jax.random.key_data if kind == "keys" else np.asarray
    np.testing.assert_array_equal(data(got[1]), data(x[:count]))


NONE = {
    "plain": {},
    "function": {"combine": lambda p: {"a": jnp.mean(p, axis=0), "b": jnp.max(p, axis=(0, 2))}},
    "numpy": {"combine": lambda p: np.mean(p, axis=0)},
    "blocks": {"plan": ee.plan.Blocks(3)},
    "keys": {"key": KEY, "inference": False, "fn": lambda model, x, key: model(x) + jax.random.normal(key, (2,))},
    "mesh": {"mesh": 4},
}


@pytest.mark.parametrize("case", NONE)
def test_no_rows_give_no_rows(ensemble, case):
    options = NONE[case] | ({"mesh": ee.make_mesh(members=4)} if case == "mesh" else {})
    axis = 0 if "combine" in options else 1
    for x in (rows(1), ee.Each(jnp.ones((4, 1, 3)))):
        none = ee.Each(x.value[:, :0]) if isinstance(x, ee.Each) else x[:0]
        one, found = ee.predict(ensemble, x, **options), ee.predict(ensemble, none, **options)
        assert jax.tree.structure(one) == jax.tree.structure(found)
        for got, like in zip(jax.tree.leaves(found), jax.tree.leaves(one), strict=True):
            assert got.shape == tuple(0 if i == axis else size for i, size in enumerate(like.shape))
            assert got.dtype == like.dtype


def test_no_rows_of_stateful_members_in_a_compiled_program():
    ensemble, state = ee.build(CASES["conv and batch norm"].make, 2, key=KEY)
    predict = eqx.filter_jit(lambda x: ee.predict(ensemble, x, state=state))
    assert predict(jnp.ones((0, 25))).shape == (2, 0, 2)
    assert predict(jnp.ones((3, 25))).shape == (2, 3, 2)


def test_a_member_is_not_run_for_no_rows(ensemble):
    """It may refuse what is not there: here a row of zeros."""
    careful = lambda model, x: model(eqx.error_if(x, jnp.all(x == 0), "a row of zeros"))
    assert ee.predict(ensemble, jnp.ones((0, 3)), fn=careful).shape == (4, 0, 2)
