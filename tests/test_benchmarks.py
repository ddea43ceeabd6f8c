"""Benchmarks run with their smallest sizes, and measure what they claim."""

import importlib
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats

FOLDER = pathlib.Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


@pytest.fixture
def load(monkeypatch):
    """Imports a script or a module that they share; none stays imported."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if pathlib.Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


def run_script(name, *arguments, cwd):
    command, environment = [sys.executable, FOLDER / f"{name}.py", "--quick"], os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Those that take less than half a minute with their smallest sizes. `python -m benchmarks --quick` runs all.
SHORT = ["estimators", "house", "prediction", "steps"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_script(name, tmp_path):
    printed = run_script(name, "--json", str(tmp_path / "found.json"), cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["results"]["rows"] or found["results"]["facts"]
    for row in found["results"]["rows"]:
        assert row["question"] in printed
        assert row["verdict"] == "absent" or row["ratio"] > 0 or row["target"] == "<= 0"
    assert found["environment"]["versions"]["eqx_ensemble"] in printed


@pytest.mark.slow
def test_several_scripts_in_one_table(tmp_path):
    *_, table = run_script("__main__", "stopping", "house", cwd=tmp_path).split("All questions")
    assert all(question in table for question in ("time given back", "lines of code"))


def test_every_script_can_be_imported(load):
    for name in SCRIPTS:
        assert load(name).measure.__code__.co_varnames[0] == "quick"


def test_contenders_take_turns(load):
    order, method = [], load("_measure")
    contenders = [method.Contender(name, lambda name=name: order.append(name)) for name in "ab"]
    assert method.interleaved(contenders, rounds=3)["b"].cpu.shape == (3,)
    assert order == ["a", "b"] * 5


def test_ratios_are_taken_within_a_round(load):
    method, drift = load("_measure"), np.array([1.0, 2.0, 4.0, 8.0])
    above, below = method.Timing("a", 3 * drift, drift), method.Timing("b", 1.5 * drift, drift)
    row = method.compared("q", above, below, target=">= 2")
    assert (row.low, row.ratio, row.high, row.cpu_ratio, row.ratio_of, row.verdict) == (2, 2, 2, 1, "a / b", "met")
    assert method.compared("q", above, below, target="<= 1.9").verdict == "NOT MET"
    absent = method.compared("q", None, below, target=">= 2")
    assert absent.verdict == "absent"
    assert "absent / b" in method.rows_table([absent])


def test_the_configuration_names_what_there_is(load):
    quality = load("quality")
    for config in (quality.CONFIG["quick"], quality.CONFIG):
        methods = set(itertools.chain(*config["methods"].values()))
        assert methods <= set(quality.METHODS)
        assert set(itertools.chain(*config["data"].values())) == set(config["methods"])
    assert methods == set(quality.METHODS)


def test_the_report_is_of_the_configuration(load):
    quality, paths = load("quality"), sorted((FOLDER / "results").glob("*-quality.json"))
    if not paths:
        pytest.skip("`python benchmarks/quality.py --save` has not run")
    facts = json.loads(paths[-1].read_text())["results"]["facts"]
    assert json.loads(facts["configuration"]) == {key: quality.CONFIG[key] for key in ("amount", "methods", "data")}


def test_rows_are_standardised_by_those_to_train(load):
    """Every row is a test row in one fold, and no other row moves those to train."""
    data = load("_data")
    x, y = np.random.default_rng(0).normal(size=(101, 3)), np.arange(101)
    splits = [data.Data("", x, y, 101).split(fold) for fold in range(5)]
    assert len(np.unique([split.test[1] for split in splits])) == 100
    for fold, split in enumerate(splits):
        train, validation, test = (part[1] for part in split[:3])
        assert [len(train), len(validation), len(test)] == [68, 12, 20]
        assert len(np.unique(np.concatenate([train, validation, test]))) == 100
        moved = x.copy()
        moved[np.concatenate([validation, test])] = 1e6
        np.testing.assert_array_equal(data.Data("", moved, y, 101).split(fold).train[0], split.train[0])
    months = data.Data("", x, y, 101, kind="months")._months(1)
    assert [(rows[0], rows[-1]) for rows in months] == [(60, 419), (420, 479), (480, 539)]


def test_scores_of_gaussians_and_their_errors(load):
    """Beside scipy; five folds of 20 % to test have an error by 1 / 5 + 20 / 80 instead of 1 / 5."""
    quality, task = load("quality"), load("_task")
    outputs = np.random.default_rng(0).normal(size=(1, 200, 2)).astype(np.float32)
    y = np.random.default_rng(1).normal(size=200).astype(np.float32)
    gaussian = scipy.stats.norm(outputs[0, :, 0], np.sqrt(np.logaddexp(0, outputs[0, :, 1]) + 1e-3))
    assert quality.gaussian_scores(*task.as_gaussian(outputs), y)["NLL"] == pytest.approx(-gaussian.logpdf(y).mean())
    np.testing.assert_allclose(task.row_losses(outputs[0], y), -gaussian.logpdf(y), rtol=1e-4, atol=1e-4)
    values = np.array([0.1, -0.2, 0.4, 0.3, 0.0])
    assert quality.standard_error(values, 0.25) == pytest.approx(1.5 * scipy.stats.sem(values))
