"""A constructor that needs concrete values is named, with the line and what to do, ahead of what JAX says."""

import functools as ft
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

from .factories import assert_same

KEY = jax.random.key(0)


def linear(width):
    return lambda key: eqx.nn.Linear(3, width, key=key)


def int_of_the_key(key):
    return eqx.nn.Linear(3, int(jax.random.randint(key, (), 4, 8)), key=key)


def shape_of_the_key(key):
    return eqx.nn.Linear(3, jax.random.randint(key, (), 4, 8), key=key)


def loop_of_the_key(key):
    return [eqx.nn.Linear(3, 3, key=key) for _ in range(jax.random.randint(key, (), 1, 3))]


def branch_on_the_key(key):
    scale = 1.0 if jax.random.uniform(key) > 2 else 2.0
    return eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(3, 3, key=key), replace_fn=lambda w: scale * w)


def mask_of_the_key(key):
    weight = jax.random.normal(key, (4,))
    return {"positive": jnp.sum(weight[weight > 0])}


def numpy_of_the_key(key):
    return {"weight": jnp.asarray(np.linalg.qr(jax.random.normal(key, (3, 3)))[0])}


def width_as_an_argument(key, width):
    return eqx.nn.MLP(3, 1, width, 1, key=key)


SHAPE, CHOICE, VALUE = "makes another architecture", "`jax.lax.cond`", "Use `jax.numpy`"


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize(
    ("make", "options", "fix"),
    [
        (int_of_the_key, {}, SHAPE),
        (shape_of_the_key, {}, SHAPE),
        (loop_of_the_key, {}, SHAPE),
        (branch_on_the_key, {}, CHOICE),
        (mask_of_the_key, {}, CHOICE),
        (numpy_of_the_key, {}, VALUE),
        (width_as_an_argument, {"zip": {"width": [4, 8, 8, 4]}}, SHAPE),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.filterwarnings("ignore:`build` cannot compile this constructor")
def test_our_words_come_first(make, options, fix, on_mesh):
    options = options | ({"mesh": ee.make_mesh(members=2)} if on_mesh else {})
    with pytest.raises(TypeError) as info:
        ee.build(make, 4, key=KEY, **options)
    text, cause = str(info.value), info.value.__cause__
    assert type(info.value) is TypeError
    assert cause is not None
    assert text.startswith(
        "`build` runs the constructor once for all members, so that arrays that depend on the key or on per-member "
        f"arguments have no concrete value in it; `{make.__name__}` needs one, in "
    )
    assert f"  {type(cause).__name__}: {str(cause).splitlines()[0]}\n" in text
    assert fix in text
    (line,) = re.findall(rf"{re.escape(__file__)}:(\d+)\.\n", text)
    first = make.__code__.co_firstlineno
    assert first < int(line) <= first + 3  # of the constructor, not of a library that it calls


@pytest.mark.parametrize("make", [branch_on_the_key, numpy_of_the_key])
def test_the_way_round_makes_the_members(make):
    stacked = ee.stack([make(key) for key in ee.member_keys(KEY, 4)])
    assert_same(stacked[2], make(ee.member_keys(KEY, 4)[2]))
    assert stacked.num_members == 4


def test_widths_are_fixed_outside():
    ensembles = [ee.build(ft.partial(width_as_an_argument, width=width), 2, key=KEY) for width in (4, 8)]
    assert [ensemble[0].layers[0].out_features for ensemble in ensembles] == [4, 8]


def test_a_partial_and_a_class_are_named():
    class Net(eqx.Module):
        weight: jax.Array

        def __init__(self, key, size):
            self.weight = jnp.zeros(int(size * jax.random.uniform(key)))

    with pytest.raises(TypeError, match="`Net` needs one, in "):
        ee.build(ft.partial(Net, size=3), 2, key=KEY)


def test_other_errors_are_the_users():
    def wrong(key):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="^mine"):
        ee.build(wrong, 2, key=KEY)
