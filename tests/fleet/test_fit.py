"""Members trained in shards are those of one `fit`, bit for bit under `Sequential`."""

import functools as ft
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .executors import Here

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(37, 3)).astype(np.float32)  # the last batch of an epoch is smaller
Y = np.sin(X[:, 0])
MEMBERS = 7
SEQUENTIAL = ee.plan.Sequential()
ENSEMBLE = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), MEMBERS, key=KEY)
RATES = {"rate": jnp.geomspace(1e-3, 1e-1, MEMBERS)}
adam = lambda hyper: optax.adam(hyper["rate"])
OPTIMISER = optax.adam(1e-2)


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def noisy(model, batch, key):
    factor = 1 + 0.1 * jax.random.normal(key)
    return mse(model, batch, key) * factor, {"count": jnp.int32(3), "factor": factor}


def arrays(run):
    parts = run.ensemble, run.state, run.train_state, run.selection, run.history, run.status, run.stopped_at
    leaves = jax.tree.leaves(eqx.filter((*parts, run.best_step, run.best_score, run.rows), eqx.is_array))
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def assert_equal(found, expected):
    assert jax.tree.structure(found.ensemble) == jax.tree.structure(expected.ensemble)
    assert found.fault.tolist() == expected.fault.tolist()
    assert found.revived == expected.revived
    for x, y in zip(arrays(found), arrays(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


OPTIONS = {
    "plain": {"epochs": 2},
    "hyper and bootstraps": {
        "optimiser": adam, "hyper": RATES, "rows": ee.resample.bootstrap(37, MEMBERS, key=KEY), "epochs": 2,
    },
    "own data": {"data": (ee.Each(np.stack([X + i for i in range(MEMBERS)])), Y), "steps": 5},
    "patience": {
        "optimiser": adam, "hyper": RATES, "patience": 1, "epochs": 6,
        "validation": ee.train.Validation((X[:9], Y[:9]), min_delta=0.01, smooth=0.5),
    },
    "limits of members": {
        "stop": ee.train.Stopping(target=0.01, steps=np.arange(MEMBERS) + 2), "validation": (X[:9], Y[:9]), "epochs": 3,
    },
    "aux, one order": {"loss": noisy, "has_aux": True, "shuffle": "shared", "epochs": 2},
    "divergence": {"optimiser": lambda h: optax.sgd(h["rate"]), "hyper": {"rate": jnp.array([0.1, 1e30] * 3 + [0.1])},
                   "epochs": 2},
    "revival": {"optimiser": lambda h: optax.sgd(h["rate"]), "hyper": {"rate": jnp.array([0.1, 1e30] * 3 + [0.1])},
                "epochs": 2, "on_diverge": ee.train.Revive(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key))},
}  # fmt: skip


def fit(call, options, *args, **more):
    options = {"loss": mse, "optimiser": OPTIMISER, "data": (X, Y), "batch_size": 8, "key": KEY} | options | more
    positional = [options.pop(word) for word in ("loss", "optimiser", "data")]
    return call(*args, ENSEMBLE, *positional, **options)


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize("name", OPTIONS)
def test_shards_are_one_fit(name):
    expected = fit(ee.fit, OPTIONS[name], plan=SEQUENTIAL)
    found = fit(ee.fleet.fit, OPTIONS[name], Here(), shard=3, plan=SEQUENTIAL)
    assert_equal(found, expected)


NAN = np.where(X > X[5, 1], np.nan, X).astype(np.float32)


@pytest.mark.parametrize("data", [(NAN, Y), (X, Y + np.float32(np.inf))], ids=["input", "target"])
def test_a_divergence_has_the_same_likely_cause(data, tmp_path):
    texts = []
    for call in (ee.fit, ft.partial(ee.fleet.fit, Here()), ft.partial(ee.fleet.fit, Here(), save=tmp_path / "run")):
        with pytest.warns(UserWarning, match="The data are not finite, which is a likely cause: ") as caught:
            call(ENSEMBLE, mse, OPTIMISER, data, steps=8, batch_size=8, plan=SEQUENTIAL, key=KEY)
        texts += [str(warning.message) for warning in caught]
    assert len(texts) == 3
    assert len(set(texts)) == 1


@pytest.mark.parametrize("shard", [2, 4, 7, 50])
def test_any_size_of_shards(shard):
    expected = fit(ee.fit, OPTIONS["plain"], plan=SEQUENTIAL)
    assert_equal(fit(ee.fleet.fit, OPTIONS["plain"], Here(), shard=shard, plan=SEQUENTIAL), expected)


def test_under_vmap():
    """Within rounding: XLA may compile other numbers of members to other programs."""
    expected, found = fit(ee.fit, OPTIONS["plain"]), fit(ee.fleet.fit, OPTIONS["plain"], Here(), shard=2)
    for x, y in zip(arrays(found), arrays(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_a_run_goes_on():
    half = fit(ee.fit, {"epochs": 1, "validation": (X, Y)}, plan=SEQUENTIAL)
    call = lambda fit, *args, **more: fit(
        *args, half, mse, OPTIMISER, (X, Y), batch_size=8, epochs=1, validation=(X, Y), plan=SEQUENTIAL, key=KEY, **more
    )
    assert_equal(call(ee.fleet.fit, Here(), shard=2), call(ee.fit))
    joined = fit(ee.fleet.fit, {"epochs": 1, "validation": (X, Y)}, Here(), shard=3, plan=SEQUENTIAL)
    call = lambda begun: ee.fit(
        begun, mse, OPTIMISER, (X, Y), batch_size=8, epochs=1, validation=(X, Y), plan=SEQUENTIAL, key=KEY
    )
    assert_equal(call(joined), call(half))


def test_the_duration_is_that_of_all_runs():
    earlier = eqx.tree_at(lambda run: run.seconds, fit(ee.fit, {"epochs": 1}), 100.0)
    run = ee.fleet.fit(Here(), earlier, mse, OPTIMISER, (X, Y), batch_size=8, epochs=1, shard=4, key=KEY)
    assert 100 < run.seconds < 200


def test_data_made_on_the_worker():
    own = np.stack([X + i for i in range(MEMBERS)])
    expected = fit(ee.fit, {"data": (ee.Each(own), Y), "epochs": 1}, plan=SEQUENTIAL)
    make = lambda ids: (ee.Each(np.stack([X + i for i in ids])), Y)
    assert_equal(fit(ee.fleet.fit, {"data": make, "epochs": 1}, Here(), shard=3, plan=SEQUENTIAL), expected)


def test_large_arrays_travel_once():
    x = np.tile(X, (1000, 1))
    executor = Here()
    found = fit(ee.fleet.fit, {"data": (x, x[:, 0]), "steps": 2}, executor, shard=2)
    sizes = [sum(len(part) for part in args if isinstance(part, bytes)) for args in executor.calls]
    assert len(sizes) == 3
    assert max(sizes) < x.nbytes / 10
    assert found.history.loss.shape == (MEMBERS, 2)


class TestWorkersThatDie:
    def test_a_factory_begins_again(self):
        expected, made = fit(ee.fit, OPTIONS["plain"], plan=SEQUENTIAL), []

        def make():
            made.append(Here(kills=[1]))
            return made[-1]

        found = fit(ee.fleet.fit, OPTIONS["plain"], make, shard=2, plan=SEQUENTIAL)
        assert_equal(found, expected)
        assert len(made) > 1

    def test_too_often(self):
        """A shard that always kills its worker is abandoned, and takes no other with it."""
        kills = lambda: KillsOne(np.asarray(ENSEMBLE.ids)[[3, 4]])
        with pytest.warns(UserWarning, match=r"without the members 3, 4: their workers died"):
            found = fit(ee.fleet.fit, OPTIONS["plain"], kills, shard=2, retries=1, plan=SEQUENTIAL)
        assert np.asarray(found.ensemble.ids).tolist() == [0, 1, 2, 5, 6]
        expected = fit(ee.fit, OPTIONS["plain"], plan=SEQUENTIAL)
        np.testing.assert_array_equal(found.history.loss, expected.history.loss[[0, 1, 2, 5, 6]])

    def test_one_that_breaks_while_a_shard_is_submitted(self):
        executors = iter([Raises(kills=[1]), Raises(kills=[]), Raises(kills=[])])
        found = fit(ee.fleet.fit, OPTIONS["plain"], lambda: next(executors), shard=2)
        assert_equal(found, fit(ee.fleet.fit, OPTIONS["plain"], Here(), shard=2))

    def test_an_executor_that_cannot_begin_again(self):
        with pytest.warns(UserWarning, match="without the members"):
            found = fit(ee.fleet.fit, OPTIONS["plain"], Here(kills=[2]), shard=2)
        assert 0 < len(found.ensemble) < MEMBERS

    def test_a_checkpoint_goes_on(self, tmp_path):
        expected = fit(ee.fit, OPTIONS["plain"], plan=SEQUENTIAL)
        options = OPTIONS["plain"] | {"checkpoint": tmp_path, "shard": 2, "plan": SEQUENTIAL}
        with pytest.warns(UserWarning, match="without the members"):
            fit(ee.fleet.fit, options, Here(kills=[2]))
        begun = len(list(tmp_path.iterdir()))
        assert 0 < begun < 3
        assert_equal(fit(ee.fleet.fit, options, Here()), expected)
        assert len(list(tmp_path.iterdir())) == 3


class Raises(Here):
    """Refuses calls once it is broken, as a pool does."""

    def submit(self, fn, /, *args):
        future = super().submit(fn, *args)
        if self.broken:
            raise future.exception()
        return future


class KillsOne(Here):
    """Breaks on the shard of these members."""

    def __init__(self, ids):
        super().__init__()
        self.ids = ids

    def submit(self, fn, /, *args):
        from eqx_ensemble.fleet._serialise import loads

        own = loads(args[1], [None] * 9)
        self.kills = [len(self.calls)] if np.array_equal(own["ids"], self.ids) else []
        return super().submit(fn, *args)


def test_an_error_names_the_members():
    def loss(model, batch, key):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        fit(ee.fleet.fit, {"loss": loss, "epochs": 1}, Here(), shard=3)
    assert "running the members 0, 1, 2 on a worker" in "\n".join(caught.value.__notes__)


def test_an_executor_that_is_shut_down(unhooked):
    with ThreadPoolExecutor(1) as executor:
        pass
    with pytest.raises(RuntimeError, match="after shutdown") as found:
        fit(ee.fleet.fit, {"epochs": 1}, executor, shard=4)
    assert found.value.__notes__ == ["`fleet.fit` needs an executor that is open: call it inside the `with` block."]


class Odd(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, number, text):
        super().__init__(f"{number} {text}")

    def __reduce__(self):
        """As of exceptions by default, which some libraries change."""
        return Odd, self.args


def test_an_error_that_cannot_be_sent():
    def loss(model, batch, key):
        raise Odd(3, "pieces")

    with pytest.raises(RuntimeError, match=r"Odd: 3 pieces \(which cannot be serialised"):
        fit(ee.fleet.fit, {"loss": loss, "epochs": 1}, Here(), shard=3)


WRONG = {
    "no executor": (lambda: fit(ee.fleet.fit, {"epochs": 1}, 3), "needs a `concurrent.futures.Executor`, a function"),
    "one member": (lambda: fit(ee.fleet.fit, {"epochs": 1}, Here(), shard=1), "`shard` of at least 2 members"),
    "seconds": (
        lambda: fit(ee.fleet.fit, {"epochs": 1, "stop": ee.train.Stopping(seconds=3)}, Here()),
        "does not take `seconds`",
    ),
    "auto": (lambda: fit(ee.fleet.fit, {"epochs": 1, "plan": "auto"}, Here()), "does not take `plan='auto'`"),
    "raise": (lambda: fit(ee.fleet.fit, {"epochs": 1, "on_diverge": "raise"}, Here()), "other shards would still run"),
    "copies": (lambda: fit(ee.fleet.fit, {"epochs": 1, "on_diverge": "revive"}, Here()), "revivals by copies"),
    "batches": (lambda: fit(ee.fleet.fit, {"epochs": 1, "data": [(X, Y)]}, Here()), "an iterable of batches"),
    "retries": (lambda: fit(ee.fleet.fit, {"epochs": 1}, Here(), retries=-1), "`retries` of at least 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(unhooked, name):
    call, text = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=text):
        call()
