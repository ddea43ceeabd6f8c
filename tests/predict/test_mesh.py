"""Predictions on meshes, against the same on one device: any number of members on any devices with any options."""

import functools as ft
import itertools

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_ensemble as ee

KEY, ROWS = jax.random.key(0), 11
MESHES = [(4, 1), (2, 2), (2, 1), (1, 2), (3, 1)]
OPTIONS = {
    "combine": [None, ee.combine.mean, ee.combine.moments],
    "batch_size": [256, 4],
    "plan": [None, ee.plan.Blocks(1), ee.plan.Blocks(2)],
    "born on it": [False, True],
    "own rows": [False, True],
}


def make(key):
    return eqx.nn.MLP(3, 2, 4, 1, key=key)


def drawn_cases(count):
    """Every number of members and every mesh, and random options: those of all pairs would be too many to compile."""
    drawn = np.random.default_rng(0)
    cells = list(itertools.product([1, 2, 3, 5, 6, 8, 10], MESHES))
    for place in drawn.permutation(len(cells))[:count]:
        members, (devices, data) = cells[place]
        yield members, devices, data, {name: values[drawn.integers(len(values))] for name, values in OPTIONS.items()}


@ft.cache
def mesh_of(devices, data):
    return ee.make_mesh(members=devices, data=data, devices=jax.devices()[: devices * data])


def assert_as_on_one_device(members, devices, data, options):
    named = {name: options[name] for name in ("combine", "batch_size", "plan")}
    mesh, alone = mesh_of(devices, data), ee.build(make, members, key=KEY)
    x = jax.random.normal(KEY, (members, ROWS, 3) if options["own rows"] else (ROWS, 3))
    x = ee.Each(x) if options["own rows"] else x
    if options["born on it"]:
        found = ee.predict(ee.build(make, members, key=KEY, mesh=mesh), x, **named)
    else:
        found = ee.predict(alone, x, mesh=mesh, **named)
    want = ee.predict(alone, x, **named | {"plan": None})
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("members", "batch_size"), [(2, 1), (6, 4)])
def test_members_that_do_not_divide_over_devices(members, batch_size):
    options = {"combine": None, "batch_size": batch_size, "plan": None, "born on it": False, "own rows": True}
    assert_as_on_one_device(members, 4, 1, options)


@pytest.mark.slow
@pytest.mark.parametrize(("members", "devices", "data", "options"), drawn_cases(9))
def test_any_members_on_any_devices(members, devices, data, options):
    assert_as_on_one_device(members, devices, data, options)
