"""An exported ensemble gives, without this library, what `predict` and `combine` give with it."""

import functools as ft
import json
import os
import pathlib
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export as jax_export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_ensemble as ee

from ..factories import CASES, data

KEY = jax.random.key(3)
PAGE = (pathlib.Path(__file__).parents[2] / "docs/api/export.md").read_text()
# Compiled apart, the same operations may be fused in other ways. Of numbers of order 1, float32 keeps seven digits; in
# bfloat16, what is rounded between two operations here may not be there: a step of its rounding is 2**-8.
RTOL = {"float32": 2e-6, "bfloat16": 2**-6}
BATCHES = (1, 7, 64)
INSIDE, BESIDE = "predict(x)", "predict(leaves, x)"


def lines(mark):
    """The documented lines that load an artefact."""
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f"out = {mark}" in block]
    return block


THREE, FIVE, OTHER_THREE = slice(3), slice(5), slice(2, 5)


@ft.cache
def built(name):
    """Five members, with their state where there is one: built once for all tests."""
    made = ee.build(CASES[name].make, 5, key=KEY)
    return made if CASES[name].stateful else (made, None)


def some(name, members):
    ensemble, state = built(name)
    return ensemble[members], None if state is None else ee.tree.take(state, members)


def options(name):
    """What a model of `CASES` needs in order to be called."""
    return {"key": KEY, "inference": True} if name == "attention and dropout" else {}


def dtype_of(name):
    return "bfloat16" if name == "bfloat16" else "float32"


def exported(name, members=THREE, **rest):
    ensemble, state = some(name, members)
    shapes = jax.ShapeDtypeStruct((25,), dtype_of(name))
    return ee.export(ensemble, shapes=shapes, combine=ee.combine.mean, state=state, **options(name), **rest)


def expected(name, x, members=THREE):
    ensemble, state = some(name, members)
    prediction = ee.predict(ensemble, x.astype(dtype_of(name)), state=state, **options(name))
    return np.asarray(ee.combine.mean(prediction))


def assert_near(got, wanted, dtype="float32"):
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=RTOL[dtype], atol=RTOL[dtype] / 4)


QUICK = ("mlp", "conv and batch norm", "integers and keys", "bfloat16")
OTHERS = tuple(name for name in CASES if name not in QUICK)


@pytest.fixture(scope="module", params=[QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def served(request, tmp_path_factory):
    """What a process without this library gave, by model, number of members, and rows."""
    folder = tmp_path_factory.mktemp("served")
    jobs, places = [], {}
    for count in BATCHES:
        np.save(folder / f"x{count}.npy", data(count)[0])

    def ask(name, num_members, count, path, mark):
        out = places[name, num_members, count, mark] = folder / f"out{len(places)}.npy"
        job = {"path": str(path), "input": str(folder / f"x{count}.npy"), "output": str(out), "dtype": dtype_of(name)}
        jobs.append(job | {"code": lines(mark)})

    for name in request.param:
        path = folder / f"{name}.zip"
        exported(name).save(path)
        for count in BATCHES:
            ask(name, 3, count, path, INSIDE)
        artefact = exported(name, leaves="beside", symbolic_members=True)
        five = exported(name, FIVE, leaves="beside")  # the leaves of these, with the program of three
        for num_members, leaves in ((3, artefact.leaves), (5, five.leaves)):
            path = folder / f"{name} {num_members}.zip"
            ee.Artefact(artefact.program, leaves, artefact.about).save(path)
            ask(name, num_members, 7, path, BESIDE)

    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = pathlib.Path(__file__).with_name("jax_alone.py")
    # Isolated (-I), so that neither the folder of the script nor PYTHONPATH lead to what must not be there.
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(folder / "jobs.json")],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    return {place: np.load(path) for place, path in places.items()}


def test_without_this_library(served):
    found = [place for place in served if place[-1] == INSIDE]
    assert len(found) == 12
    for name, num_members, count, mark in found:
        got = served[name, num_members, count, mark]
        assert_near(got, expected(name, data(count)[0]), dtype_of(name))
        assert np.abs(got - expected(name, data(count)[0], OTHER_THREE)).max() > 0.01


def test_leaves_beside_and_any_number_of_members(served):
    found = [place for place in served if place[-1] == BESIDE]
    assert len(found) == 8
    for name, num_members, count, mark in found:
        wanted = expected(name, data(count)[0], slice(num_members))
        assert_near(served[name, num_members, count, mark], wanted, dtype_of(name))


def looped(ensemble, x, fn=lambda model, x: model(x)):
    """Every member alone, in float64 from there on."""
    return np.stack([np.asarray(jax.vmap(ft.partial(fn, model))(x)) for model in ensemble]).astype(np.float64)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 4, 8, 1, key=key), 5, key=KEY)


