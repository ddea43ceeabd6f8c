"""Steps of a loop of one's own beside `eqx.filter_jit` of a vmapped step; and what a callback of `fit` costs."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from _by_hand import step_of_one
from _measure import Contender, Report, compared, interleaved, script
from _problems import Problem, tiny

import eqx_ensemble as ee


def measure(quick: bool) -> Report:
    report, problem, rounds = Report("Steps and callbacks"), tiny(quick=quick), 3 if quick else 15
    _steps(report, problem, 2 if quick else 200, rounds)
    _callbacks(report, problem, 2 if quick else 32, rounds)
    return report


def _steps(report: Report, problem: Problem, steps: int, rounds: int) -> None:
    """The same steps from the same state: after each other, and after an edit of a weight."""
    optimiser, ensemble = problem.adam, problem.ensemble()
    batch = jnp.asarray(problem.x[: problem.batch_size]), jnp.asarray(problem.y[: problem.batch_size])
    own = ee.train.make_step(problem.loss, optimiser)

    axes = (eqx.if_array(0), eqx.if_array(0), None)
    hand = eqx.filter_jit(eqx.filter_vmap(step_of_one(problem), in_axes=axes))

    def ours(state: Any) -> Any:
        state, metrics = own(state, batch)
        return state, metrics.loss

    def by_hand(state: Any) -> Any:
        *state, loss = hand(*state, batch)
        return state, loss

    def run(step: Any, state: Any, edit: Any) -> Any:
        for _ in range(steps):
            state, loss = step(edit(state))
            jax.block_until_ready(loss)
        return loss

    bias = lambda model: model.layers[0].bias
    start = ee.train.init(ensemble, optimiser, key=jax.random.key(0))
    first = ensemble.stacked, jax.vmap(optimiser.init)(eqx.filter(ensemble.stacked, eqx.is_inexact_array))
    twice = lambda x: 2 * x
    edits = {
        "last": (lambda state: state, lambda state: state),
        "edited": (
            lambda state: eqx.tree_at(lambda s: bias(s.ensemble.stacked), state, replace_fn=twice),
            lambda state: (eqx.tree_at(bias, state[0], replace_fn=twice), state[1]),
        ),
    }
    contenders = []
    for name, (edit, edit_by_hand) in edits.items():
        ways = {"make_step": (ours, start, edit), "filter_jit": (by_hand, first, edit_by_hand)}
        contenders += [Contender(f"{way}, {name} state", ft.partial(run, *of), steps) for way, of in ways.items()]
    times = interleaved(contenders, rounds=rounds)
    report.timings += times.values()
    for name, target in (("last", ">= 0.9"), ("edited", "")):
        above, below = (times[f"{way}, {name} state"] for way in ("filter_jit", "make_step"))
        report.rows.append(compared(f"step on the {name} state", above, below, target=target))


def _callbacks(report: Report, problem: Problem, epochs: int, rounds: int) -> None:
    """A callback that does nothing, after every epoch of 64 steps."""
    fits = {"no callback": problem.fit(epochs=epochs)}
    fits["a callback"] = problem.fit(epochs=epochs, callbacks=lambda state: None)
    times = interleaved([Contender(f"fit, {name}", fit, epochs) for name, fit in fits.items()], rounds=rounds)
    report.timings += times.values()
    none, some = times.values()
    report.rows.append(compared(f"a callback after each of {epochs} epochs", some, none, target="<= 1.1"))


if __name__ == "__main__":
    script(measure, cores=0)
