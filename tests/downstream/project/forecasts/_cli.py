import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import forecasts


def main(arguments: Sequence[str] | None = None) -> int:
    """`forecasts train FOLDER` trains and saves, `forecasts judge FOLDER` loads and prints scores."""
    parser = argparse.ArgumentParser(prog="forecasts")
    parser.add_argument("command", choices=["train", "judge"])
    parser.add_argument("folder")
    parser.add_argument("--length", type=int, default=60)
    options = parser.parse_args(arguments)
    series = jnp.asarray(forecasts.make_series(options.length))
    if options.command == "train":
        forecaster, run = forecasts.train(series, key=jax.random.key(0))
        forecasts.save(options.folder, forecaster)
        print(run)
    else:
        for name, value in forecasts.judge(forecasts.load(options.folder), series).items():
            print(f"{name} {value:.6f}")
    return 0