def rows(count=6):
    return jax.random.normal(jax.random.key(1), (count, 3))


def test_is_the_loop_over_members(ensemble):
    artefact = ee.export(ensemble, shapes=(3,))
    assert_near(np.asarray(artefact(rows())), looped(ensemble, rows()))


WEIGHTS = np.array([1.0, 2.0, 0.0, 4.0, 1.0])


@pytest.mark.parametrize("form", [{}, {"leaves": "beside"}, {"leaves": "beside", "symbolic_members": True}], ids=str)
def test_weights(ensemble, form):
    artefact = ee.export(ensemble, shapes=(3,), combine=ee.combine.mixture, weights=WEIGHTS, **form)
    logits = looped(ensemble, rows())
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = np.log(np.einsum("m,mbc->bc", WEIGHTS / WEIGHTS.sum(), p))
    assert_near(np.asarray(artefact(rows())), wanted)
    assert np.abs(np.log(p.mean(0)) - wanted).max() > 0.01


def test_weights_of_other_members(ensemble):
    form = {"leaves": "beside", "symbolic_members": True}
    artefact = ee.export(ensemble, shapes=(3,), combine=ee.combine.mean, weights=WEIGHTS, **form)
    fewer = ee.export(ensemble[[1, 4]], shapes=(3,), combine=ee.combine.mean, weights=[3.0, 1.0], **form)
    wanted = np.einsum("m,mbo->bo", [0.75, 0.25], looped(ensemble[[1, 4]], rows()))
    assert_near(np.asarray(artefact.program.call(fewer.leaves, rows())), wanted)


def test_named_tuples_become_dicts(ensemble):
    def both(out):
        return {"p": ee.combine.mixture(out), "parts": [ee.uncertainty.decompose_entropy(out), 1.5]}

    artefact = ee.export(ensemble, shapes=(3,), combine=both)
    program = jax_export.deserialize(artefact.program.serialize())
    got, here = program.call(rows()), ee.uncertainty.decompose_entropy(ee.predict(ensemble, rows()))
    assert got["parts"][1] == 1.5
    assert list(got["parts"][0]) == ["aleatoric", "epistemic", "total"]
    for name, value in got["parts"][0].items():
        assert_near(np.asarray(value), np.asarray(getattr(here, name)))
    names = [entry["name"] for entry in artefact.about["outputs"]]
    assert names == ["out.p", "out.parts.0.aleatoric", "out.parts.0.epistemic", "out.parts.0.total", "out.parts.1"]


def test_inputs_may_be_trees(ensemble):
    shapes = {"a": (3,), "b": [(), jax.ShapeDtypeStruct((2, 1), np.int32)], "none": None}
    x = {"a": rows(), "b": [rows()[:, 0], jnp.ones((6, 2, 1), jnp.int32)], "none": None}
    fn = lambda model, x: model(x["a"]) + x["b"][0] * x["b"][1].sum().astype(x["a"].dtype)
    artefact = ee.export(ensemble, shapes=shapes, fn=fn, combine=lambda out: out[0])
    wanted = looped(ensemble, rows())[0] + 2 * np.asarray(rows())[:, :1]
    assert_near(np.asarray(artefact(x)), wanted)
    assert artefact.about["inputs"] == [
        {"name": "x.a", "dtype": str(x["a"].dtype), "shape": ["batch", 3]},
        {"name": "x.b.0", "dtype": str(x["a"].dtype), "shape": ["batch"]},
        {"name": "x.b.1", "dtype": "int32", "shape": ["batch", 2, 1]},
    ]


