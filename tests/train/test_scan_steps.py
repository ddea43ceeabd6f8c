"""Many steps in one compiled loop are those of a Python loop."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_same
from .test_flat_step import KEY, MEMBERS, case, mse

STEPS = 5
RNG = np.random.default_rng(1)


def batches(*, each=False, numpy=False, steps=STEPS):
    lead = (steps, MEMBERS, 8) if each else (steps, 8)
    x, y = (RNG.normal(size=(*lead, width)).astype(np.float32) for width in (3, 1))
    x, y = (x, y) if numpy else (jnp.asarray(x), jnp.asarray(y))
    return (ee.Each(x), ee.Each(y)) if each else (x, y)


def loop(step, state, rows):
    """A Python loop, and the stacked outputs."""
    outputs = []
    for i in range(jax.tree.leaves(rows)[0].shape[0]):
        state, out = step(state, jax.tree.map(lambda x: x[i], rows))  # noqa: B023 (called at once)
        outputs.append(out)
    return state, jax.tree.map(lambda *xs: jnp.stack(xs), *outputs)


def assert_close(got, expected, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not eqx.is_array(b):
            assert a is b
        elif jnp.issubdtype(b.dtype, jnp.floating):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)
        else:
            assert_same(a, b)


def equal_to_a_loop(step, state, rows, **options):
    expected = loop(step, state, rows)
    got = ee.train.scan_steps(step, state, rows, **options)
    assert_close(got, expected)
    return got


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", ["plain", "aux", "hyper", "stateful"])
def test_equal_to_a_loop(kind, each):
    loss, optimiser, state, options = case(kind)
    step = ee.train.make_step(loss, optimiser, **options)
    state, metrics = equal_to_a_loop(step, state, batches(each=each, numpy=not each))
    assert metrics.loss.shape == metrics.status.shape == (STEPS, MEMBERS)
    assert int(state.step) == STEPS
    equal_to_a_loop(step, state, batches())  # goes on


def test_one_step_and_one_more():
    loss, optimiser, state, _ = case("plain")
    step, rows = ee.train.make_step(loss, optimiser), batches(steps=2)
    parts = [jax.tree.map(lambda x: x[i : i + 1], rows) for i in range(2)]  # noqa: B023 (called at once)
    first, _ = ee.train.scan_steps(step, state, parts[0])
    assert_close(ee.train.scan_steps(step, first, parts[1])[0], ee.train.scan_steps(step, state, rows)[0])


def test_a_member_diverges_and_the_others_go_on():
    loss, optimiser, state, _ = case("plain")
    x, y = batches(each=True)
    bad = (ee.Each(x.value.at[2, 1].set(jnp.nan)), y)
    state, metrics = equal_to_a_loop(ee.train.make_step(loss, optimiser), state, bad)
    assert state.status.tolist() == [0, 2, 0]
    assert np.isnan(metrics.loss[3:, 1]).all()
    assert np.isfinite(metrics.loss[:, [0, 2]]).all()


@pytest.mark.slow
@pytest.mark.parametrize("plan", [ee.plan.Sequential(), ee.plan.Chunked(2)])
def test_plans(plan):
    loss, optimiser, state, _ = case("plain")
    rows = batches()
    expected = loop(ee.train.make_step(loss, optimiser), state, rows)
    assert_close(ee.train.scan_steps(ee.train.make_step(loss, optimiser, plan=plan), state, rows), expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"members": 2}, {"members": 2, "data": 2}, {"members": 1, "model": 2}])
def test_meshes(mesh):
    mesh = ee.make_mesh(**mesh)
    optimiser, rows = optax.adam(1e-2), batches()
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), 4, key=KEY)
    expected = loop(ee.train.make_step(mse, optimiser), ee.train.init(ensemble, optimiser, key=KEY), rows)
    state = ee.train.init(ensemble, optimiser, mesh=mesh, key=KEY)
    got, metrics = ee.train.scan_steps(ee.train.make_step(mse, optimiser, mesh=mesh), state, rows)
    assert_close((got, metrics), expected)
    for before, after in zip(jax.tree.leaves(state.params), jax.tree.leaves(got.params), strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, before.ndim)


def test_frozen_parts_and_shared_ones():
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), MEMBERS, shared=lambda m: m.layers[0], key=KEY)
    bias = lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 1
    optimiser = optax.sgd(0.1)
    state = ee.train.init(ensemble, optimiser, trainable=bias, key=KEY)
    got, _ = equal_to_a_loop(ee.train.make_step(mse, optimiser), state, batches())
    assert_same(got.fixed, state.fixed)
    assert_same(got.shared, state.shared)
    assert_same(got.ids, state.ids)


def test_donation():
    loss, optimiser, state, _ = case("stateful")
    step, rows = ee.train.make_step(loss, optimiser), batches()
    expected = loop(step, case("stateful")[2], rows)  # states of one training share their constants
    weights = jax.tree.leaves(state.params)[0]
    assert_close(ee.train.scan_steps(step, state, rows, donate=True), expected)
    assert weights.is_deleted()


def test_donation_of_an_array_that_occurs_twice():
    """A training state beside the ensemble that it began with."""
    optimiser, rows = optax.sgd(0.1), batches()
    inner = ee.train.make_step(mse, optimiser)

    def first():
        ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), MEMBERS, key=KEY)
        state = ee.train.init(ensemble, optimiser, key=KEY)
        return state, state.ensemble

    def step(both, batch):
        state, metrics = inner(both[0], batch)
        return (state, both[1]), metrics

    expected = loop(step, first(), rows)
    assert_close(ee.train.scan_steps(step, first(), rows, donate=True), expected)


def test_the_old_state_stays_without_donation():
    loss, optimiser, state, _ = case("plain")
    ee.train.scan_steps(ee.train.make_step(loss, optimiser), state, batches())
    assert not any(x.is_deleted() for x in jax.tree.leaves(eqx.filter(state, eqx.is_array)))


@pytest.mark.parametrize("donate", [False, True])
def test_inside_jit(donate):
    loss, optimiser, state, _ = case("aux")
    step, rows = ee.train.make_step(loss, optimiser, has_aux=True), batches()
    inside = eqx.filter_jit(lambda state, rows: ee.train.scan_steps(step, state, rows, donate=donate))
    assert_close(inside(state, rows), loop(step, state, rows))


def test_inside_map_members():
    """Two agents, each with an ensemble of its own."""
    optimiser, rows = optax.sgd(0.1), batches()
    step = ee.train.make_step(mse, optimiser)

    def train(key):
        ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), MEMBERS, key=key)
        state, metrics = ee.train.scan_steps(step, ee.train.init(ensemble, optimiser, key=key), rows)
        return metrics.loss, eqx.filter(state.params, eqx.is_array)

    keys = jax.random.split(KEY, 2)
    both = jax.vmap(train)(keys)
    for i in range(2):
        assert_close(jax.tree.map(lambda x: x[i], both), train(keys[i]))  # noqa: B023 (called at once)


class Agent(eqx.Module):
    """An ensemble, its slower copy, and what else a user carries along."""

    state: ee.train.TrainState
    target: ee.Ensemble
    count: jax.Array
    name: str
    rate: float


def agent():
    _, optimiser, state, _ = case("plain")
    step = ee.train.make_step(mse, optimiser)

    def one(agent, batch):
        state, metrics = step(agent.state, batch)
        target = ee.tree.polyak(agent.target, state.ensemble, agent.rate)
        new = eqx.tree_at(lambda a: (a.state, a.target, a.count), agent, (state, target, agent.count + 1))
        return new, {"loss": metrics.loss, "name": agent.name, "two": 2}

    return one, Agent(state, state.ensemble, jnp.array(0), "a", 0.1)


def test_a_step_of_your_own():
    one, first = agent()
    rows = batches()
    last, outputs = ee.train.scan_steps(one, first, rows)
    expected = first
    for i in range(STEPS):
        expected, out = one(expected, jax.tree.map(lambda x: x[i], rows))  # noqa: B023 (called at once)
        np.testing.assert_allclose(outputs["loss"][i], out["loss"], rtol=1e-5)
    assert_close(last, expected)
    assert int(last.count) == STEPS
    assert outputs["name"] == "a"
    assert outputs["two"].tolist() == [2] * STEPS


def test_steps_without_batches():
    loss, optimiser, state, _ = case("plain")
    step, rows = ee.train.make_step(loss, optimiser), jax.tree.map(lambda x: x[0], batches())
    full = lambda state, _: step(state, rows)
    repeated = jax.tree.map(lambda x: jnp.stack([x] * STEPS), rows)
    assert_close(ee.train.scan_steps(full, state, length=STEPS), loop(step, state, repeated))


def test_it_compiles_once():
    traces = []

    def counted(model, batch, key):
        traces.append(1)
        return mse(model, batch, key)

    _, optimiser, state, _ = case("plain")
    step = ee.train.make_step(counted, optimiser)
    state, _ = ee.train.scan_steps(step, state, batches())
    before = len(traces)
    state, _ = ee.train.scan_steps(step, state, batches())
    ee.train.scan_steps(ee.train.make_step(counted, optimiser), state, batches())  # an equal step
    assert len(traces) == before


def test_numbers_that_are_equal_but_of_another_type():
    """Python takes `1` and `1.0` for equal; programs of them differ."""

    def one(state, _):
        return (state[0] + 1, state[1]), jnp.ones(2) / (2 if isinstance(state[1], float) else 1)

    for constant, expected in [(1, 1.0), (1.0, 0.5)]:
        _, out = ee.train.scan_steps(one, (jnp.array(0), constant), length=1)
        assert out.tolist() == [[expected, expected]]


def test_debug_nans_stays_out_of_it():
    loss, optimiser, state, _ = case("plain")
    x, y = batches(each=True)
    bad = (ee.Each(x.value.at[0, 1].set(jnp.nan)), y)
    with jax.debug_nans(True):
        got, _ = ee.train.scan_steps(ee.train.make_step(loss, optimiser), state, bad)
    assert got.status.tolist() == [0, 2, 0]


def refuse(message, *args, error=ValueError, **options):
    with pytest.raises(error) as info:
        ee.train.scan_steps(*args, **options)
    assert str(info.value) == message


_STACK = "Stack a list of batches by `jax.tree.map(lambda *xs: jnp.stack(xs), *batches)`."
_NEEDS = "`train.scan_steps` needs "


def test_batches_that_do_not_fit():
    loss, optimiser, state, _ = case("plain")
    step, (x, y) = ee.train.make_step(loss, optimiser), batches()
    refuse(
        f"{_NEEDS}batches with one number of steps; their leading axes differ.\n"
        f"  at `batches[0]`: 5 (f32[5,8,3])\n  at `batches[1]`: 4 (f32[4,8,1])\n{_STACK}",
        step,
        state,
        (x, y[:4]),
    )
    refuse(f"{_NEEDS}at least one step; the leading axis of `batches` is 0.", step, state, (x[:0], y[:0]))
    refuse(f"{_NEEDS}`batches`, or `length` for steps without a batch; got neither.", step, state)
    arrays = "`batches` to be arrays with a leading axis of steps; "
    refuse(
        f"{_NEEDS}{arrays}`batches['rate']` is f32[].\n"
        "Repeat what is the same in every step, or let the step close over it.",
        step,
        state,
        {"rate": jnp.array(1.0), "x": x},
    )
    refuse(f"{_NEEDS}{arrays}`batches` is a generator.\n{_STACK}", step, state, (b for b in ((x, y),)), error=TypeError)
    refuse(
        f"{_NEEDS}`length` to be the number of batches; expected 5, got 3.\n"
        "Leave `length` out where there are batches.",
        step,
        state,
        (x, y),
        length=3,
    )
    with pytest.raises(ValueError, match="`train.scan_steps` needs `length` of at least 1, got 0"):
        ee.train.scan_steps(step, state, length=0)


def test_a_step_that_returns_no_pair():
    message = f"{_NEEDS}`step` to return `(state, outputs)`, got a tuple of 3.\nWithout outputs: `(state, None)`."
    refuse(message, lambda state, batch: (state, None, None), jnp.array(0), length=2, error=TypeError)


@pytest.mark.parametrize(
    ("change", "line", "fix"),
    [
        (lambda a: eqx.tree_at(lambda a: a.name, a, "b"), ".name`: expected 'a', got 'b'", "Only arrays change"),
        (lambda a: eqx.tree_at(lambda a: a.rate, a, 0.2), ".rate`: expected 0.1, got 0.2", "Only arrays change"),
        (lambda a: eqx.tree_at(lambda a: a.count, a, a.count + 0.5), ".count`: expected i32[], got f32[]", "promoted"),
        (lambda a: eqx.tree_at(lambda a: a.count, a, jnp.zeros(2, int)), ".count`: expected i32[], got i32[2]", "rese"),
        (lambda a: a.state, "<root>`: expected Agent, got TrainState", "A compiled loop carries one tree"),
    ],
)
def test_what_may_not_change(change, line, fix):
    _, first = agent()
    with pytest.raises(ee.MemberMismatchError) as info:
        ee.train.scan_steps(lambda agent, _: (change(agent), None), first, length=2)
    text = str(info.value)
    assert text.startswith(
        "`train.scan_steps` needs a step that changes only the values of arrays; the state that it returned differs "
        "from the state before.\n  at `"
    )
    assert line in text
    assert fix in text
