"""Bayesian optimisation with ensembles, a Gaussian process and random search: the page's program, with 20 seeds.

Facts are regrets by Thompson sampling, as on the page, and by batches of expected improvement; and differences from the
Gaussian process, paired by seed.
"""

import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import numpy as np
from _measure import Report, module_at, script

import eqx_ensemble as ee

PAGE = pathlib.Path(__file__).parent.parent / "notebooks" / "bayesian_optimisation.py"


def measure(quick: bool) -> Report:
    report = Report("Acquisition")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BAYESIAN_OPTIMISATION_SEEDS"] = "2" if quick else "20"
        page = module_at(pathlib.Path(shutil.copy(PAGE, folder)))  # its figure is written beside it
    for title, problem in page.PROBLEMS.items():
        own = {f"{name}, Thompson": curve for name, curve in page.curves[title].items()}
        own["random search"] = own.pop("random search, Thompson")
        for name, draws_of in page.SURROGATES.items():
            own[f"{name}, batches"] = page.regret_of(problem, page.optimise(problem, draws_of, jax.jit(_pick_batch)))
        for name, curve in own.items():
            report.facts[f"{title}: {name}, regret after {curve.shape[1]}"] = _describe(curve[:, -1])
            gap = curve[:, -1] - own["Gaussian process, Thompson"][:, -1]
            report.facts[f"{title}: {name}, minus that of the Gaussian process, Thompson"] = _describe(gap)
    return report


def _pick_batch(draws: Any, is_new: Any, best: Any, key: Any) -> Any:
    pick = lambda own, fits, best: ee.acquire.batch_expected_improvement(
        own, 4, best=best, mode="min", row_weights=fits
    )
    return jax.vmap(pick)(draws, is_new, best).indices


def _describe(values: np.ndarray) -> str:
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.3f} (standard error {error:.3f}, {len(values)} seeds)"


if __name__ == "__main__":
    script(measure, cores=0)
