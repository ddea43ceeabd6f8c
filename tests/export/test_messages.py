"""Messages of `export` for wrong inputs, word for word."""

import collections
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble._older_jax import InconclusiveDimensionOperation

from ..factories import CASES

KEY = jax.random.key(0)
BITS = 8 * jnp.result_type(float).itemsize
ENSEMBLE = ee.build(lambda key: eqx.nn.MLP(3, 4, 8, 1, key=key), 2, key=KEY)
STATEFUL, STATE = ee.build(CASES["conv and batch norm"].make, 2, key=KEY)
Pair = collections.namedtuple("Pair", "a b")


def export(ensemble=ENSEMBLE, shapes=(3,), **options):
    return ee.export(ensemble, shapes=shapes, **options)


SYMBOLIC = {"leaves": "beside", "symbolic_members": True}


class Odd(eqx.Module):
    x: jax.Array


BAD = {
    "a list of models": (
        lambda: export(ENSEMBLE.unstack()),
        "TypeError: `export` needs an `Ensemble`, got a list.\n"
        "If it holds models, make an ensemble of them first: `stack(models)`.",
    ),
    "one model": (
        lambda: ee.export_onnx(ENSEMBLE[0], shapes=(3,)),
        "ImportError: `export_onnx` needs jax2onnx.\nInstall it: `pip install 'eqx_ensemble[onnx]'`."
        if importlib.util.find_spec("jax2onnx") is None
        else "TypeError: `export_onnx` needs an `Ensemble`, got a MLP.\n"
        "`stack([model, ...])` makes one of models, `from_stacked(model)` of a model that is stacked already.",
    ),
    "shapes: a number": (
        lambda: export(shapes=3),
        "TypeError: `export` needs shapes of one row, such as `(13,)`, or `jax.ShapeDtypeStruct`s; at `shapes`: an int."
        "\nWrite a shape as a tuple: `shapes=(13,)`.",
    ),
    "shapes: a list of numbers": (
        lambda: export(shapes={"a": [3]}),
        "TypeError: `export` needs shapes of one row, such as `(13,)`, or `jax.ShapeDtypeStruct`s; at `shapes['a']`: a "
        "list.\nWrite a shape as a tuple: `shapes=(13,)`.",
    ),
    "shapes: a batch": (
        lambda: export(shapes=[np.ones((5, 3), np.float32)]),
        "TypeError: `export` needs shapes of one row, such as `(13,)`, or `jax.ShapeDtypeStruct`s; at `shapes[0]`: "
        "f32[5,3].\n"
        "For a batch `x` pass `jax.ShapeDtypeStruct(x.shape[1:], x.dtype)`: the shape of one row.",
    ),
    "shapes: a named tuple": (
        lambda: export(shapes=Pair((3,), (3,))),
        "TypeError: `export` needs shapes of one row, such as `(13,)`, or `jax.ShapeDtypeStruct`s; at `shapes`: a Pair."
        "\nInputs are arrays in dicts with string keys, lists and tuples: other types would have to be there where the "
        "program is loaded.",
    ),
    "shapes: keys that are no strings": (
        lambda: export(shapes={3: (3,)}),
        "TypeError: `export` needs strings as the keys of dicts; at `shapes`: got the key 3.",
    ),
    "shapes: nothing": (
        lambda: export(shapes={"a": None}),
        "TypeError: `export` needs the shape of at least one array in `shapes`, got {'a': None}.",
    ),
    "shapes: a negative size": (
        lambda: export(shapes=(3, -1)),
        "ValueError: `export` needs sizes of zero or more in `shapes`; at `shapes`: got (3, -1).\n"
        "Only the number of rows, which is not part of the shape, and that of the members can be left open.",
    ),
    "shapes: a symbol": (
        lambda: export(shapes=jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3"), np.float32)),
        "ValueError: `export` needs sizes of zero or more in `shapes`; at `shapes`: got (b, 3).\n"
        "Only the number of rows, which is not part of the shape, and that of the members can be left open.",
    ),
    "shapes: keys": (
        lambda: export(shapes=jax.ShapeDtypeStruct((), KEY.dtype)),
        "TypeError: `export` needs inputs of plain dtypes in `shapes`; at `shapes`: got key<fry>.\n"
        "Pass the data of keys (`jax.random.key_data`), and make keys of them again in `fn`, by "
        "`jax.random.wrap_key_data`.",
    ),
    "shapes that the model does not take": (
        lambda: export(shapes=(5,)),
        "TypeError: dot_general requires contracting dimensions to have the same shape, got (3,) and (5,).",
    ),
    "no platform": (
        lambda: export(platforms=[]),
        "ValueError: `export` needs `platforms` as a list of cpu, cuda, tpu, rocm; got [].",
    ),
    "one platform": (
        lambda: export(platforms="cpu"),
        "ValueError: `export` needs `platforms` as a list of cpu, cuda, tpu, rocm; got 'cpu'.",
    ),
    "no such platform": (
        lambda: export(platforms=("cpu", "gpu")),
        "ValueError: `export` needs `platforms` as a list of cpu, cuda, tpu, rocm; got ('cpu', 'gpu').\n"
        "A GPU is `'cuda'` or `'rocm'`.",
    ),
    "no such place for leaves": (
        lambda: export(leaves="outside"),
        "ValueError: `export` needs `leaves` to be one of 'inside', 'beside', got 'outside'.",
    ),
    "any number of constants": (
        lambda: export(symbolic_members=True),
        "ValueError: `export` needs `leaves='beside'` with `symbolic_members=True`: a program for any number of "
        "members gets their arrays as an argument.",
    ),
    "no rows": (
        lambda: export(batch_size=0),
        "ValueError: `export` needs `batch_size` of at least 1, got 0.",
    ),
    "a plan that is not known": (
        lambda: export(plan="auto"),
        'TypeError: `export` needs a concrete plan, got `plan="auto"`: what is fastest can be tried only where '
        "the program runs."
        "\nPass `Vmap()`, or what `predict` chose with `plan=Auto()`: `plan.choice`.",
    ),
    "state that is missing": (
        lambda: export(STATEFUL, shapes=(25,)),
        "TypeError: `export`: the members are stateful (for example they contain BatchNorm), but no `state` was given."
        "\nBuild with `ensemble, state = build(eqx.nn.make_with_state(Model), ...)` and pass `state=state`.",
    ),
    "weights without something that takes them": (
        lambda: export(weights=[0.5, 0.5]),
        "TypeError: `export` needs `combine=` with `weights`: weights have no effect without `combine`.",
    ),
    "weights of others": (
        lambda: export(weights=[1.0], combine=ee.combine.mean),
        "ValueError: `export` needs one weight per member.\n"
        "  expected shape (2,), got (1,)\nWeights are in the order of the members.",
    ),
    "traced leaves": (
        lambda: eqx.filter_jit(lambda ensemble: export(ensemble))(ENSEMBLE),
        "TypeError: `export` needs numbers, and the leaf `model.layers.0.weight` is traced: export outside `jax.jit`.",
    ),
    "a print while it runs": (
        lambda: export(fn=lambda model, x: (jax.debug.print("{}", x), model(x))[1], batch_size=2),
        "TypeError: `export` cannot export a program that calls Python while it runs: found `debug_print`.\nTake out "
        "`jax.debug`, `jax.pure_callback` and the like. Checks of `equinox.error_if` are left out when the environment "
        "variable `EQX_ON_ERROR=off` is set.",
    ),
    "a check while it runs": (
        lambda: export(combine=lambda out: eqx.error_if(out[0], jnp.isnan(out).any(), "NaN")),
        "TypeError: `export` cannot export a program that calls Python while it runs: found `pure_callback`.\nTake out "
        "`jax.debug`, `jax.pure_callback` and the like. Checks of `equinox.error_if` are left out when the environment "
        "variable `EQX_ON_ERROR=off` is set.",
    ),
    "outputs of the user's own": (
        lambda: export(combine=lambda out: {"a": [Odd(out[0])]}),
        "TypeError: `export` needs outputs that are arrays in dicts with string keys, lists and tuples; at `['a'][0]`: "
        "an Odd.\nNamed tuples are returned as dicts. Take other types apart in `fn` or `combine`: where the program "
        "is loaded they do not exist.",
    ),
    "outputs under keys that are no strings": (
        lambda: export(combine=lambda out: {1: out[0]}),
        "TypeError: `export` needs strings as the keys of dicts; at `<root>`: got the key 1.",
    ),
    "leaves without a name in safetensors": (
        lambda: export(
            ee.from_stacked(eqx.filter_vmap(lambda key: Odd(jnp.zeros(2, jnp.int4)))(jax.random.split(KEY, 2))),
            fn=lambda model, x: model.x.astype(x.dtype),
            leaves="beside",
        ),
        "TypeError: `export` cannot put the leaf `model.x` of dtype int4 beside the program: safetensors has no such "
        "type.\nPass `leaves='inside'`, or cast it.",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_message(what, unhooked):
    wrong, expected = BAD[what]
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the kind is part of what is expected)
        wrong()
    said = str(caught.value).split("\n-----")[0]  # jax adds a note on its traceback
    assert f"{type(caught.value).__name__}: {said}" == expected


def notes(error):
    return "\n".join(getattr(error, "__notes__", []))


def test_rows_of_another_shape_are_explained():
    with pytest.raises(TypeError) as caught:
        export(shapes=(5,))
    assert f"`export` calls a member with one row of the input, here f{BITS}[5], as `shapes` says." in notes(
        caught.value
    )


@pytest.mark.parametrize(
    "options",
    [
        {"combine": lambda out: out[0] if out.shape[1] > 3 else out[1]},
        {"combine": lambda out: out[0] if out.shape[0] > 3 else out[1], **SYMBOLIC},
        {"plan": ee.plan.Chunked(2), **SYMBOLIC},
        {"fn": lambda model, x: (jax.debug.print("{}", x), model(x))[1]},
    ],
    ids=["rows", "members", "chunks", "print"],
)
def test_decisions_on_what_is_left_open_are_explained(options):
    kind = TypeError if "fn" in options else InconclusiveDimensionOperation
    with pytest.raises(kind) as caught:
        export(**options)
    assert "take out `jax.debug.print` and the like, or pass `batch_size=` and a fixed" in notes(caught.value)
    if kind is not TypeError:
        export(**{name: value for name, value in options.items() if name not in SYMBOLIC}, batch_size=4)


def test_too_much_to_be_inside(monkeypatch):
    size = 2 * (3 * 8 + 8 + 8 * 4 + 4) * BITS // 8
    monkeypatch.setattr("eqx_ensemble._export._check._MOST_INSIDE", size)
    with pytest.raises(ValueError, match=f"less than {size} bytes of leaves inside a program; these have {size}"):
        export()
    assert export(leaves="beside")(jnp.ones((2, 3))).shape == (2, 2, 4)


def test_flatbuffers_that_is_missing(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "flatbuffers" else found(name))
    with pytest.raises(ImportError, match=r"needs flatbuffers\.\nInstall it: `pip install 'eqx_ensemble\[export\]'`"):
        export()
