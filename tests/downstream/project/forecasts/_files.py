import os

import equinox as eqx
import jax
import jax.numpy as jnp

import eqx_ensemble as ee

from ._model import Cell, Forecaster


def save(path: str | os.PathLike[str], forecaster: Forecaster) -> None:
    """Writes a forecaster, with what is needed to make another of its kind."""
    shape = {
        "num_members": forecaster.ensemble.num_members,
        "hidden": forecaster.ensemble.stacked.start.shape[-1],
        "num_steps": forecaster.num_steps,
    }
    ee.save(path, forecaster, meta=shape)


def load(path: str | os.PathLike[str]) -> Forecaster:
    """Reads what `save` wrote."""
    shape = ee.contents(path).meta

    def make() -> Forecaster:
        key, count = jax.random.key(0), shape["num_members"]
        ensemble = ee.build(lambda key: Cell(shape["hidden"], key=key), count, key=key)
        return Forecaster(ensemble, jnp.zeros(count), jnp.zeros(()), jnp.ones(()), shape["num_steps"])

    return ee.load(path, eqx.filter_eval_shape(make))
