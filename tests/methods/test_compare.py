"""`compare` equals a loop by hand, bit for bit; what a folder holds is not computed again."""

import functools as ft
import logging
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from unittest import mock

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import Bootstraps, Seeds, compare
from eqx_ensemble.methods._comparison import Row

KEY = jax.random.key(0)
X = np.asarray(jax.random.normal(KEY, (18, 3)))
Y = X[:, 0] * X[:, 1]
FOLDS = ee.resample.folds(18, 3, key=KEY)
SGD = optax.sgd(0.1)
SCORES = {"rmse": ee.scores.rmse, "fair": ft.partial(ee.scores.crps, estimator="fair")}
METHODS = {"seeds": Seeds(2), "bagging": Bootstraps(2)}
OPTIONS = {"loss": "regression", "optimiser": SGD, "batch_size": 6, "key": KEY}


def make(key):
    return eqx.nn.MLP(3, "scalar", 4, 1, key=key)


def call(methods=METHODS, scores=SCORES, make=make, **options):
    length = {} if {"epochs", "budget"} & options.keys() else {"epochs": 2}
    held_out = {} if "test" in options else {"folds": FOLDS}
    return compare(methods, make, (X, Y), scores, **OPTIONS | length | held_out | options)


class Failing(ee.methods.AbstractMethod):
    """Logs its calls, and fails."""

    error: type

    def fit(self, make, loss, optimiser, data, *, key, **options):
        logging.warning(self.error.__name__)
        raise self.error("too large\nin detail") if self.error is ValueError else self.error("all diverged", None)


def without_seconds(comparison):
    return [row._replace(seconds=0.0) for row in comparison.rows]


@ft.cache
def by_hand(seeds):
    """All scores by three loops."""
    rows = []
    for name, method in METHODS.items():
        for seed in range(seeds):
            for fold in range(3):
                key, of_prediction = jax.random.split(jax.random.fold_in(jax.random.fold_in(KEY, seed), fold))
                train, test = FOLDS.train[fold], FOLDS.test[fold]
                data, options = (X[train], Y[train]), {"epochs": 2, "batch_size": 6, "key": key}
                posterior = method.fit(make, "regression", SGD, data, **options)
                found = posterior.predict(X[test], key=of_prediction)
                scores = {score: float(fn(found, Y[test])) for score, fn in SCORES.items()}
                rows.append(Row(name, fold, seed, scores, 0.0, ""))
    return rows


@pytest.fixture(scope="module")
def found():
    return call(seeds=2)


def test_the_loops_by_hand(found):
    assert without_seconds(found) == by_hand(2)
    table = found.table()
    assert list(table) == ["method", "fold", "seed", "rmse", "fair", "seconds", "error"]
    np.testing.assert_array_equal(table["fair"], [row.scores["fair"] for row in by_hand(2)])
    assert found.table(as_frame=True).groupby("method")["rmse"].mean()["bagging"] == np.mean(table["rmse"][6:])


def test_paired_differences_are_those_of_numpy(found):
    table, summary = found.table(), found.summary("bagging")
    gaps = table["fair"][:6] - table["fair"][6:]
    np.testing.assert_allclose(summary["fair"], [table["fair"][:6].mean(), table["fair"][6:].mean()])
    np.testing.assert_allclose(summary["fair_difference"], [gaps.mean(), 0])
    corrected = np.sqrt((1 / 6 + 6 / 12) * gaps.var(ddof=1))  # 6 test and 12 training rows
    np.testing.assert_allclose(summary["fair_difference_error"], [corrected, 0])
    plain = found.summary("bagging", corrected=False)
    np.testing.assert_allclose(plain["fair_difference_error"][0], gaps.std(ddof=1) / np.sqrt(6))
    np.testing.assert_allclose(plain["rmse_error"][0], table["rmse"][:6].std(ddof=1) / np.sqrt(6))
    np.testing.assert_array_equal(summary["fits"], [6, 6])


def test_it_prints_a_table(found):
    lines = repr(found).splitlines()
    assert lines[0] == "Comparison of 2 methods, 6 fits each"
    assert lines[1].split()[:4] == ["method", "rmse", "rmse", "-"]
    assert lines[2].startswith("seeds    ")
    assert "0 ± 0" in lines[2]
    assert repr(found) in found._repr_html_().replace("&#x27;", "'")


