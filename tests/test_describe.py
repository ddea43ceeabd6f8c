"""`describe`: every leaf once, with its shape in one member, its kind and its size."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train.compiled._selection import Selection
from eqx_ensemble.train.host._record import History

KEY = jax.random.key(0)


class Member(eqx.Module):
    linear: eqx.nn.Linear
    trunk: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    half: jax.Array
    counts: np.ndarray
    key: jax.Array
    activation: object

    def __init__(self, key, p=0.5):
        self.linear, self.trunk = eqx.nn.Linear(3, 2, key=key), eqx.nn.Linear(3, 3, key=key)
        self.norm, self.dropout = eqx.nn.BatchNorm(3, "batch", mode="batch"), eqx.nn.Dropout(p)
        self.half, self.counts = jnp.zeros((4, 2), jnp.bfloat16), np.arange(5, dtype=np.int32)
        self.key, self.activation = key, jax.nn.relu


@pytest.fixture(scope="module")
def stateful():
    make = eqx.nn.make_with_state(Member)
    zipped = {"p": jnp.asarray([0.1, 0.2, 0.3])}
    return ee.build(make, 3, zip=zipped, shared=lambda model: (model.trunk, model.counts), key=KEY)


def expected_bytes(tree):
    leaves = [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return sum((jax.random.key_data(x) if is_key(x) else x).nbytes for x in leaves)


def rows_of(description, part="model"):
    return {row.path: row for row in description.rows if row.part == part}


def test_every_leaf(stateful):
    ensemble, _ = stateful
    description = ee.describe(ensemble)
    rows = rows_of(description)
    member = ensemble[1]
    assert [*rows] == [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(member)[0]]
    for path, leaf in jax.tree_util.tree_flatten_with_path(member)[0]:
        row = rows[jax.tree_util.keystr(path)]
        if eqx.is_array(leaf):
            assert (row.shape, row.dtype) == (leaf.shape, str(leaf.dtype)), path
        else:
            assert row.shape is None or row.path == ".dropout.p", path
    kinds = {kind: {path for path, row in rows.items() if row.kind == kind} for kind in ("shared", "static")}
    assert kinds["shared"] == {".trunk.weight", ".trunk.bias", ".counts"}
    assert kinds["static"] == {".norm.axis_name", ".norm.inference", ".dropout.inference", ".activation"}
    trained = {path for path, row in rows.items() if row.trainable}
    assert trained == {".linear.weight", ".linear.bias", ".norm.weight", ".norm.bias", ".half"}
    assert description.num_trainable == 6 + 2 + 3 + 3 + 8
    assert description.bytes == expected_bytes((ensemble.stacked, ensemble.shared))
    assert rows[".half"].bytes == 3 * 8 * 2
    assert rows[".activation"].value == "relu"


@pytest.mark.parametrize("trainable", [eqx.is_inexact_array, lambda x: eqx.is_inexact_array(x) and x.ndim > 1])
def test_what_is_trained_is_what_fit_trains(stateful, trainable):
    ensemble, state = stateful
    hyper = {"lr": jnp.ones((3, 2))}
    train_state = ee.train.init(
        ensemble, lambda hyper: optax.adam(hyper["lr"][0]), state=state, hyper=hyper, trainable=trainable, key=KEY
    )
    leaves = jax.tree_util.tree_flatten_with_path(train_state.params)[0]
    for description in (ee.describe(ensemble, trainable=trainable), ee.describe(train_state)):
        trained = [path for path, row in rows_of(description).items() if row.trainable]
        assert trained == [jax.tree_util.keystr(path) for path, _ in leaves]
        assert description.num_trainable == sum(x[0].size for _, x in leaves)
    parts = {"optimiser": train_state.opt_state, "state": state, "hyper": hyper}
    for part, tree in parts.items():
        rows = rows_of(ee.describe(train_state), part)
        assert sum(row.bytes for row in rows.values()) == expected_bytes(tree)
        assert not any(row.trainable for row in rows.values())
    assert rows_of(ee.describe(train_state), "hyper")["['lr']"].shape == (2,)


def test_a_run():
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    run = ee.fit(ensemble, loss, optax.sgd(0.1), jnp.ones((4, 3)), steps=1, progress=False, key=KEY)
    assert ee.describe(run).rows == ee.describe(run.train_state).rows
    assert str(ee.describe(run)).startswith("Run of Linear\n")


def test_text():
    model = eqx.nn.Linear(3, 2, key=KEY)
    description = ee.describe(ee.stack([model, model]))
    lines = [
        "Ensemble of Linear",
        "leaf     shape   dtype    kind     trainable  bytes",
        ".weight  (2, 3)  float32  stacked  yes           48",
        ".bias    (2,)    float32  stacked  yes           16",
        "2 members, each with 8 trainable numbers; 64 bytes: 64 bytes stacked, 0 bytes shared",
    ]
    assert str(description) == repr(description) == "\n".join(lines)
    html = description._repr_html_()
    assert html.count("<tr>") == 4
    assert "<td>(2, 3)</td>" in html


def test_notebooks_show_text_as_text():
    class Odd(eqx.Module):
        weight: jax.Array
        text: str

    odd = Odd(jnp.zeros(2), "<script>")
    assert "<script>" not in ee.describe(ee.stack([odd, odd]))._repr_html_()


def test_rows_are_a_table():
    pandas = pytest.importorskip("pandas")
    description = ee.describe(ee.from_stacked(eqx.nn.Linear(3, 2, key=KEY)))
    frame = pandas.DataFrame(description.rows)
    assert [*frame.columns] == list(ee.LeafDescription._fields)
    assert frame["bytes"].sum() == description.bytes


def test_sharded_and_abstract_members():
    make = lambda key: eqx.nn.Linear(3, 2, key=key)
    ensemble = ee.build(make, 4, key=KEY)
    expected = ee.describe(ensemble).rows
    assert ee.describe(ee.build(make, 4, mesh=ee.make_mesh(members=4), key=KEY)).rows == expected
    found = []
    jax.jit(lambda arrays: found.append(ee.describe(ee.from_stacked(arrays)).rows))(ensemble.stacked)
    assert found == [expected]


@pytest.mark.parametrize("value", [eqx.nn.Linear(3, 2, key=KEY), 3, None, [1]])
def test_other_things_are_refused(value, unhooked):
    with pytest.raises(TypeError, match="`describe` needs an `Ensemble`, a `train.TrainState` or a `Run`, got"):
        ee.describe(value)


def test_trainable_of_a_training_state_is_refused(unhooked):
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 2, key=key), 2, key=KEY)
    with pytest.raises(TypeError, match="a training state knows what it trains"):
        ee.describe(ee.train.init(ensemble, optax.sgd(0.1), key=KEY), trainable=lambda x: True)


# Representations, which notebooks show


def shown():
    """What notebooks show, with many members, many rows and a model of two layers."""
    ensemble = ee.build(lambda key: eqx.nn.MLP(2, 1, 4, 1, key=key), 300, key=KEY)
    state = ee.train.init(ensemble, optax.sgd(0.1), key=KEY)
    some = eqx.tree_at(lambda state: (state.moving.status, state.step), state, (np.arange(300) % 3, np.array(2)))
    deleted = eqx.tree_at(lambda state: (state.moving.status, state.step), state, (jnp.zeros(300), jnp.zeros(())))
    jax.tree.map(lambda x: x.delete(), (deleted.status, deleted.step))
    few, steps, many, ends = jnp.ones(2), jnp.ones(2, int), jnp.ones((300, 5)), jnp.zeros((40, 2))
    yield ensemble, "Ensemble[MLP](num_members=300)"
    yield state, "TrainState[MLP](num_members=300, step=0)"
    yield some, "TrainState[MLP](num_members=300, step=2, stopped=100, diverged=100)"
    yield deleted, "TrainState[MLP](num_members=300)"
    yield History(np.ones((300, 2)), ensemble.stacked, None, np.zeros(0, int), np.array([1, 2])), "step=[1, 2]"
    yield Selection(ensemble.stacked, None, few, steps, steps, few, steps, few, few, few), "params=MLP(...)"
    yield ee.Each({"a": ensemble.stacked, "b": many}), "Each(value=dict(...))"
    yield ee.Batch(many), "Batch(value=f32[300,5])"
    yield ee.train.Metrics(few, None, jnp.zeros(2, jnp.int8)), "Metrics(loss=[1, 1], aux=None, status=[0, 0])"
    yield ee.conformal.Split(jnp.float32(0.25)), "Split(radius=0.25)"
    yield ee.conformal.Split(jnp.bfloat16(0.25)), "Split(radius=0.25)"
    yield ee.conformal.ClassConditional(jnp.ones(9), "lac"), "ClassConditional(threshold=f32[9], score='lac')"
    yield ee.uncertainty.Interval(ends, few), "Interval(lower=f32[40,2], upper=[1, 1])"


def test_representations_are_a_few_lines():
    traced = []
    for value, part in shown():
        assert part in repr(value)
        assert len(repr(value).splitlines()) <= 10
        assert max(map(len, repr(value).splitlines())) <= 100
        arrays, rest = eqx.partition(value, lambda x: isinstance(x, jax.Array) and not x.is_deleted())
        jax.eval_shape(lambda arrays, rest=rest: traced.append(repr(eqx.combine(arrays, rest))), arrays)
        assert len(traced[-1].splitlines()) <= 10
    assert "Split(radius=f32[])" in traced
