"""Predictions and maps where the files of members are, members that functions make, and arrays that they share."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.fleet._columns import Columns, from_json, to_json
from eqx_ensemble.fleet._predict import PairwiseMerge
from eqx_ensemble.fleet._serialise import dumps

from .executors import Here
from .test_fit import ENSEMBLE, KEY, MEMBERS, OPTIMISER, SEQUENTIAL, X, Y, assert_equal, fit, mse
from .test_save import PLAIN, assert_same, save

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

WEIGHTS = np.array([1, 0, 2, 0.5, 0, 3, 1], np.float32)
median = lambda predictions, weights=None: jnp.median(predictions, axis=0)  # without a streaming form


class TestPredict:
    @pytest.mark.parametrize("shard", [None, 2, 7])
    @pytest.mark.parametrize(
        ("combine", "weights"),
        [
            (None, None),
            (ee.combine.mean, None),
            (ee.combine.mean, WEIGHTS),
            (ee.combine.moments, WEIGHTS),
            (median, None),
        ],
    )
    def test_is_that_of_the_ensemble(self, sharded_run, whole_run, combine, weights, shard):
        run, expected = sharded_run, whole_run
        options = {} if combine is None else {"combine": combine, "weights": weights}
        found = ee.fleet.predict(Here(), run, X, shard=shard, **options)
        whole = ee.predict(expected.ensemble, X, **options)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)

    def test_in_parts_only(self, sharded_run):
        """One call for each file, of which each brings home one member's worth of numbers."""
        run = sharded_run
        executor = Here()
        ee.fleet.predict(executor, run, X, combine=ee.combine.mean)
        assert len(executor.calls) == 3
        assert max(len(args[1]) for args in executor.calls) < 3_000  # paths, and no weights

    def test_inputs_of_each(self, sharded_run, whole_run):
        run, expected = sharded_run, whole_run
        x = ee.Each(np.stack([X + i for i in range(MEMBERS)]))
        found = ee.fleet.predict(Here(), run, x)
        np.testing.assert_allclose(found, ee.predict(expected.ensemble, x), rtol=2e-5, atol=1e-6)

    @pytest.mark.filterwarnings("ignore:.*diverged and keep")
    def test_diverged_members(self, tmp_path):
        rates = {"rate": jnp.array([0.1, 1e30, *[0.1] * 5])}
        options = PLAIN | {"optimiser": lambda h: optax.sgd(h["rate"]), "hyper": rates, "epochs": 1}
        run, expected = save(tmp_path / "run", options), fit(ee.fit, options)
        with pytest.warns(UserWarning, match=r"`fleet.predict` excludes 1 member\(s\) that diverged: 1"):
            found = ee.fleet.predict(Here(), run, X, combine=ee.combine.mean, weights=WEIGHTS + 1)
        with pytest.warns(UserWarning, match="excludes"):
            whole = expected.predict(X, combine=ee.combine.mean, weights=WEIGHTS + 1)
        np.testing.assert_allclose(found, whole, rtol=2e-5, atol=1e-6)

    def test_wrong(self, sharded_run, unhooked):
        run = sharded_run
        with pytest.raises(TypeError, match="leave out `state`"):
            ee.fleet.predict(Here(), run, X, state=3)
        with pytest.raises(TypeError, match="`predict` .* members are in files: pass `run.load"):
            ee.predict(run, X)
        with pytest.raises(TypeError, match="`fit` .* members are in files: pass `run.load"):
            ee.fit(run, mse, OPTIMISER, (X, Y), steps=1, key=KEY)
        with pytest.raises(TypeError, match="optimiser states are not in its files"):
            ee.fleet.fit(Here(), run, mse, OPTIMISER, (X, Y), steps=1, key=KEY)
        with pytest.raises(ValueError, match="7"):
            ee.fleet.predict(Here(), run, X, combine=ee.combine.mean, weights=[1.0, 2.0])


def test_map_members(sharded_run, whole_run):
    run, expected = sharded_run, whole_run
    norm = lambda model, power: jnp.sum(jnp.abs(model.layers[0].weight) ** power)
    powers = ee.Each(jnp.arange(1.0, MEMBERS + 1))
    executor = Here()
    found = ee.fleet.map_members(executor, norm)(run, powers)
    assert len(executor.calls) == 3
    np.testing.assert_allclose(found, ee.map_members(norm)(expected.ensemble, powers), rtol=1e-5)


