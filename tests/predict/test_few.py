"""Few rows, called again and again: one program by structure, the results and the messages of any other call."""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble._compiled import CompiledCall
from eqx_ensemble._predict import _batch
from eqx_ensemble._predict import _predict as room

from ..factories import CASES

KEY = jax.random.key(0)
MEMBERS = 3


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """The numbers of rows that programs of this test were compiled for."""
    found, own = [], _batch._predict_rows

    def counted(read, _):
        found.append(len(jax.tree.leaves(read[4])[0]))
        return own(read, _)

    monkeypatch.setattr(room, "compiled_rows", CompiledCall(counted))
    return found


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 4, 8, 1, key=key), MEMBERS, key=KEY)


def rows(count, size=3):
    return np.random.default_rng(count).normal(size=(count, size)).astype(np.float32)


@pytest.fixture
def in_batches(monkeypatch):
    """`predict` as it is for many rows."""

    def predict(*args, **options):
        with monkeypatch.context() as patched:
            patched.setattr(room, "few_rows", lambda *args, **options: None)
            return ee.predict(*args, **options)

    return predict


def assert_equal(found, want):
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def pair(model, x):
    return model(x), jnp.exp(model(x))


CHOICES = {
    "combine": [None, ee.combine.mixture, ee.combine.streaming(ee.combine.moments), lambda p, weights=None: p[0]],
    "weights": [None, np.array([0.5, 0.0, 2.0])],
    "plan": [None, ee.plan.Vmap(), ee.plan.Sequential(), ee.plan.Chunked(2), ee.plan.Unrolled()],
    "batch_size": [7, 16, 256],
    "inference": [None, True, False],
    "fn": [None, lambda model, x: 2 * model(x)],
}


def _marks(seed):
    return [] if seed < 3 else pytest.mark.slow if seed < 8 else pytest.mark.exhaustive


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=_marks(seed)) for seed in range(20)])
def test_random_options_are_the_loop_over_members(ensemble, in_batches, sizes, seed):
    """Bit for bit what batches give, and within rounding each member called by itself."""
    rng = np.random.default_rng(seed)
    options = {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
    if options["combine"] is None:
        options["weights"] = None
    for count in rng.integers(1, options["batch_size"] + 1, size=4):
        x = rows(int(count))
        x = x if rng.integers(2) else jnp.asarray(x)
        for _ in range(2):
            found = ee.predict(ensemble, x, **options)
        assert_equal(found, in_batches(ensemble, x, **options))
        scale = 2 if options["fn"] else 1
        loop = scale * np.stack([jax.vmap(member)(jnp.asarray(x)) for member in ensemble.unstack()])
        if options["combine"] is not None:
            named = {} if options["weights"] is None else {"weights": options["weights"]}
            loop = options["combine"](jnp.asarray(loop), **named)
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(loop), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    assert len(sizes) == len(set(sizes))


@pytest.mark.parametrize("case", ["mlp", "conv and batch norm", "recurrent", "tied weights", "callables"])
def test_models_of_all_kinds(in_batches, sizes, case):
    built = ee.build(CASES[case].make, 2, key=KEY)
    ensemble, state = built if isinstance(built, tuple) else (built, None)
    for count in (1, 5, 5, 8):
        x = rows(count, 25)
        assert_equal(ee.predict(ensemble, x, state=state), in_batches(ensemble, x, state=state))
    assert sizes == [1, 8]


def test_a_handful_of_programs_for_all_numbers_of_rows(ensemble, compiled):
    fn = lambda model, x: model(x) + 1
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 200):
        ee.predict(ensemble, rows(count), fn=fn)
        ee.predict(ensemble, jnp.asarray(rows(count)), fn=fn, combine=ee.combine.mean)
    on_device = [jnp.asarray(rows(count)) for count in range(1, 201)]  # which compiles itself
    with compiled() as names:
        for count, x in enumerate(on_device, start=1):
            assert ee.predict(ensemble, rows(count), fn=fn).shape == (MEMBERS, count, 4)
            assert ee.predict(ensemble, x, fn=fn, combine=ee.combine.mean).shape == (count, 4)
    assert names == []


def test_members_of_their_own_rows_keys_and_meshes_go_in_batches(ensemble, sizes):
    x = rows(5)
    dropout = ee.build(lambda key: eqx.nn.Sequential([eqx.nn.Linear(3, 3, key=key), eqx.nn.Dropout()]), 4, key=KEY)
    own = ee.Each(np.stack([x] * MEMBERS) * np.arange(MEMBERS, dtype=np.float32)[:, None, None])
    found = ee.predict(ensemble, own)
    for i, member in enumerate(ensemble.unstack()):
        np.testing.assert_allclose(found[i], jax.vmap(member)(jnp.asarray(x) * i), rtol=1e-5, atol=1e-6)
    ee.predict(dropout, x, key=KEY, inference=False)
    ee.predict(dropout, x, mesh=ee.make_mesh(members=4))
    jax.jit(lambda x: ee.predict(ensemble, x))(x)
    assert not sizes
    ee.predict(ensemble, x)
    assert sizes == [8]


