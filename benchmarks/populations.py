"""Many configurations: in one program, in a loop of fits, and one after another as Optuna proposes them."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Contender, Report, compared, interleaved, script
from _problems import Problem, middle, tiny

import eqx_ensemble as ee

RANGES = {"lr": ee.sweep.LogUniform(1e-5, 1e-1)}


def measure(quick: bool) -> Report:
    report = Report("Populations")
    for problem, epochs, rounds in ((tiny(quick=quick), 6, 5), (middle(quick=quick), 2, 3)):
        _configurations(report, problem, count=4 if quick else 64, epochs=epochs, rounds=1 if quick else rounds)
    _halving(report, tiny(quick=quick), count=4 if quick else 64, epochs=9 if quick else 81, rounds=1 if quick else 5)
    _streaming(report, middle(quick=quick), rounds=1 if quick else 5)
    return report


def optimiser(hyper: Any) -> optax.GradientTransformation:
    return optax.adam(hyper["lr"])


def _fit(problem: Problem, epochs: int, lr: Any, first: int = 0, plan: Any = None) -> ee.Run:
    """Trains the configurations from the `first` on, each as member `i` of all is."""
    places, key = slice(first, first + len(lr)), jax.random.key(0)
    build, fit = (ee.member_keys(key, places.stop, purpose=purpose)[places] for purpose in ("build", "fit"))
    ensemble = ee.build(problem.make, key=build)
    return ee.fit(
        ensemble, problem.loss, optimiser, (problem.x, problem.y), hyper={"lr": jnp.asarray(lr)}, epochs=epochs,
        batch_size=problem.batch_size, plan=plan, progress=False, key=fit,
    )  # fmt: skip


def _configurations(report: Report, problem: Problem, *, count: int, epochs: int, rounds: int) -> None:
    """One program of all, a loop of fits of one, and the same proposed by Optuna (its sampler's time included)."""
    lr, tried = np.asarray(ee.sweep.draw(RANGES, count, key=jax.random.key(1))["lr"]), min(count, 8)

    def loop() -> list[ee.Run]:
        return [_fit(problem, epochs, lr[i : i + 1], i) for i in range(tried)]

    one_by_one = ee.plan.Blocks(1)
    contenders = [
        Contender(f"{problem.name}: one program", lambda: _fit(problem, epochs, lr), count),
        Contender(f"{problem.name}: one program, Blocks(1)", lambda: _fit(problem, epochs, lr, plan=one_by_one), count),
        Contender(f"{problem.name}: loop of fits", loop, tried),
    ]
    studied = _optuna(problem, epochs, tried)
    if studied is not None:
        contenders.append(Contender(f"{problem.name}: optuna and fits", studied, tried))
    together, alone = contenders[0].run(), loop()
    apart = max(float(np.max(np.abs(together.history.loss[i] - run.history.loss[0]))) for i, run in enumerate(alone))
    report.facts[f"{problem.name}: largest difference of a loss between one program and single fits"] = f"{apart:.1e}"
    times = interleaved(contenders, rounds=rounds)
    report.timings += times.values()
    ours, sequential, fits, *optuna = times.values()
    report.rows += [
        compared(f"{problem.name}: {count} configurations, loop of fits / one program", fits, ours),
        compared(f"{problem.name}: loop of fits / one program, Blocks(1)", fits, sequential),
        compared(f"{problem.name}: optuna and fits / one program", optuna[0] if optuna else None, ours),
    ]


def _optuna(problem: Problem, epochs: int, count: int) -> Callable[[], Any] | None:
    try:
        import optuna
    except ImportError:
        return None
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        run = _fit(problem, epochs, [trial.suggest_float("lr", 1e-5, 1e-1, log=True)], trial.number)
        return float(np.nan_to_num(run.history.loss[0, -1], nan=1e9))

    return lambda: optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0)).optimize(objective, n_trials=count)


def _halving(report: Report, problem: Problem, *, count: int, epochs: int, rounds: int) -> None:
    """The time and the score reached: all members in full, and by successive halving with the same longest run."""
    hyper, half = ee.sweep.draw(RANGES, count, key=jax.random.key(1)), len(problem.x) // 2
    ensemble, key = ee.build(problem.make, count, key=jax.random.key(0)), jax.random.key(0)
    options = {
        "hyper": hyper, "validation": (problem.x[half:], problem.y[half:]), "batch_size": problem.batch_size,
        "progress": False, "key": key,
    }  # fmt: skip
    train = (ensemble, problem.loss, optimiser, (problem.x[:half], problem.y[:half]))
    full = ft.partial(ee.fit, *train, epochs=epochs, **options)
    rungs = 2 if epochs < 27 else 4  # the last of them as long as the run without
    halved = ft.partial(
        ee.methods.successive_halving, *train, epochs=epochs // 3 ** (rungs - 1), rungs=rungs, **options
    )
    for name, run in (("no halving", full()), ("halving", halved())):
        longest = run.history.loss.shape[1]
        report.facts[f"{problem.name}: best validation loss, {name}"] = f"{run.best_score.min():.5f} in {longest} steps"
    times = interleaved([Contender("no halving", full), Contender("halving", halved)], rounds=rounds)
    report.timings += times.values()
    report.rows.append(compared(f"{problem.name}: no halving / halving", times["no halving"], times["halving"]))


def _streaming(report: Report, problem: Problem, *, rounds: int) -> None:
    """Batches made on the host while the device works, compared with the same batches from a list."""
    ensemble, key = problem.ensemble(), jax.random.key(0)
    adam, rows = optax.adam(problem.learning_rate), list(next(problem.shared_rows(1)))
    ready = [(problem.x[own], problem.y[own]) for own in rows]

    class Made:
        def __iter__(self) -> Any:
            for own in rows:
                yield np.array(problem.x[own]), np.array(problem.y[own])

    def fit(batches: Any) -> ee.Run:
        return ee.fit(ensemble, problem.loss, adam, batches, epochs=2, progress=False, key=key)

    contenders = [
        Contender("batches that wait", lambda: fit(ready), 2 * len(rows)),
        Contender("batches made meanwhile", lambda: fit(Made()), 2 * len(rows)),
    ]
    times = interleaved(contenders, rounds=rounds)
    report.timings += times.values()
    waiting, made = times.values()
    report.rows.append(compared(f"{problem.name}: made meanwhile / waiting", made, waiting, target="<= 1.1"))


if __name__ == "__main__":
    script(measure)
