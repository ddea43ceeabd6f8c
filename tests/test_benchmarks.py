"""Every benchmark runs with its smallest sizes, and its method measures what it claims."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import scipy.stats

import eqx_ensemble as ee

FOLDER = pathlib.Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("[!_]*.py") if path.stem != "reliability")


@pytest.fixture
def method(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("_measure")
    sys.modules.pop("_measure")


def run_script(name, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "--quick", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name, tmp_path):
    printed = run_script(name, "--json", str(tmp_path / "found.json"), cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["results"]["rows"] or found["results"]["facts"]
    for row in found["results"]["rows"]:
        assert row["question"] in printed
        assert row["verdict"] == "absent" or row["ratio"] > 0 or row["target"] == "<= 0"
    assert found["environment"]["versions"]["eqx_ensemble"] in printed


@pytest.mark.slow
def test_nothing_is_lost(tmp_path):
    run_script("reliability", "--json", str(tmp_path / "found.json"), cwd=tmp_path)
    rows = json.loads((tmp_path / "found.json").read_text())["results"]["rows"]
    assert {row["question"] for row in rows} >= {"SIGKILL, fit", "SIGKILL, halving", "flipped bits", "files cut short"}
    assert all(row["verdict"] in ("met", "") for row in rows), rows


@pytest.mark.slow
def test_several_scripts_in_one_table(tmp_path):
    printed = run_script("__main__", "stopping", "imports", cwd=tmp_path)
    table = printed[printed.index("All questions") :]
    assert "time given back" in table
    assert "import eqx_ensemble" in table


def test_every_script_has_its_place():
    main = (FOLDER / "__main__.py").read_text()
    for name in [*SCRIPTS, "reliability"]:
        assert f'"{name}"' in main


def test_contenders_take_turns(method):
    order = []
    contenders = [method.Contender(name, lambda name=name: order.append(name)) for name in "ab"]
    method.interleaved(contenders, rounds=3)
    assert order == ["a", "b"] * 5


def test_ratio_is_taken_within_a_round(method):
    drift = np.array([1.0, 2.0, 4.0, 8.0])
    above, below = method.Timing("a", 3 * drift, drift), method.Timing("b", 1.5 * drift, drift)
    row = method.compared("q", above, below, target=">= 2")
    assert (row.low, row.ratio, row.high, row.cpu_ratio) == (2, 2, 2, 1)
    assert row.ratio_of == "a / b"
    assert row.verdict == "met"


def test_seconds_are_per_unit(method):
    contender = method.Contender("sleeps", lambda: time.sleep(0.02), units=4)
    timing = method.interleaved([contender], rounds=3)["sleeps"]
    assert timing.wall.min() >= 0.005
    assert timing.cpu.max() < timing.wall.min()


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(), reason="only Linux reports the peak of a part of a run"
)
def test_peak_is_what_a_call_holds_at_a_time(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    memory, megabytes = importlib.import_module("_memory"), 32
    one = lambda: np.ones(megabytes * 2**17).sum()
    for copies, run in ((1, lambda: [one(), one()]), (2, lambda: len([np.ones(megabytes * 2**17) for _ in range(2)]))):
        assert memory.peak(run) == pytest.approx(copies * megabytes * 2**20, rel=0.1)


@pytest.mark.parametrize(
    ("target", "verdict"), [(">= 2", "met"), (">= 2.1", "NOT MET"), ("<= 1.03", "NOT MET"), ("", "")]
)
def test_verdict(method, target, verdict):
    assert method.ratio_row("q", "a / b", [2.0] * 3, target=target).verdict == verdict


def test_a_missing_peer_is_reported(method):
    timing = method.Timing("fit", np.ones(3), np.ones(3))
    row = method.compared("torch", None, timing, target=">= 2")
    assert row.verdict == "absent"
    assert "absent / fit" in method.rows_table([row])


@pytest.fixture
def quality(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield importlib.import_module("quality")
    for name in {"quality", "_measure", "_members", "_methods", "_quality", "_tables"} - before:
        sys.modules.pop(name, None)


def example_table(quality, x=None):
    x = np.random.default_rng(0).normal(size=(101, 3)) if x is None else x
    return quality.Table("example", x, np.arange(101), num_classes=101)


def test_every_row_is_a_test_row_once(quality):
    data = example_table(quality)
    splits = [data.split(fold) for fold in range(5)]
    tested = np.concatenate([split.test[1] for split in splits])
    assert len(np.unique(tested)) == len(tested) == data.num_rows == 100
    for split in splits:
        parts = [part[1] for part in split[:3]]
        assert [len(part) for part in parts] == [68, 12, 20]
        assert set(np.concatenate(parts)) == set(tested)


def test_forecasts_are_of_later_months(monkeypatch):
    pytest.importorskip("statsmodels")
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    data = importlib.import_module("_series").Series()
    months, tested = data.table[1], []
    for fold in range(5):
        train, validation, test, _ = data.split(fold)
        assert [len(part[0]) for part in (train, validation, test)] == [360, 60, 60]
        to_months = lambda y, start=60 * fold: (
            y * months[start : start + 360].std() + months[start : start + 360].mean()
        )
        found = to_months(np.concatenate([train[1], validation[1], test[1]]))
        np.testing.assert_allclose(found, months[60 * fold : 60 * fold + 480], rtol=1e-5)
        tested.append(to_months(test[1]))
    np.testing.assert_allclose(np.concatenate(tested), months[420:], rtol=1e-5)
    for name in {"_series", "_tables"} - before:
        sys.modules.pop(name, None)


def test_other_rows_change_nothing_for_those_to_train(quality):
    data = example_table(quality)
    train, validation, test, _ = data.split(2)
    x = data.x.copy()
    x[np.concatenate([validation[1], test[1]])] = 1e6
    np.testing.assert_array_equal(example_table(quality, x).split(2).train[0], train[0])
    x[train[1][0]] = 1e6
    assert not np.array_equal(example_table(quality, x).split(2).train[0][1:], train[0][1:])


def test_differences_of_folds_are_corrected(quality):
    """Five folds of 20 % to test, after Nadeau and Bengio: 1 / 5 + 20 / 80 instead of 1 / 5."""
    values = np.array([0.1, -0.2, 0.4, 0.3, 0.0])
    assert quality.standard_error(values) == pytest.approx(scipy.stats.sem(values))
    assert quality.corrected_error(values) == pytest.approx(1.5 * scipy.stats.sem(values))


@pytest.mark.slow
def test_rows_of_unknown_classes_count_in_one_score(quality):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 200)
    known = 4 * (rng.random((2, 200, 3)) < 0.2) + 8 * np.eye(3)[labels]
    unknown = 0.1 * rng.normal(size=(2, 50, 3))
    alone = quality.class_scores(known, labels)
    both = quality.class_scores(np.concatenate([known, unknown], axis=1), labels)
    assert both.pop("AUROC of unknown classes") > 0.9
    assert np.isnan(alone.pop("AUROC of unknown classes"))
    assert both == pytest.approx(alone, nan_ok=True)


@pytest.mark.slow
def test_scores_and_losses_of_gaussians(quality):
    """Beside scipy: one member's scores, and the mean over rows of the loss that it was trained by."""
    members = importlib.import_module("_members")
    outputs = np.random.default_rng(0).normal(size=(1, 200, 2)).astype(np.float32)
    y = np.random.default_rng(1).normal(size=200).astype(np.float32)
    gaussian = scipy.stats.norm(outputs[0, :, 0], np.sqrt(np.logaddexp(0, outputs[0, :, 1]) + 1e-3))
    nll = -gaussian.logpdf(y)
    low, high = gaussian.interval(0.9)
    found = quality.gaussian_scores(*members.as_gaussian(outputs), y)
    assert found["NLL"] == pytest.approx(nll.mean(), rel=1e-4)
    assert found["coverage of 90%"] == pytest.approx(np.mean((low <= y) & (y <= high)))
    assert found["width"] == pytest.approx(np.mean(high - low), rel=1e-3)
    np.testing.assert_allclose(members.row_losses(outputs[0], y), nll, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_passes_without_dropout_are_predictions(quality):
    methods = importlib.import_module("_methods")
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    for rate in (0.0, 0.5):
        networks = ee.build(methods._with_dropout((3, 8, 8, 2), rate), 2, key=jax.random.key(0))
        passes = methods._passes(networks, x, 3, jax.random.key(1))
        assert passes.shape == (2, 3, 6, 2)
        apart = np.abs(passes - np.asarray(ee.predict(networks, x))[:, None]).max(axis=(1, 2, 3))
        assert (apart < 1e-6).all() if rate == 0 else (apart > 1e-2).all()