def test_columns_keep_their_dtypes():
    values = [np.array([1 / 3, np.nan], dtype) for dtype in (np.float16, np.float32, np.float64)]
    values += [np.array([1, 2], np.int8), np.array([True, False]), np.asarray(jnp.array([1, 2], jnp.bfloat16))]
    ids = np.arange(2)
    for x in values:
        columns = Columns(ids, ids, ids, np.array(["", "x"]), x, None, None, {"x": x}, "max")
        found = from_json(json.loads(json.dumps(to_json(columns))))
        assert found.mode == "max"
        for back in (found.loss, found.hyper["x"]):
            assert back.dtype == x.dtype
            np.testing.assert_array_equal(back, x)


def test_merge_does_not_depend_on_the_order():
    rng, merge = np.random.default_rng(0), lambda a, b: b if a is None else f"({a}{b})"
    for count in (1, 2, 3, 7, 8, 13):
        found, waiting = set(), 0
        for order in (np.arange(count), *[rng.permutation(count) for _ in range(20)]):
            merged = PairwiseMerge(merge)
            for number in order:
                merged.add(int(number), "abcdefghijklm"[number])
                waiting = max(waiting, len(merged._waiting)) if (order == np.arange(count)).all() else waiting
            found.add(merged.result())
        assert len(found) == 1
        assert found.pop().replace("(", "").replace(")", "") == "abcdefghijklm"[:count]
        assert waiting <= np.log2(count) + 1


class TestFunctions:
    make = staticmethod(lambda ids: ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), ids=ids, key=KEY))

    def call(self, make, ids=range(MEMBERS), executor=None, **more):
        return ee.fleet.fit(
            executor or Here(), make, mse, OPTIMISER, (X, Y),
            **{"ids": ids, "batch_size": 8, "epochs": 2, "shard": 3, "plan": SEQUENTIAL, "key": KEY} | more,
        )  # fmt: skip

    def test_bits(self, tmp_path):
        expected = fit(ee.fit, PLAIN)
        assert_equal(self.call(self.make), expected)
        run = self.call(self.make, save=tmp_path / "run")
        assert_same(run.load(), expected.ensemble)
        executor = Here()
        self.call(self.make, save=tmp_path / "run", executor=executor)
        assert executor.calls == []
        with pytest.raises(ValueError, match="`ensemble`|`the members' code`"):
            self.call(lambda ids: ENSEMBLE[ids], save=tmp_path / "run")

    def test_ids(self):
        ids = [11, 5, 8, 2]
        found = self.call(self.make, ids=ids, epochs=1)
        assert found.ensemble.ids.tolist() == ids
        expected = ee.fit(
            self.make(np.array(ids)), mse, OPTIMISER, (X, Y), epochs=1, batch_size=8, plan=SEQUENTIAL, key=KEY
        )
        assert_same(found.ensemble, expected.ensemble)

    def test_states(self, tmp_path):
        class Counted(eqx.Module):
            linear: eqx.nn.Linear
            index: eqx.nn.StateIndex

            def __init__(self, key):
                self.linear = eqx.nn.Linear(3, 1, key=key)
                self.index = eqx.nn.StateIndex(jnp.zeros(()))

            def __call__(self, x, state):
                out = self.linear(x)
                return out, state.set(self.index, state.get(self.index) + out[0])

        def loss(model, state, batch, key):
            x, y = batch
            out, state = model(x[0], state)
            return jnp.mean((out - y[0]) ** 2), state

        make = lambda ids: ee.build(eqx.nn.make_with_state(Counted), ids=ids, key=KEY)
        options = {"epochs": 1, "batch_size": 8, "plan": SEQUENTIAL, "key": KEY}
        ensemble, state = make(np.arange(5))
        expected = ee.fit(ensemble, loss, OPTIMISER, (X, Y), state=state, **options)
        folder = tmp_path / "run"
        run = ee.fleet.fit(Here(), make, loss, OPTIMISER, (X, Y), ids=range(5), shard=2, save=folder, **options)
        found, its_state = run.load_with_state([4, 0, 3])
        assert_same(
            (found, its_state),
            (expected.ensemble[np.array([4, 0, 3])], ee.tree.take(expected.state, np.array([4, 0, 3]))),
        )
        np.testing.assert_allclose(
            ee.fleet.predict(Here(), run, X, combine=ee.combine.mean),
            ee.predict(expected.ensemble, X, state=expected.state, combine=ee.combine.mean), rtol=1e-5,
        )  # fmt: skip
        with pytest.raises(TypeError, match="members with a state"):
            ee.fleet.map_members(Here(), lambda model: 1.0)(run)

    @pytest.mark.parametrize(
        ("make", "ids", "error", "text"),
        [
            (make, None, TypeError, "needs `ids` with a function"),
            (make, 7, TypeError, r"Write `ids=range\(7\)`"),
            (make, [1, 1], ValueError, "different ids"),
            (make, [], ValueError, "at least one"),
            (ENSEMBLE, range(7), TypeError, "takes `ids` with a function"),
            (lambda ids: ENSEMBLE, range(9), ValueError, "the members with the requested ids"),
            (lambda ids: 3, range(9), TypeError, "a function that returns an `Ensemble`"),
        ],
    )
    def test_wrong(self, unhooked, make, ids, error, text):
        with pytest.raises(error, match=text):
            self.call(make, ids)