def test_integer_inputs():
    ensemble = ee.build(lambda key: eqx.nn.Embedding(7, 3, key=key), 2, key=KEY)
    artefact = ee.export(ensemble, shapes=jax.ShapeDtypeStruct((), jnp.int32))
    tokens = jnp.array([0, 6, 3, 3, 1], jnp.int32)
    np.testing.assert_array_equal(artefact(tokens), looped(ensemble, tokens))
    with pytest.raises(ValueError, match="Dtype mismatch"):
        artefact(tokens.astype(jnp.float32))


def test_a_fixed_number_of_rows(ensemble):
    artefact = ee.export(ensemble, shapes=(3,), batch_size=6)
    assert artefact(rows()).shape == (5, 6, 4)
    assert artefact.about["inputs"][0]["shape"] == [6, 3]
    with pytest.raises(ValueError, match="expected same constant"):
        artefact(rows(5))


def test_dropout_draws_what_predict_draws():
    make = lambda key: eqx.nn.Sequential([eqx.nn.Linear(3, 64, key=key), eqx.nn.Dropout(0.5)])
    ensemble = ee.build(make, ids=[4, 9], key=KEY)
    asked = {"inference": False, "key": KEY}
    got = np.asarray(ee.export(ensemble, shapes=(3,), **asked)(rows(9)))
    np.testing.assert_array_equal(got == 0, np.asarray(ee.predict(ensemble, rows(9), **asked)) == 0)
    assert 0.4 < (got == 0).mean() < 0.6
    assert (np.asarray(ee.export(ensemble, shapes=(3,))(rows(9))) != 0).all()


@pytest.mark.parametrize("plan", [ee.plan.Sequential(), ee.plan.Chunked(2), ee.plan.Unrolled()], ids=str)
def test_plans(ensemble, plan):
    assert_near(np.asarray(ee.export(ensemble, shapes=(3,), plan=plan)(rows())), looped(ensemble, rows()))


def test_one_after_another_for_any_number_of_members(ensemble):
    form = {"leaves": "beside", "symbolic_members": True, "plan": ee.plan.Sequential()}
    artefact = ee.export(ensemble, shapes=(3,), **form)
    assert_near(np.asarray(artefact(rows())), looped(ensemble, rows()))


def test_shared_leaves_have_no_axis():
    stacked = ee.build(lambda key: eqx.nn.MLP(3, 4, 8, 1, key=key), 5, key=KEY, shared=lambda model: model.layers[0])
    artefact = ee.export(stacked, shapes=(3,), leaves="beside", symbolic_members=True)
    assert {entry["name"]: entry["shape"] for entry in artefact.about["leaves"]} == {
        "model.layers.0.bias": [8],
        "model.layers.0.weight": [8, 3],
        "model.layers.1.bias": ["members", 4],
        "model.layers.1.weight": ["members", 4, 8],
    }
    assert_near(np.asarray(artefact(rows())), looped(stacked, rows()))


def test_ensembles_of_ensembles():
    nested = ee.build(lambda key: ee.build(lambda key: eqx.nn.Linear(3, 2, key=key), 2, key=key), 3, key=KEY)
    for leaves in ("inside", "beside"):
        got = ee.export(nested, shapes=(3,), leaves=leaves, combine=lambda out: out.mean((0, 2)))(rows())
        wanted = np.mean([looped(inner, rows()).mean(0) for inner in nested], axis=0)
        assert_near(np.asarray(got), wanted)


