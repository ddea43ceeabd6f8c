"""Steps beside those of a hand-written loop: on any state, and with a callback after every epoch.

Each contender of "step" takes the same steps; the hand-written one is `eqx.filter_jit` of a vmapped step.
"""

import functools as ft
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


def measure(quick: bool) -> Report:
    report = Report("Steps of a loop of one's own")
    problem, rounds = tiny(quick=quick), 3 if quick else 21
    _states(report, problem, rounds, quick)
    _callbacks(report, problem, rounds, quick)
    return report


def _hand_step(problem: Problem, optimiser: optax.GradientTransformation) -> Callable[..., Any]:
    @eqx.filter_jit
    @eqx.filter_vmap(in_axes=(eqx.if_array(0), eqx.if_array(0), None))
    def step(model: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(problem.loss)(model, batch, None)
        updates, opt_state = optimiser.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    return step


def _states(report: Report, problem: Problem, rounds: int, quick: bool) -> None:
    optimiser, steps = optax.adam(1e-3), 2 if quick else 200
    ensemble, hand = problem.ensemble(), _hand_step(problem, optimiser)
    models = ensemble.stacked
    batch = jnp.asarray(problem.x[: problem.batch_size]), jnp.asarray(problem.y[: problem.batch_size])
    states = [ee.train.init(ensemble, optimiser, key=jax.random.key(seed)) for seed in (0, 1)]
    start = models, jax.vmap(optimiser.init)(eqx.filter(models, eqx.is_inexact_array))
    own = ee.train.make_step(problem.loss, optimiser)

    def ours(state: Any) -> Any:
        after, metrics = own(state, batch)
        return after, jax.block_until_ready(metrics.loss)

    def by_hand(state: Any) -> Any:
        *after, loss = hand(*state, batch)
        return after, jax.block_until_ready(loss)

    bias = lambda model: model.layers[0].bias
    edits = {
        ours: lambda s: eqx.tree_at(lambda s: bias(s.ensemble.stacked), s, replace_fn=lambda x: x),
        by_hand: lambda s: (eqx.tree_at(bias, s[0], replace_fn=lambda x: x), s[1]),
    }

    def last(step: Any, first: list[Any]) -> Any:
        state = first[0]
        for _ in range(steps):
            state, _ = step(state)
        return step(state)[1]

    def in_turn(step: Any, first: list[Any]) -> Any:
        left, right = first
        for _ in range(steps // 2):
            (left, _), (right, loss) = step(left), step(right)
        return loss

    def rolled_back(step: Any, first: list[Any]) -> Any:
        for _ in range(steps):
            _, loss = step(first[0])
        return loss

    def edited(step: Any, first: list[Any]) -> Any:
        state = first[0]
        for _ in range(steps):
            state, loss = step(edits[step](state))
        return loss

    ways = {"the last state": last, "two states in turn": in_turn, "an old state": rolled_back, "an edited one": edited}
    sides = {"make_step": (ours, states), "filter_jit by hand": (by_hand, [start, start])}
    contenders = [
        Contender(f"{side}, {name}", ft.partial(way, *by), steps)
        for name, way in ways.items()
        for side, by in sides.items()
    ]
    times = interleaved(contenders, rounds=rounds)
    report.timings += times.values()
    for name in ways:
        above, below = (times[f"{side}, {name}"] for side in sides)
        report.rows.append(compared(f"step on {name}", above, below, target="<= 1.2"))


def _callbacks(report: Report, problem: Problem, rounds: int, quick: bool) -> None:
    x = np.random.default_rng(0).standard_normal((320, 3), np.float32)
    data, optimiser, size, key = (x, np.sin(x[:, 0])), optax.sgd(1e-3), 32, jax.random.key(0)
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    models, hand = ensemble.stacked, _hand_step(problem, optimiser)

    def fit(steps: int) -> Any:
        options = {"steps": steps, "batch_size": size, "callbacks": lambda state: None, "progress": False, "key": key}
        return ee.fit(ensemble, problem.loss, optimiser, data, **options).status

    def by_hand(steps: int) -> Any:
        model, opt_state, seen = models, jax.vmap(optimiser.init)(models), []
        for i in range(steps):
            rows = slice(i * size % len(x), i * size % len(x) + size)
            model, opt_state, loss = hand(model, opt_state, (data[0][rows], data[1][rows]))
            seen.append(np.asarray(loss))
        return model

    for steps in (8, 64) if quick else (250, 2_500):
        ways = {"fit": fit, "by hand": by_hand}
        runs = [Contender(f"{way}, {steps} steps", ft.partial(fn, steps), steps) for way, fn in ways.items()]
        times = interleaved(runs, rounds=min(rounds, 11))
        report.timings += times.values()
        report.rows.append(compared(f"a callback after every ten of {steps} steps", *times.values(), target="<= 5"))


if __name__ == "__main__":
    script(measure)
