"""Bayesian optimisation with ensembles, a Gaussian process and random search: the page's program, with 20 seeds.

Facts are regrets after so many evaluations, by Thompson sampling as on the page and by batches of expected improvement,
and differences from the Gaussian process, paired by seed.
"""

import importlib.util
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import numpy as np
from _measure import Report, script

import eqx_ensemble as ee

PAGE = pathlib.Path(__file__).parent.parent / "notebooks" / "bayesian_optimisation.py"
SHOWN = (12, 20, 32, 52)


def _run_page(num_seeds: int) -> Any:
    """The module of the page's program, after its run in a folder of its own."""
    os.environ["BAYESIAN_OPTIMISATION_SEEDS"] = str(num_seeds)
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(PAGE, folder)
        spec = importlib.util.spec_from_file_location("page", copy)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def _pick_batch(draws: Any, is_new: Any, best: Any, key: Any) -> Any:
    pick = lambda own, fits, best: ee.acquire.batch_expected_improvement(
        own, 4, best=best, mode="min", row_weights=fits
    )
    return jax.vmap(pick)(draws, is_new, best).indices


def _describe(values: np.ndarray) -> str:
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.3f} (standard error {error:.3f}, {len(values)} seeds)"


def measure(quick: bool) -> Report:
    report = Report("Acquisition")
    page = _run_page(2 if quick else 20)
    curves = {title: {f"{name}, Thompson": curve for name, curve in own.items()} for title, own in page.curves.items()}
    for title, problem in page.PROBLEMS.items():
        own = curves[title]
        own["random search"] = own.pop("random search, Thompson")
        for name, draws_of in page.SURROGATES.items():
            own[f"{name}, batches"] = page.regret_of(problem, page.optimise(problem, draws_of, jax.jit(_pick_batch)))
    for title, own in curves.items():
        for name, curve in own.items():
            for count in SHOWN:
                report.facts[f"{title}: {name}, regret after {count}"] = _describe(curve[:, count - 1])
            difference = curve[:, -1] - own["Gaussian process, Thompson"][:, -1]
            report.facts[f"{title}: {name}, minus that of the Gaussian process, Thompson"] = _describe(difference)
    return report


if __name__ == "__main__":
    script(measure, cores=0)