def test_numpy_leaves_of_two_names(ensemble):
    @jax.tree_util.register_pytree_with_keys_class
    class Twice:
        """A node that gives both of its children one name."""

        def __init__(self, a, b):
            self.a, self.b = a, b

        def tree_flatten_with_keys(self):
            key = jax.tree_util.GetAttrKey("same")
            return ((key, self.a), (key, self.b)), None

        tree_unflatten = classmethod(lambda cls, aux, children: cls(*children))

    class Model(eqx.Module):
        pair: Twice
        table: np.ndarray

        def __call__(self, x):
            return self.pair.a * x + self.pair.b + self.table[jnp.argmax(x)]

    table = np.arange(3.0)  # float64, as NumPy makes it; `table[traced]` needs a jax array
    model = ee.stack([Model(Twice(jnp.ones(()), 2 * jnp.ones(())), table)] * 2)
    artefact = ee.export(model, shapes=(3,), leaves="beside")
    assert list(artefact.leaves) == ["model.pair.same", "model.pair.same#1", "model.table"]
    x = np.asarray(rows())
    assert_near(np.asarray(artefact(rows()))[1], x + 2 + np.argmax(x, -1)[:, None])


def test_keys_keep_their_generator():
    class Keyed(eqx.Module):
        key: jax.Array

        def __call__(self, x):
            assert str(jax.random.key_impl(self.key)) == "rbg"  # not of numbers, which are taken for threefry keys
            return x + jax.random.uniform(self.key)

    ensemble = ee.stack([Keyed(jax.random.key(i, impl="rbg")) for i in range(2)])
    for leaves in ("inside", "beside"):
        got = ee.export(ensemble, shapes=(3,), leaves=leaves)(rows())
        np.testing.assert_array_equal(got, ee.predict(ensemble, rows()))


@pytest.mark.parametrize("form", [{}, {"leaves": "beside"}, {"leaves": "beside", "symbolic_members": True}], ids=str)
def test_weak_types_stay_weak(form):
    class Scaled(eqx.Module):
        scale: jax.Array

        def __call__(self, x):
            return x * self.scale  # of the dtype of `x`, also where this is another

    ensemble = ee.from_stacked(Scaled(jnp.ones(3)))
    ensemble = eqx.tree_at(lambda e: e.stacked.scale, ensemble, jnp.full(3, 2.0))  # put there by the user
    assert ensemble.stacked.scale.weak_type
    x = jnp.ones((4, 2), jnp.bfloat16)
    artefact = ee.export(ensemble, shapes=jax.ShapeDtypeStruct((2,), x.dtype), **form)
    assert artefact(x).dtype == ee.predict(ensemble, x).dtype == jnp.bfloat16


def test_leaves_on_several_devices(ensemble):
    mesh = Mesh(np.array(jax.devices()[:4]), ("members",))
    four = ensemble[:4]
    spread = jax.device_put(eqx.filter(four, eqx.is_array), NamedSharding(mesh, PartitionSpec("members")))
    spread = eqx.combine(spread, four)
    assert len(spread.stacked.layers[0].weight.devices()) == 4
    artefact = ee.export(spread, shapes=(3,))
    assert artefact.program.nr_devices == 1
    assert_near(np.asarray(artefact(rows())), looped(four, rows()))


def test_platforms(ensemble):
    artefact = ee.export(ensemble, shapes=(3,))
    assert artefact.program.platforms == ("cpu", "cuda", "tpu")
    assert artefact.about["platforms"] == ["cpu", "cuda", "tpu"]
    for_tpu = ee.export(ensemble, shapes=(3,), platforms=["tpu"])
    with pytest.raises(ValueError, match=r"exported for platforms '\('tpu',\)' but it is used on"):
        for_tpu(rows())


def test_is_traced_once(ensemble):
    seen = []

    def fn(model, x):
        seen.append(x.shape)
        return model(x)

    ee.export(ensemble, shapes=(3,), fn=fn)
    assert seen == [(3,)]


def test_a_program_that_is_differentiable(ensemble):
    program = ee.export(ensemble, shapes=(3,), combine=ee.combine.mean).program
    call = jax_export.deserialize(program.serialize(vjp_order=1)).call
    gradient = jax.grad(lambda x: jnp.sum(call(x)))(rows())
    alone = jax.grad(lambda x: jnp.mean(jnp.stack([jax.vmap(model)(x) for model in ensemble]), 0).sum())(rows())
    assert_near(np.asarray(gradient), np.asarray(alone))
