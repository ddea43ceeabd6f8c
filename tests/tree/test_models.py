"""Real models, built separately: stacking, taking apart and calling them gives what each gives alone."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_ensemble import MemberMismatchError, tree

from ..marking import slow_but


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key):
        one, two = jax.random.split(key)
        pair = (eqx.nn.Embedding(5, 3, key=one), eqx.nn.Linear(3, 5, key=two))
        self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

    def __call__(self, x):
        embedding, linear = self.shared()
        return linear(embedding.weight[0] * x[:3])


class ConvNet(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.conv = eqx.nn.Conv2d(1, 2, 3, key=key)
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.conv(x.reshape(1, 2, 2).repeat(2, 1).repeat(2, 2)), state)


class Mixed(eqx.Module):
    count: jax.Array
    key: jax.Array
    scale: np.ndarray
    activation: object
    options: dict = eqx.field(static=True)

    def __init__(self, key):
        self.count = jax.random.randint(key, (), 0, 100)
        self.key = key
        self.scale = np.asarray(jax.random.normal(key, (4,)))
        self.activation = lambda x: x * self.scale
        self.activation = ft.partial(jnp.clip, min=0.0)
        self.options = {"norm": lambda x: x / 2, "names": ["a", "b"]}

    def __call__(self, x):
        return self.activation(x * self.scale) + self.count.astype(float)


class Attention(eqx.Module):
    attention: eqx.nn.MultiheadAttention

    def __call__(self, x):
        sequence = x.reshape(2, 2)
        return self.attention(sequence, sequence, sequence, inference=True)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __call__(self, x):
        return self.cell(x, jnp.zeros(3))


def _half(key):
    model = eqx.nn.MLP(4, 2, 3, 1, key=key)
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)


def _sequential(key):
    one, two = jax.random.split(key)
    layers = [eqx.nn.Linear(4, 3, key=one), eqx.nn.Lambda(lambda x: jnp.sin(x)), eqx.nn.Dropout(0.5, inference=True)]
    return eqx.nn.Sequential([*layers, eqx.nn.LayerNorm(3), eqx.nn.Linear(3, 2, key=two)])


MODELS = {
    "mlp": lambda key: eqx.nn.MLP(4, 2, 3, 2, key=key),
    "relu_and_lambda": lambda key: eqx.nn.MLP(4, 2, 3, 2, jax.nn.relu, lambda x: 2 * x, key=key),
    "weight_norm": lambda key: eqx.nn.WeightNorm(eqx.nn.Linear(4, 3, key=key)),
    "shared": Tied,
    "sequential": _sequential,
    "gru": lambda key: Recurrent(eqx.nn.GRUCell(4, 3, key=key)),
    "attention": lambda key: Attention(eqx.nn.MultiheadAttention(2, 2, key=key)),
    "mixed": Mixed,
    "bf16": _half,
    "jitted": lambda key: eqx.filter_jit(eqx.nn.Linear(4, 3, key=key)),
}


def _keys(count=3):
    return jax.random.split(jax.random.key(0), count)


@pytest.mark.parametrize("name", slow_but(["mixed"], MODELS))
def test_separately_built_models_stack(name, assert_same):
    models = [MODELS[name](key) for key in _keys()]
    stacked = tree.stack(models)
    x = jnp.linspace(-1.0, 1.0, 4).astype(jnp.bfloat16 if name == "bf16" else jnp.float32)
    for i, model in enumerate(models):
        assert_same(tree.unstack(stacked)[i], model)
    alone = models[1](x)
    assert_same(tree.take(stacked, 1)(x), alone)
    together = eqx.filter_vmap(lambda model: model(x))(stacked)[1]
    # Batched matrix products add in another order; bfloat16 has 8 bits.
    tolerance = 2e-2 if name == "bf16" else 1e-5
    np.testing.assert_allclose(together.astype(jnp.float32), alone.astype(jnp.float32), tolerance, tolerance)


@pytest.mark.slow
def test_model_and_state_built_separately(assert_same):
    built = [eqx.nn.make_with_state(ConvNet)(key) for key in _keys()]
    model, state = tree.stack(built)
    xs = jnp.linspace(-1.0, 1.0, 20).reshape(5, 4)

    @eqx.filter_jit
    def call(model, state):
        return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(xs, state)

    out, after = eqx.filter_vmap(call)(model, state)
    for i in range(3):
        assert_same(tree.take((model, state), i), built[i])
    alone, alone_after = call(*built[1])
    np.testing.assert_allclose(out[1], alone, 1e-5, 1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), tree.take(after, 1), alone_after)


def test_state_indices_that_are_bare_markers_stay_paired():
    class Counter(eqx.Module):
        one: eqx.nn.StateIndex
        two: eqx.nn.StateIndex

        def __init__(self, value):
            self.one, self.two = eqx.nn.StateIndex(jnp.asarray(value)), eqx.nn.StateIndex(jnp.asarray(-value))

    counters = [Counter(1.0), Counter(2.0)]
    model, state = tree.stack([(counter, eqx.nn.State(counter)) for counter in counters])
    assert state.get(model.one).tolist() == [1.0, 2.0]
    assert state.get(model.two).tolist() == [-1.0, -2.0]
    crossed = eqx.nn.State((counters[1].two, counters[1].one))
    with pytest.raises(MemberMismatchError):
        tree.stack([(counters[0], eqx.nn.State(counters[0])), (counters[1], crossed)])


OPTIMISERS = {
    "adam": lambda: optax.adam(1e-3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 10))),
    "multi": lambda: optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(1e-2, 0.9)}, {"x": "a", "y": "b"}),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimiser_states_stack(name, assert_same):
    states = []
    for i in range(3):
        optimiser = OPTIMISERS[name]()  # a new one for each member: its closures differ
        parameters = {"x": jnp.full(3, float(i)), "y": jnp.full(2, float(i))}
        with jax.numpy_dtype_promotion("standard"):  # optax itself does not pass the strict setting
            _, state = optimiser.update(parameters, optimiser.init(parameters), parameters)
        states.append(state)
    stacked = tree.stack(states)
    for i in range(3):
        assert_same(tree.take(stacked, i), states[i])


FLOWS = ["coupling_flow", "planar_flow"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.filterwarnings("ignore")
def test_flows_stack(name, assert_same):
    flows = pytest.importorskip("flowjax.flows")
    distributions = pytest.importorskip("flowjax.distributions")
    make = getattr(flows, name)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        built = [make(key, base_dist=distributions.Normal(jnp.zeros(2)), flow_layers=1) for key in _keys(2)]
        stacked = tree.stack(built)
        assert_same(tree.take(stacked, 1), built[1])
        if True:
            x = jnp.asarray([0.1, -0.2])
            together = eqx.filter_jit(eqx.filter_vmap(lambda flow: flow.log_prob(x)))(stacked)
            np.testing.assert_allclose(together[1], eqx.filter_jit(built[1].log_prob)(x), 1e-4)


def test_tied_arrays_stay_tied():
    def make(seed):
        weight = jax.random.normal(jax.random.key(seed), (2, 3))
        return {"a": weight, "b": [weight, weight + 1], "f": jnp.tanh}

    made = [make(i) for i in range(3)]
    stacked = tree.stack(made)
    results = [
        stacked,
        *tree.unstack(stacked),
        tree.take(stacked, 1),
        tree.take(stacked, [0, 1]),
        tree.concatenate([stacked, stacked]),
        tree.replace(stacked, 0, made[1]),
        tree.weighted_sum(made, [1, 2, 3]),
        tree.weighted_mean(made),
    ]
    for result in results:
        assert result["a"] is result["b"][0]
        assert result["a"] is not result["b"][1]


def test_arrays_tied_in_one_member_only_are_separated():
    weight = jnp.ones(2)
    stacked = tree.stack([{"a": weight, "b": weight}, {"a": jnp.zeros(2), "b": jnp.full(2, 3.0)}])
    assert stacked["a"].tolist() == [[1, 1], [0, 0]]
    assert stacked["b"].tolist() == [[1, 1], [3, 3]]


def test_the_stack_of_one_is_not_the_member():
    assert tree.stack([{"w": jnp.ones(2)}])["w"].shape == (1, 2)


@pytest.mark.slow
def test_built_by_vmap_and_stacked_are_the_same(assert_same):
    make = MODELS["relu_and_lambda"]
    assert_same(eqx.filter_vmap(make)(_keys()), tree.stack([make(key) for key in _keys()]))


def test_unstack_compiles_one_program_a_leaf_and_take_none_for_another_index(compiled):
    stacked = {str(i): jnp.ones((64, i + 1, 2)) for i in range(5)}
    with compiled() as names:
        tree.unstack(stacked)
    assert len(names) == 5
    with compiled() as names:
        tree.take(stacked, 0)
        tree.take(stacked, 5)
    assert names == []


@pytest.mark.slow
def test_members_over_four_devices(assert_same):
    mesh = jax.make_mesh((4,), ("members",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("members"))
    local = {"w": jnp.arange(16.0).reshape(8, 2), "k": jax.random.split(jax.random.key(0), 8)}
    spread = jax.device_put(local, sharding)
    assert_same(tree.unstack(spread), tree.unstack(local))
    assert_same(tree.take(spread, -2), tree.take(local, -2))
    assert_same(tree.take(spread, [5, 1]), tree.take(local, [5, 1]))
    replaced = tree.replace(spread, 0, tree.take(spread, 3))
    assert_same(replaced, tree.replace(local, 0, tree.take(local, 3)))
    assert replaced["w"].sharding == sharding
    assert tree.concatenate([spread, spread])["w"].sharding == sharding
    assert_same(tree.stack(tree.unstack(spread)), local)


@pytest.mark.slow
def test_gradients_flow_through():
    models = [eqx.nn.Linear(2, 2, key=key) for key in _keys(2)]

    @eqx.filter_grad
    def gradient(models):
        stacked = tree.replace(tree.stack(models), 0, models[1])
        return sum(jnp.sum((i + 1) * model.weight) for i, model in enumerate(tree.unstack(stacked)))

    first, second = gradient(models)
    assert first.weight.tolist() == [[0, 0]] * 2
    assert second.weight.tolist() == [[3, 3]] * 2
