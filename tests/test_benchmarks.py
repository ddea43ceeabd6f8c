"""Every benchmark runs with its smallest sizes, and its method measures what it claims."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
RELIABILITY = sorted(path.stem for path in (FOLDER / "reliability").glob("[!_]*.py"))


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
    assert found["results"]["rows"]
    for row in found["results"]["rows"]:
        assert row["question"] in printed
        assert row["verdict"] == "absent" or row["ratio"] > 0 or row["target"] == "<= 0"
    assert found["environment"]["versions"]["eqx_ensemble"] in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", RELIABILITY)
def test_nothing_is_lost(name, tmp_path):
    run_script(f"reliability/{name}", "--json", str(tmp_path / "found.json"), cwd=tmp_path)
    rows = json.loads((tmp_path / "found.json").read_text())["results"]["rows"]
    assert rows
    for row in rows:
        assert row["verdict"] in ("met", "", "absent"), row
        assert row["ratio"] or not row["question"].startswith("control"), row


@pytest.mark.slow
def test_several_scripts_in_one_table(tmp_path):
    printed = run_script("__main__", "stopping", "imports", cwd=tmp_path)
    table = printed[printed.index("All questions") :]
    assert "time given back" in table
    assert "import eqx_ensemble" in table


def test_every_script_has_its_place():
    main = (FOLDER / "__main__.py").read_text()
    for name in SCRIPTS + RELIABILITY:
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
