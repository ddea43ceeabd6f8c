"""Errors of what stacking adds: one short message that says what to write instead."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)


def linear(key):
    return eqx.nn.Linear(2, 1, key=key)


def dropout(key, p):
    return eqx.nn.Sequential([linear(key), eqx.nn.Dropout(p)])


ENSEMBLE = ee.build(linear, 3, key=KEY)
MODELS = ENSEMBLE.unstack()
X = jnp.ones((6, 2))

# What is done wrong, the error, and what its message says.
BAD = {
    "from_stacked of a list": (lambda: ee.from_stacked(MODELS), TypeError, r"`stack\(models\)`"),
    "from_stacked of one model": (lambda: ee.from_stacked(eqx.nn.MLP(2, 1, 4, 1, key=KEY)), ValueError, r"`stack\("),
    "a list to map over": (
        lambda: ee.map_members(lambda m: m(X[0]))(MODELS),
        TypeError,
        r"of models: `stack\(models\)`",
    ),
    "no members": (lambda: ee.map_members(lambda x: x)(X), TypeError, r"Mark inputs.*`Each\(x\)`"),
    "predict a list": (lambda: ee.predict(MODELS, X), TypeError, r"got `list`.\n`stack\(models\)`"),
    "predict a marked batch": (lambda: ee.predict(ENSEMBLE, ee.Batch(X)), TypeError, r"instead of `Batch\(x\)`"),
    "build of a model": (lambda: ee.build(MODELS[0], 3, key=KEY), TypeError, "got `Linear`.\nWrite `build"),
    "Each of a list": (lambda: ee.Each(MODELS), TypeError, r"list of models.\nStack .*`stack\(models\)`"),
    "Each of a number": (lambda: ee.Each(3.0), ValueError, "got no array"),
    "Each of too many": (lambda: ENSEMBLE(ee.Each(jnp.ones((4, 2)))), ee.MemberMismatchError, "got 3 and 4"),
    "too few keys": (lambda: ee.build(linear, 4, key=jax.random.split(KEY, 3)), ValueError, "num_members: 4, key: 3"),
    "too many member keys": (lambda: ee.member_keys(jax.random.split(KEY, 3), 2), ee.MemberMismatchError, r"\(2,\)"),
    "another generator": (lambda: ee.build(linear, 2, key=jax.random.key(0, impl="rbg")), TypeError, "threefry"),
    "no number of members": (lambda: ee.build(linear, key=KEY), TypeError, "how many members"),
    "counts of arguments": (
        lambda: ee.build(linear, 3, zip={"p": [0.1, 0.2]}, key=KEY),
        ValueError,
        "num_members: 3, p: 2",
    ),
    "one number by zip": (lambda: ee.build(dropout, 2, zip={"p": 0.1}, key=KEY), ValueError, "one value per member"),
    "zip and product": (
        lambda: ee.build(dropout, zip={"p": [0.1]}, product={"p": [0.1]}, key=KEY),
        TypeError,
        "not both",
    ),
    "a float of each member": (
        lambda: ee.build(dropout, zip={"p": [0.1, 0.2]}, key=KEY),
        ee.MemberMismatchError,
        r"a Python float.*layers\[1\]\.p`.\n.*`hyper`",
    ),
    "models of two sizes": (
        lambda: ee.stack([*MODELS, eqx.nn.Linear(3, 1, key=KEY)]),
        ee.MemberMismatchError,
        r"member 3 differs .*\n.*`\.weight`: expected f32\[1,2\], got f32\[1,3\]",
    ),
    "models of two rates": (
        lambda: ee.stack([eqx.nn.Dropout(0.1), eqx.nn.Dropout(0.2)]),
        ee.MemberMismatchError,
        "`promote_scalars=True`",
    ),
    "shared arrays that differ": (
        lambda: ee.stack(MODELS, shared=lambda m: m.weight),
        ee.MemberMismatchError,
        r"equal in all models.*`\.weight`",
    ),
    "ensembles that share others": (
        lambda: ee.concatenate([ee.stack([m], shared=lambda m: m.weight) for m in MODELS]),
        ee.MemberMismatchError,
        r"those at `.*weight` differ",
    ),
    "concatenate models and ensembles": (lambda: ee.concatenate([ENSEMBLE, MODELS[0]]), TypeError, "all of one kind"),
    "a member out of range": (lambda: ENSEMBLE[3], IndexError, "index 3 is out of bounds"),
    "a mask of another length": (lambda: ENSEMBLE[np.array([True, False])], IndexError, "boolean index did not match"),
    "no member": (lambda: ENSEMBLE[[]], ValueError, "at least one"),
    "a plan by name": (lambda: ee.map_members(linear, plan="vmap"), TypeError, r"`plan.Vmap\(\)`"),
    "an ensemble inside vmap": (
        lambda: eqx.filter_vmap(len)(ee.build(lambda key: eqx.nn.MLP(2, 1, 4, 1, key=key), 3, key=KEY)),
        ee.MemberMismatchError,
        r"Write `map_members\(fn\)\(ensemble, x\)`",
    ),
    "members that cannot be called": (
        lambda: ee.from_stacked({"w": jnp.ones((3, 2))})(X[0]),
        TypeError,
        "`dict`, cannot be called",
    ),
    "a mesh of other axes": (
        lambda: ee.build(linear, 4, mesh=jax.make_mesh((4,), ("x",)), key=KEY),
        TypeError,
        r"`make_mesh\(\)`",
    ),
    "weights without combine": (lambda: ee.predict(ENSEMBLE, X, weights=[1, 1, 1]), TypeError, "only with `combine`"),
}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("name", BAD)
def test_message(name):
    call, error, text = BAD[name]
    with pytest.raises(error, match=text) as caught:
        call()
    # JAX adds a note on its own frames to what is raised while tracing.
    assert len(str(caught.value).split("\n--------------------\n")[0].splitlines()) <= 4