def test_what_a_program_holds_is_told_apart():
    """Activations, flags, numbers by type and sign: two programs, not one."""

    class Scaled(eqx.Module):
        weight: jax.Array
        factor: object
        act: object

        def __call__(self, x):
            return self.act(self.weight * x) / self.factor

    x = np.ones((2, 1), np.float32)
    make = lambda factor, act: ee.stack([Scaled(jnp.full(1, w), factor, act) for w in (1.0, 2.0)])
    assert ee.predict(make(0.0, jnp.abs), x)[0, 0, 0] == np.inf
    assert ee.predict(make(-0.0, jnp.abs), x)[0, 0, 0] == -np.inf
    assert ee.predict(make(2.0, jnp.negative), x)[0, 0, 0] == -0.5
    assert ee.predict(make(2.0, jnp.abs), x)[0, 0, 0] == 0.5
    kind = lambda model, x: jnp.asarray(isinstance(model.factor, int))
    assert [bool(ee.predict(make(factor, jnp.abs), x, fn=kind)[0, 0]) for factor in (2.0, 2, 2.0)] == [
        False,
        True,
        False,
    ]


def test_other_arrays_of_one_structure_share_a_program(ensemble, sizes):
    other = ee.build(
        lambda key: eqx.nn.MLP(3, 4, 8, 1, activation=jax.nn.relu, key=key), MEMBERS, key=jax.random.key(5)
    )
    for some in (ensemble, other, ensemble[::-1]):
        want = np.stack([jax.vmap(member)(rows(6)) for member in some.unstack()])
        np.testing.assert_allclose(ee.predict(some, rows(6)), want, rtol=1e-5, atol=1e-6)
    assert sizes == [8]


def test_mistakes_are_found_after_good_calls(ensemble):
    combine = ee.combine.mean
    for _ in range(2):
        ee.predict(ensemble, rows(4))
        ee.predict(ensemble, rows(4), combine=combine, weights=np.ones(MEMBERS))
    with pytest.raises(TypeError) as caught:
        ee.predict(ensemble, rows(4, size=5))
    assert "here a row has shape (5,)" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match=r"expected shape \(3,\)"):
        ee.predict(ensemble, rows(4), combine=combine, weights=np.ones(2))
    with pytest.raises(TypeError, match="weights have no effect"):
        ee.predict(ensemble, rows(4), weights=np.ones(MEMBERS))
    with pytest.raises(ValueError, match=r"it gave \(\)"):
        ee.predict(ensemble, rows(4), combine=lambda p: jnp.mean(p))
    with pytest.raises(ValueError, match="of one length"):
        ee.predict(ensemble, {"a": rows(4), "b": rows(3)}, fn=lambda model, x: model(x["a"]))


@pytest.mark.usefixtures("unhooked")
def test_options_of_a_wrong_type_are_found_after_good_calls(ensemble):
    ee.predict(ensemble, rows(4), inference=True, progress=False)
    for wrong in ({"inference": 1}, {"progress": 0}, {"batch_size": 256.0}, {"plan": ee.plan.Vmap}):
        with pytest.raises((TypeError, ValueError)):
            ee.predict(ensemble, rows(4), **wrong)


def test_an_integer_that_does_not_fit_is_found_after_one_that_does():
    ensemble = ee.build(lambda key: eqx.nn.Embedding(4, 2, key=key), 2, key=KEY)
    assert ee.predict(ensemble, np.array([1, 2])).shape == (2, 2, 2)
    with pytest.raises((OverflowError, ValueError)):
        ee.predict(ensemble, np.array([1, 2**40]))


def test_an_error_of_a_member_is_equinox_error(ensemble):
    careful = lambda model, x: model(eqx.error_if(x, ~(x[0] < 1e6), "far off"))  # NaN too: rows are never padded by it
    ee.predict(ensemble, np.ones((3, 3), np.float32), fn=careful)
    with pytest.raises(RuntimeError, match="far off"):
        ee.predict(ensemble, np.full((2, 3), 1e7, np.float32), fn=careful)


def test_threads(ensemble, monkeypatch):
    monkeypatch.setattr(room, "compiled_rows", CompiledCall(_batch._predict_rows, most=2))
    fns = [lambda model, x, i=i: model(x) + i for i in range(4)]
    want = np.asarray(ee.predict(ensemble, rows(3)))
    failed = []

    def call(i):
        for _ in range(5):
            if not np.allclose(ee.predict(ensemble, rows(3), fn=fns[i]), want + i, atol=1e-5):
                failed.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
