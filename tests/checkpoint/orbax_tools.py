"""What the tests of the format of Orbax share."""

import shutil

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_ensemble as ee
from eqx_ensemble.checkpoint._read import read_manifest


def mesh(*shape):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("members", "data")[: len(shape)])


def spread(tree, over):
    """The jax arrays with their leading axis on the devices of a mesh."""
    sharding = NamedSharding(over, PartitionSpec("members"))
    return jax.tree.map(lambda x: jax.device_put(x, sharding) if isinstance(x, jax.Array) else x, tree)


def save(path, tree, **options):
    ee.save(path, tree, format="orbax", **options)


def tree(version):
    """A tree whose values show its version."""
    return {"x": np.full(4, version), "step": version}


def version_at(path):
    try:
        got = ee.load(path, tree(0))
    except FileNotFoundError:
        return None
    (version,) = {*got["x"].tolist(), got["step"]}
    return version


def replaced(path, arrays):
    """Replaces the arrays that Orbax wrote."""
    from orbax.checkpoint.experimental import v1 as ocp

    folder = path / "orbax-0001"
    names = {entry.tensor: np.ndarray for entry in read_manifest(path).entries} | {"<checksums>": np.ndarray}
    was = ocp.load(folder, names)
    shutil.rmtree(folder)
    ocp.save(folder, {name: arrays.get(name, value) for name, value in was.items()})
