"""Every layer of `equinox.nn`, and Modules of other libraries, are members like any model of the user's own."""

import importlib
import inspect
import pathlib

import equinox as eqx
import jax
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close, assert_same, distance, numbers
from . import equinox_layers, flows
from .cases import values
from .libraries import LIBRARIES, UNFIT
from .table import refused, works

KEY = jax.random.key(0)
CHEAP = ["Linear", "PReLU", "WeightNorm"]


def check(case, num_members=3):
    """Members are those that `make` gives alone; they are indexed, stacked, joined and called as such."""
    made, states = ee.build(case.make, num_members, key=KEY), [()] * num_members
    alone, stacked = [case.make(key) for key in ee.member_keys(KEY, num_members)], ()
    if isinstance(made, tuple):
        made, state = made
        alone, stacked = [model for model, _ in alone], (state,)
        states = [(one,) for one in ee.tree.unstack(state)]
    members = made.unstack()
    assert not numbers(alone) or distance(members, alone) <= case.rtol
    assert_same(ee.stack(members), made)
    assert_same(made[1], members[1])
    assert_same(ee.concatenate([made[:1], made[1:]]), made)
    assert_same(eqx.filter_jit(lambda tree: tree)(made), made)
    call = case.fn or (lambda model, *args: model(*args))
    outputs = [call(model, case.x, *own) for model, own in zip(members, states, strict=True)]
    called = made(case.x, *stacked) if case.fn is None else ee.map_members(case.fn)(made, case.x, *stacked)
    assert_close(called, ee.tree.stack(outputs), case.rtol)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.slow) for name in equinox_layers.CASES]
)
def test_equinox(name, unhooked):
    check(equinox_layers.CASES[name])


def test_no_layer_of_equinox_is_missing():
    classes = {name for name, value in vars(eqx.nn).items() if inspect.isclass(value)}
    assert set(equinox_layers.CASES) == classes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "name"), [(library, name) for library, cases in LIBRARIES.items() for name in cases]
)
def test_other_libraries(library, name, unhooked):
    pytest.importorskip(library, reason=f"{library} is not installed")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        check(LIBRARIES[library][name])


def public_classes(module):
    return {name for name, value in vars(module).items() if inspect.isclass(value) and name[0] != "_"}


@pytest.mark.slow
def test_nothing_of_flowjax_is_missing():
    bijections = pytest.importorskip("flowjax.bijections", reason="flowjax is not installed")
    distributions = importlib.import_module("flowjax.distributions")
    abstract = lambda name: name.startswith("Abstract")
    assert set(flows.BIJECTIONS) == {name for name in bijections.__all__ if not abstract(name)}
    own = {
        name
        for name in public_classes(distributions)
        if getattr(distributions, name).__module__ == distributions.__name__
    }
    assert set(flows.DISTRIBUTIONS) == {name for name in own if not abstract(name)}


@pytest.mark.slow
def test_nothing_of_distreqx_is_missing():
    pytest.importorskip("distreqx", reason="distreqx is not installed")
    modules = (importlib.import_module(f"distreqx.{name}") for name in ("distributions", "bijectors"))
    classes = set().union(*map(public_classes, modules))
    assert set(LIBRARIES["distreqx"]) == {name for name in classes if not name.startswith("Abstract")}


TRAINED = {("flowjax", "coupling_flow"): 3, ("diffrax", "Heun"): 2, ("quax", "LoraArray"): 3}


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name"), TRAINED)
def test_members_trained_together_are_as_trained_alone(library, name, unhooked):
    pytest.importorskip(library, reason=f"{library} is not installed")
    case, rows = LIBRARIES[library][name], jax.random.normal(KEY, (8, TRAINED[library, name]))

    def loss(model, x, key):
        found = jax.vmap(lambda x: case.fn(model, x))(x)
        return jax.numpy.mean((found - 1) ** 2)

    options = {"num_members": 2, "steps": 3, "plans": [ee.plan.Vmap()], "rtol": 1e-4, "key": KEY}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ee.testing.check_independent(case.make, loss, optax.sgd(1e-2), rows, **options)


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_refused(name, unhooked):
    pytest.importorskip(name.split()[-1].partition(".")[0], reason="the library is not installed")
    with pytest.raises(ee.MemberMismatchError, match=UNFIT[name].message):
        ee.build(UNFIT[name].make, 3, key=KEY)


@pytest.mark.slow
def test_models_with_traced_programs_are_stacked():
    """Two traces of one function hold distinct variables."""
    lineax = pytest.importorskip("lineax")

    def make(key):
        return lineax.FunctionLinearOperator(lambda x: jax.random.normal(key, (3,)) * x, values(3))

    models = [make(key) for key in jax.random.split(KEY, 3)]
    products = ee.map_members(lambda operator, x: operator.mv(x))(ee.stack(models), values(3))
    assert jax.numpy.array_equal(products, jax.numpy.stack([model.mv(values(3)) for model in models]))


def test_the_documentation_has_these_tables():
    text = pathlib.Path(__file__).parents[2].joinpath("docs/api/saving.md").read_text()
    assert works() in text
    assert refused() in text