def test_one_split():
    test = X[:5] + 1, Y[:5]
    found = call(test=test, epochs=2)
    key, of_prediction = jax.random.split(jax.random.fold_in(jax.random.fold_in(KEY, 0), 0))
    posterior = Seeds(2).fit(make, "regression", SGD, (X, Y), epochs=2, batch_size=6, key=key)
    assert found.rows[0].scores["rmse"] == float(ee.scores.rmse(posterior.predict(test[0], key=of_prediction), test[1]))
    assert found.ratio == 0
    assert np.isnan(found.summary()["rmse_error"][0])


def test_threads(found):
    with ThreadPoolExecutor(2) as executor:
        assert without_seconds(call(seeds=2, executor=executor)) == without_seconds(found)


class TestFolder:
    def test_only_what_is_missing_is_computed(self, found, tmp_path):
        call(folder=tmp_path)
        files = sorted(tmp_path.glob("fit-*.eqx"))
        assert len(files) == 6
        before = {file: file.stat().st_mtime_ns for file in files}
        files[2].unlink()
        again = call(folder=tmp_path)
        assert [file for file in files if file.stat().st_mtime_ns != before.get(file)] == [files[2]]
        assert without_seconds(again) == [row for row in by_hand(2) if row.seed == 0]
        more = call(METHODS | {"again": Seeds(2)}, seeds=2, folder=tmp_path)
        assert without_seconds(more)[:12] == without_seconds(found)
        assert all(file.stat().st_mtime_ns == before[file] for file in files if file != files[2])

    def test_another_call_is_refused(self, tmp_path):
        call({"seeds": Seeds(2)}, folder=tmp_path)
        with pytest.raises(ValueError, match=r"(?s)`methods.compare` cannot resume.*`epochs`: saved 2, now 3"):
            call({"seeds": Seeds(2)}, epochs=3, folder=tmp_path)
        with pytest.raises(
            ValueError, match=r"(?s)cannot resume.*`method`: saved Seeds\(num_members=2.*, now Seeds\(num"
        ):
            call({"seeds": Seeds(3)}, folder=tmp_path)
        with pytest.raises(ValueError, match=r"(?s)cannot resume.*`make`: saved"):
            call({"seeds": Seeds(2)}, folder=tmp_path, make=lambda key: eqx.nn.MLP(3, "scalar", 5, 1, key=key))
        with pytest.raises(ValueError, match=r"(?s)cannot resume.*`optimiser`: saved"):
            call({"seeds": Seeds(2)}, folder=tmp_path, optimiser=optax.sgd(0.02))

    def test_other_scores_need_no_fit(self, found, tmp_path):
        call({"seeds": Seeds(2)}, folder=tmp_path)
        with mock.patch.object(Seeds, "fit", side_effect=AssertionError):
            again = call({"seeds": Seeds(2)}, SCORES | {"rmse": ee.scores.mae}, folder=tmp_path)
            assert without_seconds(call({"seeds": Seeds(2)}, folder=tmp_path)) == without_seconds(found)[:3]
        assert without_seconds(again) == without_seconds(call({"seeds": Seeds(2)}, SCORES | {"rmse": ee.scores.mae}))

    def test_damage_is_found(self, tmp_path):
        call({"seeds": Seeds(2)}, folder=tmp_path)
        file = next(tmp_path.glob("fit-*.eqx"))
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
        with pytest.raises(ee.CheckpointCorruptError, match="fit-"):
            call({"seeds": Seeds(2)}, folder=tmp_path)

    def test_failures(self, tmp_path, caplog):
        methods = {"seeds": Seeds(2), "diverging": Failing(ee.train.DivergedError), "broken": Failing(ValueError)}
        for count in (3, 6):  # a divergence is kept, another error is not
            found = call(methods, folder=tmp_path)
            assert caplog.messages.count("DivergedError") == 3
            assert caplog.messages.count("ValueError") == count
            table, summary = found.table(), found.summary()
            assert set(table["error"][3:6]) == {"DivergedError: all diverged"}
            assert set(table["error"][6:]) == {"ValueError: too large"}
            assert np.isnan(table["rmse"][3:]).all()
            np.testing.assert_array_equal(summary["failed"], [0, 3, 3])
            assert np.isfinite(summary["rmse"][0])
            assert repr(found).endswith("broken failed by ValueError: too large")


