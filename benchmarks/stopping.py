"""Members that stop early: how much time is saved?

Members stop after numbers of epochs that are geometrically distributed, a quarter of all epochs on average. Each
counts its epochs in a weight of its own, so that its validation score stops improving at a given epoch.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Contender, Report, compared, interleaved, script
from _problems import Problem, tiny

import eqx_ensemble as ee


class Counting(eqx.Module):
    """A model that counts its steps."""

    model: eqx.nn.MLP
    steps: jax.Array


def measure(quick: bool) -> Report:
    report = Report("Stopping")
    problem, epochs = tiny(quick=quick), 4 if quick else 128
    ends = np.random.default_rng(0).geometric(4 / epochs, problem.num_members).clip(1, epochs)
    needed = (ends + 1).clip(max=epochs).mean() / epochs  # patience sees the end one epoch later
    report.facts["members' epochs needed"] = f"{needed:.2f} of all"
    fit, never = _fits(problem, epochs), np.full(problem.num_members, epochs)
    stopped_at = np.where(ends < epochs, (ends + 1) * problem.steps_per_epoch, -1)
    np.testing.assert_array_equal(fit(ends, 1).stopped_at, stopped_at)
    contenders = [
        Contender("without patience", lambda: fit(never, None)),
        Contender("no member stops", lambda: fit(never, 1)),
        Contender("geometric stops", lambda: fit(ends, 1)),
    ]
    times = interleaved(contenders, rounds=3 if quick else 7)
    report.timings += times.values()
    free, idle, stops = times.values()
    report.rows += [
        compared("time given back", free, stops, target=">= 2"),
        compared("lost when none stops", idle, free, target="<= 1.03"),
    ]
    return report


def _fits(problem: Problem, epochs: int) -> Callable[[np.ndarray, int | None], ee.Run]:
    """A fit of members that improve up to an epoch of their own, with a patience or none."""
    make = lambda key: Counting(problem.make(key), jnp.zeros(()))
    ensemble, key = ee.build(make, problem.num_members, key=jax.random.key(0)), jax.random.key(0)
    kinds = lambda tree: Counting("model", "steps")  # type: ignore[arg-type]
    optimiser = optax.partition({"model": problem.adam, "steps": optax.sgd(1.0)}, kinds)

    def loss(member: Counting, batch: Any, key: Any) -> jax.Array:
        return problem.loss(member.model, batch, key) - member.steps  # plain gradient descent adds one every step

    def score(member: Counting, batch: Any, key: Any, hyper: Any) -> jax.Array:
        value = problem.loss(member.model, batch, key)
        return jnp.where(member.steps <= hyper["end"], -member.steps, 0.0) + 0.0 * value

    validation = ee.train.Validation((problem.x[:32], problem.y[:32]), score=score, mode="min")
    options = {"epochs": epochs, "batch_size": problem.batch_size, "validation": validation, "progress": False}

    def fit(ends: np.ndarray, patience: int | None) -> ee.Run:
        hyper = {"end": ends.astype(np.float32) * problem.steps_per_epoch}
        data = problem.x, problem.y
        return ee.fit(ensemble, loss, optimiser, data, hyper=hyper, patience=patience, key=key, **options)

    return fit


if __name__ == "__main__":
    script(measure)
