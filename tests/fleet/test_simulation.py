"""The simulation of workers that fail, against what is known in closed form."""

import importlib
import pathlib
import sys

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulation(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("_fleet_simulation")
    sys.modules.pop("_fleet_simulation")


@pytest.mark.parametrize("interval", [30, 300, 3600])
def test_checkpoints(simulation, interval):
    """Each piece of work and save takes (exp(t / life) - 1) (life + restart) on average; the last one has no save."""
    fleet, work = simulation.Fleet(), 86_400.0
    mean = lambda seconds: np.expm1(seconds / fleet.life) * (fleet.life + fleet.restart)
    pieces = int(work // interval)
    expected = (pieces * mean(interval + fleet.save) + mean(work - pieces * interval)) / work - 1
    found = simulation.checkpoint_overhead(fleet, interval, work, seed=0, draws=2000)
    # Standard errors of 2,000 draws are below 0.0025 for the longest interval.
    assert abs(found - expected) < 0.06 * expected + 0.002
    best = simulation.young(fleet)
    assert simulation.checkpoint_overhead(fleet, best, work, seed=0) < expected + 0.002


def test_without_failures(simulation):
    """Equal workers and shards that divide evenly waste nothing; one shard too many costs a round."""
    fleet = simulation.Fleet(workers=10, life=np.inf, spread=0.0)
    policy = simulation.Policy(2, None)
    assert simulation.overhead(fleet, policy, 200, 3.0, seed=0) == pytest.approx(0, abs=1e-12)
    assert simulation.overhead(fleet, policy, 202, 3.0, seed=0) == pytest.approx(220 / 202 - 1, abs=1e-12)


def test_failures_cost_more_where_shards_are_long(simulation):
    fleet = simulation.Fleet(workers=50)
    found = [simulation.overhead(fleet, simulation.Policy(1, None), 1200, 60.0 * m, seed=0) for m in (5, 30, 120)]
    saved = simulation.overhead(fleet, simulation.Policy(1, 294), 1200, 7200.0, seed=0)
    assert found == sorted(found)
    assert saved < found[-1] / 2