def test_members_that_diverge_are_a_row(found):
    class Large(Seeds):
        def fit(self, make, loss, optimiser, data, **options):
            return super().fit(make, loss, optax.sgd(1e30), data, **options)

    with pytest.warns(UserWarning, match="diverged"):
        rows = call({"seeds": Seeds(2), "large": Large(2)}).rows
    assert rows[:3] == tuple(row._replace(seconds=own.seconds) for row, own in zip(by_hand(2), rows[:3], strict=False))
    assert {row.error for row in rows[3:]} == {"DivergedError: `methods.Seeds.fit`: all 2 members diverged."}


@pytest.mark.parametrize(
    ("method", "cost"),
    [
        (Seeds(4), lambda steps: 4 * steps),
        (ee.methods.SWAG(2), lambda steps: 2 * steps),
        (ee.methods.BatchEnsemble(4, num_members=2), lambda steps: 8 * steps),
        (ee.methods.TabM(4), lambda steps: 4 * steps),
        (ee.methods.Packed(4), lambda steps: steps),
        (ee.methods.Distilled(Seeds(4), 2), lambda steps: 6 * steps),
        (ee.methods.SGLD(2, learning_rate=0.1, num_samples=3), lambda steps: 2 * (steps + 5 * 2)),  # of two epochs
        (ee.methods.SGHMC(2, learning_rate=0.1, num_samples=3, start=0, every=4), lambda steps: 2 * (steps + 12)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_budget_is_in_steps_of_one_network(method, cost, monkeypatch):
    steps = []
    monkeypatch.setattr(type(method), "fit", lambda *args, **options: steps.append(options["steps"]) or 1 / 0)
    with pytest.raises(ValueError, match="`methods.compare`: all 3 fits failed; that of .* by ZeroDivisionError"):
        call([method], budget=60)
    assert cost(steps[0]) <= 60 < cost(steps[0] + 1)
    with pytest.raises(ValueError, match=f"needs `budget` of at least {cost(1)}"):
        call([method], budget=cost(1) - 1)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    for wrong, error, text in [
        ({"methods": []}, TypeError, "needs `methods`: a dict from names, or a list"),
        ({"methods": [Seeds]}, TypeError, "needs methods, such as `methods.Seeds"),
        ({"methods": [Seeds(2), Seeds(3)]}, ValueError, "needs a dict from names to methods: some of the list are"),
        ({"scores": {}}, TypeError, "needs `scores` by name"),
        ({"scores": {"seed": ee.scores.rmse}}, ValueError, r"other names of scores .* got \['seed'\]"),
        ({"test": (X, Y), "folds": FOLDS}, TypeError, "needs either `folds`, or `test=.*; got both"),
        ({"folds": None}, TypeError, "needs either `folds`, or `test=.*; got neither"),
        ({"folds": ee.resample.folds(17, 3)}, ValueError, "needs all rows of the data of the folds"),
        ({"budget": 8, "epochs": 2}, TypeError, "needs either `epochs` or `steps` or `budget`, got both"),
        ({"rows": np.zeros((2, 3))}, TypeError, "does not take `rows`: they are of one fit"),
        ({"seeds": 0}, ValueError, "`seeds`"),
        ({"executor": ProcessPoolExecutor}, TypeError, "needs an executor that can take functions"),
        ({"test": X, "folds": None}, TypeError, r"needs `test` to be arrays `\(x, y\)`"),
        ({"folder": ""}, ValueError, "needs `folder` to be a path"),
    ]:
        with pytest.raises(error, match=f"(?s)`methods.compare` {text}|`methods.compare`.*{text}"):
            call(**wrong)
    with pytest.raises(ValueError, match="needs the name of a method as `baseline`"):
        call({"seeds": Seeds(2)}).summary("swag")
    with pytest.raises(ValueError, match="must return one number"):
        call({"seeds": Seeds(2)}, {"rows": lambda found, y: found})