class Heads(eqx.Module):
    trunk: jax.Array
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(self.trunk[:3] * x)


class TestSharedArrays:
    def heads(self):
        make = lambda key: Heads(jnp.ones(100_000), eqx.nn.Linear(3, "scalar", key=key))
        return ee.build(make, 6, shared=lambda model: model.trunk, key=KEY)

    def test_travel_once(self):
        ensemble, executor = self.heads(), Sent()
        loss = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
        options = {"epochs": 1, "batch_size": 8, "plan": SEQUENTIAL, "key": KEY}
        found = ee.fleet.fit(executor, ensemble, loss, OPTIMISER, (X, Y), shard=2, **options)
        assert_equal(found, ee.fit(ensemble, loss, OPTIMISER, (X, Y), **options))
        assert isinstance(found.ensemble.shared.trunk, jax.Array)
        assert max(executor.sizes) < 100_000
        ee.fit(found, loss, OPTIMISER, (X, Y), **options)  # and it goes on
        executor = Sent()
        mean = ee.fleet.predict(executor, ensemble, X, combine=ee.combine.mean, shard=2)
        np.testing.assert_allclose(mean, ee.predict(ensemble, X, combine=ee.combine.mean), rtol=1e-5)
        sums = ee.fleet.map_members(executor, lambda model: model.trunk.sum() + model.head.weight.sum(), shard=2)(
            ensemble
        )
        assert sums.shape == (6,)
        assert max(executor.sizes) < 100_000
        assert len(dumps(ensemble)) > 400_000  # what would travel otherwise


class Sent(Here):
    """Counts the bytes of arguments and of results."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def submit(self, fn, /, *args):
        future = super().submit(fn, *args)
        self.sizes += [len(part) for part in (*args, future.result()) if isinstance(part, bytes)]
        return future


class TestReports:
    def test_each_shard(self):
        reports = []
        fit(ee.fleet.fit, PLAIN, Here(), shard=3, on_shard=reports.append)
        assert [report.number for report in reports] == [0, 1, 2]
        assert np.concatenate([report.ids for report in reports]).tolist() == list(range(MEMBERS))
        assert all(report.attempts == 1 and report.error is None and report.seconds > 0 for report in reports)
        assert [report.status for report in reports][0] == {"ok": 3, "stopped": 0, "diverged": 0}

    def test_an_error_in_it(self, unhooked):
        def wrong(report):
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            fit(ee.fleet.fit, PLAIN, Here(), shard=3, on_shard=wrong)
        with pytest.raises(TypeError, match="`on_shard`"):
            fit(ee.fleet.fit, PLAIN, Here(), shard=3, on_shard=3)

    def test_ctrl_c_in_it(self):
        """The shards that were done together with the one of the report are kept."""

        def interrupt(report):
            raise KeyboardInterrupt

        with pytest.warns(UserWarning, match="was interrupted") as seen:
            run = fit(ee.fleet.fit, PLAIN, Here(), shard=3, workers=3, on_shard=interrupt)
        assert run.interrupted
        assert run.ensemble.ids.tolist() == list(range(MEMBERS)), [str(one.message) for one in seen]

    def test_progress_counts_all_shards(self, capsys):
        options = PLAIN | {"stop": ee.train.Stopping(steps=np.array([1, 99, 1, 99, 1, 99, 1]))}
        from tqdm.std import tqdm

        lines = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tqdm, "set_postfix", lambda self, values, **more: lines.append(dict(values)))
            fit(ee.fleet.fit, options, Here(), shard=3)
        assert lines == [{"stopped": 2, "diverged": 0}, {"stopped": 3, "diverged": 0}, {"stopped": 4, "diverged": 0}]
