"""What a user of `forecasts` does in a day. Prints its numbers, and how the interpreter runs, as JSON."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import warnings

import forecasts
import jax
import jax.numpy as jnp
import numpy as np
from forecasts._cli import main

import eqx_ensemble as ee

HERE = pathlib.Path(__file__).parent
series = jnp.asarray(forecasts.make_series(60))
forecaster, run = forecasts.train(series, key=jax.random.key(0))
tuned = forecasts.fine_tune(forecaster, series)
windows, _ = forecasts.make_windows(series, forecaster.num_steps)
variance = forecasts.disagreement(forecaster.ensemble, jnp.full(3, 1 / 3, series.dtype), windows)

with tempfile.TemporaryDirectory() as folder:
    forecasts.save(f"{folder}/model", tuned)
    loaded = forecasts.load(f"{folder}/model")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        codes = [main([command, f"{folder}/cli"]) for command in ("train", "judge")]
if codes != [0, 0] or "crps_gaussian" not in printed.getvalue():
    sys.exit(printed.getvalue())
for old, new in zip(jax.tree.leaves(tuned), jax.tree.leaves(loaded), strict=True):
    np.testing.assert_array_equal(np.asarray(old), np.asarray(new))


def refusal(call):
    """The type and the first line of what is raised; arguments that annotations refuse are seen with the hook on."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error).partition("\n")[0]]
    return None


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    refused = {
        "annotation": refusal(lambda: forecasts.disagreement(forecaster.ensemble, jnp.full(2, 0.5), windows)),
        "stack": refusal(lambda: ee.stack([forecaster.ensemble[0], forecasts.Cell(5, key=jax.random.key(0))])),
        "weights": refusal(lambda: ee.combine.mean(jnp.ones((3, 2)), weights=jnp.array([1.0, -1.0, 1.0]))),
        "rows": refusal(lambda: forecasts.train(series, key=jax.random.key(0), batch_size=0)),
        "key": refusal(lambda: ee.member_keys(0, 3)),
        "index": refusal(lambda: forecaster.ensemble[3]),
        "epochs": refusal(lambda: forecasts.train(series, key=jax.random.key(0), epochs=None)),
        "file": refusal(lambda: ee.load(HERE, forecasts.Cell)),
    }
print(
    json.dumps(
        {
            "optimise": sys.flags.optimize,
            "docstring": forecasts.train.__doc__ is not None,
            "dtype": str(series.dtype),
            "scores": forecasts.judge(tuned, series),
            "before": forecasts.judge(forecaster, series),
            "variance": np.asarray(variance).tolist(),
            "best": np.asarray(run.best_score).tolist(),
            "late": np.asarray(forecasts.late_members(run)).tolist(),
            "table": [str(value) for value in run.table()["status"]],
            "refused": refused,
        }
    )
)
