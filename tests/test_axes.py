"""Marks and values: every function that takes them treats them in the same way."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_ensemble as ee
from eqx_ensemble import _axes, _check

KEY = jax.random.key(0)
MEMBERS, ROWS = 3, 5  # which differ, so that an axis taken for the other one shows
SGD = optax.sgd(0.1)
ENSEMBLE = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), MEMBERS, key=KEY)
X = np.array(jax.random.normal(KEY, (MEMBERS, ROWS, 2)))
Y = np.array(jax.random.normal(jax.random.key(1), (MEMBERS, ROWS, 1)))
INDICES = np.array(jax.random.randint(KEY, (MEMBERS, 4), 0, ROWS), np.int64)


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fitted(data, **options):
    options = {"epochs": 2, "batch_size": 2, "key": KEY, "progress": False} | options
    run = ee.fit(ENSEMBLE, mse, options.pop("optimiser", SGD), data, **options)
    return run.ensemble.stacked, run.history.loss, run.history.validation


def stepped(x):
    state = ee.train.init(ENSEMBLE, SGD, key=KEY)
    return ee.train.make_step(mse, SGD)(state, (x, ee.Each(Y)))[1].loss


def of_folds(x, how):
    folds = ee.resample.folds(ROWS, MEMBERS, key=KEY)
    data = X[0], Y[0]
    if how == "cross_fit":
        return ee.methods.cross_fit(ENSEMBLE, mse, SGD, data, folds, x=x, steps=1, key=KEY).held_out
    run = ee.fit(ENSEMBLE, mse, SGD, data, rows=folds.train, steps=1, key=KEY, progress=False)
    return run.out_of_fold(x, folds)


FOUR = ee.make_mesh(members=2, data=2)

# Where a value of each member's own goes in: what it is, and what comes of it.
ENTRIES = {
    "map_members": (X, lambda x: ee.map_members(lambda x: 2 * x)(x)),
    "an ensemble's call": (X[:, 0], lambda x: ENSEMBLE(x)),
    "fit": (X, lambda x: fitted((x, ee.Each(Y)))),
    "fit, one member a call": (X, lambda x: fitted((x, ee.Each(Y)), plan=ee.plan.Sequential())),
    "fit on a mesh": (X, lambda x: fitted((x, ee.Each(Y)), mesh=FOUR)),
    "validation": (X, lambda x: fitted((X[0], Y[0]), validation=(x, ee.Each(Y)))),
    "batches": (X, lambda x: fitted([(x, ee.Each(Y))], epochs=1, batch_size=None)),
    "rows": (INDICES, lambda rows: fitted((X[0], Y[0]), rows=rows)),
    "make_step": (X, stepped),
    "predict": (X, lambda x: ee.predict(ENSEMBLE, x, batch_size=2)),
    "predict on a mesh": (X, lambda x: ee.predict(ENSEMBLE, x, mesh=FOUR)),
    "out_of_fold": (X, lambda x: of_folds(x, "out_of_fold").mean),
    "cross_fit": (X, lambda x: of_folds(x, "cross_fit").mean),
    "hyper": (
        np.full((MEMBERS, ROWS), 0.1, np.float32),
        lambda rates: fitted((X[0], Y[0]), optimiser=lambda h: optax.sgd(jnp.mean(h["rates"])), hyper={"rates": rates}),
    ),
}


@pytest.mark.filterwarnings("ignore:.*do not divide evenly")  # three members on a mesh for two
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_honours_the_axis_of_each(entry):
    """The axis of a mark only says where members are: the result is, bit for bit, that of members in front."""
    values, call = ENTRIES[entry]
    expected = call(ee.Each(values))
    got = call(ee.Each(np.moveaxis(values, 0, 1), axis=1))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


class Counter(eqx.Module):
    count: jax.Array

    def __call__(self, x):
        return x + self.count


def of_integers(model, batch, key):
    (x,) = batch
    return jnp.mean(x.astype(jnp.float32)) * jnp.sum(model.weight)


def fit_integers(x=INDICES[0], loss=of_integers, **options):
    options = {"epochs": 1, "key": KEY, "progress": False} | options
    return ee.fit(ENSEMBLE, loss, SGD, (x,), **options).stopped_at


def of_hyper(model, batch, key, hyper):
    return of_integers(model, batch, key) * hyper["n"].astype(jnp.float32)


def counters(**options):
    return ee.build(lambda key, n: Counter(n), key=KEY, **options).stacked.count


# Where integers `(members,)` or `(rows,)` go in.
INTEGERS = {
    "data": lambda n: fit_integers(n),
    "data of its own": lambda n: fit_integers(ee.Each(np.stack([n, n, n]))),
    "validation": lambda n: fit_integers(validation=(n,)),
    "batches": lambda n: ee.fit(ENSEMBLE, of_integers, SGD, [(n,)], epochs=1, key=KEY).stopped_at,
    "rows": lambda n: fit_integers(rows=np.stack([n, n, n])),
    "hyper": lambda n: fit_integers(loss=of_hyper, hyper={"n": n}),
    "hyper as a list": lambda n: fit_integers(loss=of_hyper, hyper={"n": n.tolist()}),
    "limits": lambda n: fit_integers(stop=ee.train.Stopping(steps=n + 1)),
    "steps": lambda n: fit_integers(epochs=None, steps=int(n[-1]) + 1, stop=ee.train.Stopping(steps=1)),
    "epochs": lambda n: fit_integers(epochs=int(n[-1]) + 1, stop=ee.train.Stopping(steps=1)),
    "patience": lambda n: fit_integers(patience=int(n[-1]) + 1, validation=(INDICES[0],)),
    "train.init": lambda n: ee.train.init(ENSEMBLE, lambda h: SGD, hyper={"n": n}, key=KEY).hyper,
    "make_step": lambda n: ee.train.make_step(of_integers, SGD)(ee.train.init(ENSEMBLE, SGD, key=KEY), (n,))[1],
    "zip": lambda n: counters(zip={"n": n}),
    "product": lambda n: counters(product={"n": n.tolist()}),
    "grid": lambda n: ee.sweep.grid({"n": n}),
    "ids": lambda n: ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), ids=n, key=KEY).ids,
    "stack": lambda n: ee.stack([Counter(n), Counter(n)]).stacked,
    "map_members": lambda n: ee.map_members(lambda n: n)(ee.Each(n)),
    "a batch": lambda n: ee.from_stacked(Counter(jnp.zeros(3, jnp.int32)))(ee.Batch(n)),
    "members that are counted": lambda n: ee.from_stacked(Counter(n))(1),
    "predict": lambda n: ee.predict(ENSEMBLE, n, fn=lambda model, n: n),
    "predict by members that count": lambda n: ee.predict(ee.from_stacked(Counter(n)), jnp.zeros(2, jnp.int32)),
    "tree.take": lambda n: ee.tree.take({"x": jnp.arange(3)}, n),
    "tree.replace": lambda n: ee.tree.replace({"x": jnp.arange(3)}, 1, {"x": np.array(n[2])}),
}


@pytest.mark.skipif(jax.config.read("jax_enable_x64"), reason="64-bit integers fit")
@pytest.mark.parametrize("entry", INTEGERS)
def test_integers_that_do_not_fit_are_refused(entry):
    """`2**32 + 2` is 2 in 32 bits: a member that stops at 3, a row or an id that exists, a label that is one."""
    call = INTEGERS[entry]
    call(np.array([0, 1, 2]))
    with pytest.raises((ValueError, IndexError), match=r"^`|^Member ids") as caught:
        call(np.array([0, 1, 2**32 + 2]))
    assert str(2**32 + 2) in str(caught.value) or str(2**32 + 3) in str(caught.value)


def _held(values):
    """The integers that a jax array of them holds; `None` where it is refused."""
    try:
        return np.asarray(_axes.as_array(values, path="values")).tolist()
    except ValueError as error:
        if "64 bits" not in str(error):
            raise
        return None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-(2**70), 2**70) | st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**32]), min_size=1))
def test_an_integer_stays_itself_or_is_refused(values):
    bounds = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    fit = all(bounds.min <= value <= bounds.max for value in values)
    for given_as in (values, np.array(values), [np.asarray(value)[()] for value in values]):
        if np.asarray(given_as).dtype.kind not in "iu":  # NumPy itself made floats or objects of them
            given_as = values
        assert _held(given_as) in ([values] if fit else [values, None])  # 2**63 fits where uint64 is chosen for it


def test_jax_arrays_and_small_types_are_not_looked_at(monkeypatch):
    """A check of every element would be paid for at every step."""
    monkeypatch.setattr(np, "iinfo", None)
    _check.check_integers_fit((jnp.arange(3), np.zeros(3, np.int32), np.zeros(3), "x"), argument="x")


class Weak(eqx.Module):
    """A model in bfloat16 with a parameter as users write it, which is weakly typed."""

    weight: jax.Array
    scale: jax.Array
    shift: jax.Array

    def __init__(self, key):
        self.weight = jax.random.normal(key, (1, 2), jnp.bfloat16)
        self.scale, self.shift = jnp.asarray(2.0), jnp.full(1, 0.5)

    def __call__(self, x):
        return (self.weight @ x.astype(jnp.bfloat16)) * self.scale + self.shift


def weak_leaves(tree):
    keyed = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path) for path, x in keyed if getattr(x, "weak_type", False)]


WEAK_HYPER = {"lr": jnp.full(2, 0.1), "scale": jnp.full(2, 2.0)}


def by_lr(hyper):
    return optax.sgd(hyper["lr"])


def scaled_loss(model, batch, key, hyper):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y.astype(jnp.bfloat16)) ** 2).astype(jnp.bfloat16) * hyper["scale"]


class TestWeakTypes:
    """How an array promotes does not change by a step, by saving or by loading."""

    @pytest.fixture(autouse=True)
    def standard(self):
        with jax.numpy_dtype_promotion("standard"):
            yield

    def test_ensembles_have_none(self):
        assert weak_leaves(Weak(KEY)) == [".scale", ".shift"]
        keys = jax.random.split(KEY, 2)
        assert weak_leaves(ee.build(Weak, keys=keys)) == []
        assert weak_leaves(ee.build(Weak, keys=keys, shared=lambda model: model.scale)) == []
        assert weak_leaves(ee.build(Weak, keys=keys, mesh=ee.make_mesh(members=2, data=1))) == []
        assert weak_leaves(ee.from_stacked(eqx.filter_vmap(Weak)(keys))) == []
        assert weak_leaves(ee.stack([Weak(KEY)] * 2)) == []
        assert weak_leaves(ee.stack([Weak(KEY)] * 2, shared=lambda model: model.scale)) == []

    def test_training_and_loading_change_no_dtype(self, tmp_path):
        ensemble = ee.build(Weak, 2, key=KEY)
        before = ensemble(X[0, 0])
        state = ee.train.init(ensemble, by_lr, hyper=WEAK_HYPER, key=KEY)
        assert weak_leaves(state) == []
        ee.save(tmp_path / "a", ensemble)
        loaded = ee.load(tmp_path / "a", Weak)(X[0, 0])
        assert (loaded.dtype, loaded.weak_type) == (before.dtype, before.weak_type)
        np.testing.assert_array_equal(loaded, before)

    def test_the_same_call_resumes(self, tmp_path):
        ensemble = ee.build(Weak, 2, key=KEY)
        call = lambda steps, **saving: ee.fit(
            ensemble, scaled_loss, by_lr, (X[0], Y[0]), hyper=WEAK_HYPER, steps=steps, key=KEY, **saving
        )
        call(2, checkpoint=tmp_path / "a")
        resumed, whole = call(4, checkpoint=tmp_path / "a"), call(4)
        for x, y in zip(jax.tree.leaves(resumed.ensemble), jax.tree.leaves(whole.ensemble), strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(resumed.history.loss, whole.history.loss)


class Named(eqx.Module):
    weight: jax.Array
    names: np.ndarray

    def __init__(self, key, dtype="U"):
        self.weight = jax.random.normal(key, (2,))
        self.names = np.array(["a", "b"], dtype)


@pytest.mark.parametrize("dtype", ["U", "S", "O"])
def test_arrays_that_jax_cannot_hold_are_refused_at_once(dtype):
    make = lambda key: Named(key, dtype)
    for call in (
        lambda: ee.stack([make(KEY), make(KEY)]),
        lambda: ee.build(make, 2, key=KEY),
        lambda: ee.from_stacked(make(KEY)),
    ):
        with pytest.raises(TypeError, match=r"whose arrays jax can hold; at `\.names`: a NumPy array of dtype"):
            call()


class Scale(eqx.Module):
    factor: jax.Array

    def __call__(self, x):
        return self.factor * x


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_a_batch_of_any_axis_has_its_examples_in_front(axis):
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    factors = jnp.array([1.0, 2.0])
    found = ee.from_stacked(Scale(factors))(ee.Batch(x, axis=axis))
    expected = np.stack([factor * np.moveaxis(x, axis, 0) for factor in (1.0, 2.0)])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class Graph(eqx.Module):
    """Data of one graph per member: no model, which could be called."""

    nodes: jax.Array


def test_a_list_of_data_modules_has_members():
    graphs = [Graph(jnp.ones((MEMBERS, 2))), Graph(jnp.zeros((MEMBERS, 4)))]
    shapes = ee.map_members(lambda graphs: graphs[1].nodes)(ee.Each(graphs)).shape
    assert shapes == (MEMBERS, 4)
    with pytest.raises(TypeError, match="got a list of models"):
        ee.Each([eqx.nn.Linear(MEMBERS, MEMBERS, key=KEY)])
