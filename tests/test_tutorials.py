"""What users first try with many models in JAX, and the expected result of each."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .factories import assert_close, assert_same

KEY = jax.random.key(1)


def dense(key, n, m):
    w_key, b_key = jax.random.split(key)
    return jax.random.normal(w_key, (n, m)), jax.random.normal(b_key, (m,))


def layers_model(key):
    """A model as a list of `(W, b)`, of sizes 2, 3 and 4."""
    return [dense(k, n, m) for k, n, m in zip(jax.random.split(key, 2), (2, 3), (3, 4), strict=True)]


def forward(layers, x):
    *hidden, (w, b) = layers
    for v, c in hidden:
        x = jnp.tanh(x @ v + c)
    return x @ w + b


def mse(layers, x, y):
    return jnp.mean((jax.vmap(lambda x: forward(layers, x))(x) - y) ** 2)


def batch():
    return jax.random.normal(KEY, (5, 2)), jnp.ones((5, 4))


class TestListOfModels:
    """One vmapped loss of four models that are lists of tuples."""

    def models(self):
        return [layers_model(key) for key in jax.random.split(KEY, 4)]

    @pytest.mark.slow
    def test_stack_then_one_map(self):
        x, y = batch()
        stacked = ee.tree.stack(self.models())
        assert [[leaf.shape for leaf in layer] for layer in stacked] == [[(4, 2, 3), (4, 3)], [(4, 3, 4), (4, 4)]]
        losses = ee.map_members(mse)(ee.Each(stacked), x, y)
        expected = np.array([mse(model, x, y) for model in self.models()])
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        assert len(np.unique(expected)) == 4
        assert_same(ee.tree.unstack(stacked), self.models())

    def test_the_list_itself_is_refused(self, unhooked):
        x, y = batch()
        for call in (
            lambda: ee.map_members(mse)(self.models(), x, y),
            lambda: ee.Each(self.models()),
            lambda: ee.predict(self.models(), x, fn=forward),
            lambda: ee.fit(self.models(), lambda m, b, k: mse(m, *b), optax.sgd(0.1), (x, y), epochs=1, key=KEY),
        ):
            with pytest.raises((TypeError, ValueError), match="stack"):
                call()

    @pytest.mark.slow
    def test_one_model_for_the_draws_of_its_key(self):
        """The same models whichever way they are drawn."""
        stacked = jax.vmap(layers_model)(jax.random.split(KEY, 4))
        assert_same(stacked, ee.tree.stack(self.models()))


class SumOfSquares(eqx.Module):
    scale: jax.Array

    def __call__(self, x):
        return jnp.sum(self.scale * x**2)


class TestOneVector:
    """A function of one vector over a batch, over members, over both."""

    def ensemble(self):
        return ee.stack([SumOfSquares(jnp.array(scale)) for scale in (1.0, 10.0, 100.0)])

    def test_over_members(self):
        x = jnp.arange(12.0).reshape(4, 3)
        expected = np.sum(np.asarray(x) ** 2, axis=1)
        square = lambda x: jnp.sum(x**2)
        np.testing.assert_allclose(ee.map_members(square)(ee.Each(x)), expected)
        np.testing.assert_allclose(ee.map_members(square)(ee.Each(x.T, axis=1)), expected)

    def test_over_a_batch(self):
        x = jnp.arange(12.0).reshape(4, 3)
        expected = np.array([[1.0], [10.0], [100.0]]) * np.sum(np.asarray(x) ** 2, axis=1)
        np.testing.assert_allclose(self.ensemble()(ee.Batch(x)), expected)
        np.testing.assert_allclose(self.ensemble()(ee.Batch(x.T, axis=1)), expected)

    @pytest.mark.slow
    def test_over_both(self):
        x = jnp.arange(24.0).reshape(3, 4, 2)
        expected = np.array([[1.0], [10.0], [100.0]]) * np.sum(np.asarray(x) ** 2, axis=2)
        np.testing.assert_allclose(self.ensemble()(ee.Each(ee.Batch(x))), expected)
        batch_last, members_middle = jnp.transpose(x, (2, 0, 1)), jnp.transpose(x, (1, 0, 2))
        np.testing.assert_allclose(self.ensemble()(ee.Each(ee.Batch(members_middle), axis=1)), expected)
        np.testing.assert_allclose(self.ensemble()(ee.Each(ee.Batch(batch_last, axis=1), axis=1)), expected)

    def test_where_the_members_go(self):
        x = jnp.arange(12.0).reshape(4, 3)
        both = ee.map_members(lambda model, x: jax.vmap(model)(x), out_axis=1)(self.ensemble(), x)
        np.testing.assert_allclose(both, self.ensemble()(ee.Batch(x)).T)

    def test_is_traced_once(self):
        traces = []

        class Traced(eqx.Module):
            scale: jax.Array

            def __call__(self, x):
                traces.append(x.shape)
                return jnp.sum(self.scale * x**2)

        ensemble = ee.stack([Traced(jnp.array(scale)) for scale in (1.0, 2.0, 3.0)])
        ensemble(ee.Each(ee.Batch(jnp.ones((3, 4, 2)))))
        assert traces == [(2,)]


class TestWeightedSumOfNestedLists:
    def trees(self):
        first = [[[[1, 2], [3, 4]], [2, 3]]] * 2
        second = [[[[2, 3], [3, 4]], [5, 3]]] * 2
        third = [[[[7, 1], [4, 4]], [6, 2]], [[[6, 4], [3, 7]], [7, 3]]]
        return [first, second, third]

    def test_ints_stay_exact_ints(self):
        found = ee.tree.weighted_sum(self.trees(), [1, 2, 3])
        assert found == [[[[26, 11], [21, 24]], [30, 15]], [[[23, 20], [18, 33]], [33, 18]]]
        assert all(type(leaf) is int for leaf in jax.tree.leaves(found))

    def test_a_wrong_number_of_weights(self):
        with pytest.raises(ValueError, match="got 3 trees and 2 weights"):
            ee.tree.weighted_sum(self.trees(), [1, 2])

    def test_unequal_structures(self):
        first, second, third = self.trees()
        with pytest.raises(ee.MemberMismatchError, match=r"tree 2 differs from tree 0.*\n.*\[1\]\[0\]\[1\]") as caught:
            ee.tree.weighted_sum([first, second, [third[0], [[[6, 4], 3], [7, 3]]]], [1, 2, 3])
        assert "[2]" not in str(caught.value).splitlines()[1]


class TestNestedDicts:
    """Parameters and the optimiser's state are nested dicts; a step of gradient descent is a map over trees."""

    RATE, DECAY = 0.1, 0.9

    def init(self, key):
        k1, k2 = jax.random.split(key)
        weights = {"w": jax.random.normal(k1, (2, 3)), "b": jnp.zeros(3)}
        return {"hidden": weights, "out": {"w": jax.random.normal(k2, (3, 4))}}

    def loss(self, params, batch, key=None):
        x, y = batch
        hidden = jnp.tanh(x @ params["hidden"]["w"] + jnp.expand_dims(params["hidden"]["b"], 0))
        return jnp.mean((hidden @ params["out"]["w"] - y) ** 2)

    @pytest.mark.slow
    def test_own_step_under_jit_and_vmap(self, unhooked):
        models = [self.init(key) for key in jax.random.split(KEY, 3)]

        @jax.jit
        def step(params, momentum):
            grads = jax.grad(self.loss)(params, batch())
            momentum = jax.tree.map(lambda m, g: self.DECAY * m + g, momentum, grads)
            return jax.tree.map(lambda p, m: p - self.RATE * m, params, momentum), momentum

        stacked = ee.tree.stack(models)
        state = jax.tree.map(jnp.zeros_like, stacked)
        for _ in range(5):
            stacked, state = jax.jit(ee.map_members(step))(ee.Each(stacked), ee.Each(state))
        for i, params in enumerate(models):
            momentum = jax.tree.map(jnp.zeros_like, params)
            for _ in range(5):
                params, momentum = step(params, momentum)
            assert_close(ee.tree.take(stacked, i), params, 1e-5)
            assert_close(ee.tree.take(state, i), momentum, 1e-5)

        ensemble = ee.stack(models)
        optimiser = optax.sgd(self.RATE, momentum=self.DECAY)
        train_state, train_step = ee.train.init(ensemble, optimiser, key=KEY), ee.train.make_step(self.loss, optimiser)
        for _ in range(5):
            train_state, _ = train_step(train_state, batch())
        assert_close(train_state.ensemble.stacked, stacked, 1e-5)


@pytest.mark.parametrize("size", [3, 7])
def test_chunks_that_do_not_divide_the_members(size):
    models = ee.Each(ee.tree.stack([layers_model(key) for key in jax.random.split(KEY, 7)]))
    x, y = batch()
    plain = jax.jit(jax.vmap(mse, in_axes=(0, None, None)))(models.value, x, y)
    chunked = eqx.filter_jit(ee.map_members(mse, plan=ee.plan.Blocks(size)))(models, x, y)
    assert chunked.shape == (7,)
    np.testing.assert_allclose(chunked, plain, rtol=1e-6)
