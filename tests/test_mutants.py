"""Forty faults, put into the library one at a time: `python -m tests.test_mutants` counts those that tests find.

It runs the quick tests of the files that a fault names, in a copy of the repository.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Mutant(NamedTuple):
    """A file of `eqx_ensemble`, text that it holds once, what to write instead, and the tests to run."""

    path: str
    old: str
    new: str
    tests: str


MUTANTS = [
    # Members, keys and plans.
    Mutant("_keys.py", "jax.random.fold_in(key, tag), jax.numpy.arange(n)", "key, jax.numpy.arange(n)", "test_keys.py"),
    Mutant(
        "_ensemble.py",
        "None if x is None else axis for x, axis",
        "None if x is None else 0 for x, axis",
        "test_ensemble.py",
    ),
    Mutant("_map.py", "None if is_plain else shared.get(id(x))", "None", "plan/test_map.py"),
    Mutant("plan.py", "np.minimum(np.arange(width), count - 1)", "np.maximum(np.arange(width) - 1, 0)", "plan"),
    Mutant("tree/_sum.py", "/ math.fsum(weights)", "/ len(weights)", "tree/test_sum.py"),
    Mutant("_predict.py", '{"key": jax.random.fold_in(key, row)}', '{"key": key}', "predict"),
    Mutant("_predict.py", "True if inference is None else inference", "bool(inference)", "predict"),
    # Training.
    Mutant("train/_order.py", "epoch + place // length", "epoch + 0 * place", "train/test_orders.py"),
    Mutant(
        "train/_member.py",
        "choose_trained(trains & finite, trained,",
        "choose_trained(trains, trained,",
        "train/test_fit.py",
    ),
    Mutant("train/_member.py", "jax.random.fold_in(key, step + j)", "key", "train/test_fit.py"),
    Mutant(
        "train/_member.py",
        "best=choose(better, (weights.own, state.model_state), state.best)",
        "best=state.best",
        "train/test_fit.py",
    ),
    Mutant("train/_member.py", "(waited >= (", "(waited > (", "train/test_fit.py"),
    Mutant("train/_member.py", "sign * score <= sign * target", "sign * score >= sign * target", "train/test_fit.py"),
    Mutant("train/_member.py", "rows if own_rows is None else own_rows[rows]", "rows", "train/test_fit.py"),
    Mutant(
        "train/_blocks.py",
        "all[members] = np.asarray(x)",
        "all[np.arange(len(members))] = np.asarray(x)",
        "train/test_fit.py",
    ),
    Mutant(
        "train/_loop.py",
        "if ends and self._is_due(epoch)",
        "if ends and self._is_due(epoch - 1)",
        "train/test_callbacks.py",
    ),
    Mutant(
        "train/_optimiser.py",
        "own = jax.random.fold_in(jax.random.fold_in(x, words[0]), words[1])",
        "own = x",
        "train/test_optax_census.py",
    ),
    Mutant(
        "train/_step.py", "choose_trained(trains & finite, new,", "choose_trained(trains, new,", "train/test_step.py"
    ),
    Mutant("train/_revive.py", "keys=state.keys, step=state.step", "step=state.step", "train/test_callbacks.py"),
    Mutant("_save.py", "if fields or end != whole", "if fields and end != whole", "test_save.py"),
    Mutant("_load.py", "header.starts[name] + row * size", "header.starts[name] + i * size", "test_save.py"),
    # Functions of arrays.
    Mutant(
        "_weighting.py",
        "as_column(weights, values.ndim) == 0, fill",
        "as_column(weights, values.ndim) != 0, fill",
        "combine test_boundary.py",
    ),
    Mutant("_weighting.py", "known_mean(variance, weights) + between", "known_mean(variance, weights)", "combine"),
    Mutant(
        "_boundary/_rows.py",
        "row_weights.dtype == bool else values * row_weights, 0)",
        "True else values, 0)",
        "scores",
    ),
    Mutant("scores/_distributions.py", "(samples.shape[0] - 1)", "samples.shape[0]", "scores fuzz"),
    Mutant("scores/_binning.py", "(bins.frequency - overall) ** 2", "(bins.probability - overall) ** 2", "scores fuzz"),
    Mutant(
        "uncertainty/_entropy.py", "probabilities * -jnp.where(logs", "probabilities * jnp.where(logs", "uncertainty"
    ),
    Mutant(
        "uncertainty/_variance.py",
        "moments(mean, weights)[1]",
        "moments(mean, None)[1]",
        "uncertainty test_boundary.py",
    ),
    Mutant(
        "conformal/_quantile.py",
        "fraction(level), np.arange(1, num_rows + 2)",
        "fraction(level), np.arange(num_rows + 1)",
        "conformal",
    ),
    Mutant("calibrate/_numbers.py", "mean_of_rows(of_group, row_weights)", "jnp.sum(of_group)", "calibrate fuzz"),
    Mutant("combine/_weights.py", "jnp.arange(num_steps) <= best", "jnp.arange(num_steps) < num_steps", "combine"),
    Mutant("resample.py", ".at[own].add(1)", ".at[own].set(1)", "test_resample.py"),
    Mutant("acquire/_values.py", "jnp.sqrt(beta) *", "beta *", "acquire"),
    Mutant("acquire/_information.py", "self.scores - shared", "self.scores", "acquire"),
    # Sweeps, methods and estimators.
    Mutant(
        "sweep.py",
        "math.exp(generator.uniform(math.log(self.low), math.log(self.high)))",
        "generator.uniform(self.low, self.high)",
        "test_sweep.py",
    ),
    Mutant(
        "methods/population.py", "min(len(order) - most, able.sum())", "len(order) - most", "methods/test_population.py"
    ),
    Mutant(
        "methods/heads/_regression.py",
        "jnp.where(error < 0, own - 1, own)",
        "jnp.where(error < 0, own, own - 1)",
        "methods/test_heads.py",
    ),
    Mutant("methods/adapters.py", "jax.random.fold_in(key, i), (rank", "key, (rank", "methods/test_adapters.py"),
    Mutant(
        "methods/trajectory/_record.py",
        "(within - start) % every == 0",
        "within % every == 0",
        "methods/test_trajectory.py",
    ),
    Mutant("sklearn/_base.py", "rows: Any = np.flatnonzero(weights)", "rows: Any = np.arange(len(weights))", "sklearn"),
    Mutant("sklearn/_member.py", "jnp.arange(NUM_BLOCKS) < depth", "jnp.arange(NUM_BLOCKS) <= depth", "sklearn"),
]


def test_faults_can_be_put_in():
    assert len(set(MUTANTS)) == len(MUTANTS) == 41
    for mutant in MUTANTS:
        source = (ROOT / "eqx_ensemble" / mutant.path).read_text()
        assert source.count(mutant.old) == 1, mutant
        compile(source.replace(mutant.old, mutant.new), mutant.path, "exec")
        assert all((ROOT / "tests" / path).exists() for path in mutant.tests.split())


def found_by(mutant, root, cache):
    """The first test that fails with a fault, or `None`."""
    file = root / "eqx_ensemble" / mutant.path
    source = file.read_text()
    file.write_text(source.replace(mutant.old, mutant.new))
    own = {"PYTHONPATH": str(root), "JAX_COMPILATION_CACHE_DIR": cache, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    command += [f"tests/{path}" for path in mutant.tests.split()]
    try:
        done = subprocess.run(command, cwd=root, env=os.environ | own, capture_output=True, text=True)
    finally:
        file.write_text(source)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    assert done.returncode == 0 or failed, done.stdout + done.stderr
    return failed[0].split(" ")[1] if failed else None


def main():
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "tree"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "site"))
        for number, mutant in enumerate(MUTANTS, 1):
            begun = time.monotonic()
            test = found_by(mutant, root, f"{folder}/cache")
            found += test is not None
            print(f"{number:2} {time.monotonic() - begun:4.0f} s  {mutant.path:34} {test or 'NOT FOUND'}", flush=True)
    print(f"{found} of {len(MUTANTS)} found")


if __name__ == "__main__":
    main()
