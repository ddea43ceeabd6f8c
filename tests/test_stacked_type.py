"""`Stacked[Model, "members"]`: what it accepts and refuses, where it is checked, and what it binds."""

import dataclasses
import importlib
import os
import subprocess
import sys
import textwrap
import typing
from collections.abc import Callable
from typing import Any, Optional, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import AnnotationError, Array, Float, PyTree, TypeCheckError, install_import_hook, jaxtyped
from jaxtyping import config as jaxtyping_config

import eqx_ensemble as ee

MLP = eqx.nn.MLP
Linear = eqx.nn.Linear
MEMBERS = 5

checked = jaxtyped(typechecker=beartype)


@pytest.fixture(autouse=True)
def _hooked():
    """These tests are about run-time type checks, which are on here even where the suite runs without them."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", False)
    yield
    jaxtyping_config.update("jaxtyping_disable", before)


def mlp(key):
    return MLP(2, 1, 8, 1, key=key)


def keys(count=MEMBERS):
    return jax.random.split(jax.random.key(0), count)


ENSEMBLE = ee.build(mlp, MEMBERS, key=jax.random.key(0))
RAW = eqx.filter_vmap(mlp)(keys())
ALONE = mlp(jax.random.key(1))
NESTED = ee.build(lambda key: ee.build(mlp, 3, key=key), MEMBERS, key=jax.random.key(0))
GRID = eqx.filter_vmap(eqx.filter_vmap(mlp))(jax.random.split(jax.random.key(0), (MEMBERS, 3)))


def in_short(value):
    return str(value) if isinstance(value, type) else type(value).__name__


both = pytest.mark.parametrize("stacked", [ENSEMBLE, RAW], ids=["ensemble", "raw"])


@checked
def weighted(ensemble: ee.Stacked[MLP, " members"], w: Float[Array, " members"]) -> Float[Array, ""]:
    return jnp.sum(w)


@checked
def weights_first(w: Float[Array, " members"], ensemble: ee.Stacked[MLP, " members"]):
    return jnp.sum(w)


# What is accepted


@both
def test_the_axis_is_bound_together_with_the_other_arguments(stacked):
    for function, order in [(weighted, 1), (weights_first, -1)]:
        function(*(stacked, jnp.ones(5))[::order])
        for wrong in (7, 1):
            with pytest.raises(TypeCheckError):
                function(*(stacked, jnp.ones(wrong))[::order])


def test_the_net_is_what_refuses(unhooked):
    weighted(ENSEMBLE, jnp.ones(7))
    weighted(ALONE, jnp.ones(7))


class TestWhenSevenWeightsPassForFiveMembers:
    """Plain annotations let them pass: nothing else of the same call binds the name. Ours binds it."""

    def test_a_module_annotation_binds_nothing(self):
        @checked
        def plain(ensemble: MLP, w: Float[Array, " members"]): ...

        plain(RAW, jnp.ones(7))
        with pytest.raises(TypeCheckError):
            weighted(RAW, jnp.ones(7))

    def test_beartype_alone_has_no_scope(self):
        @beartype
        def alone(ensemble: ee.Stacked[MLP, " members"], w: Float[Array, " members"]): ...

        alone(ENSEMBLE, jnp.ones(7))
        with pytest.raises(BeartypeCallHintParamViolation, match="no common size of leading axes"):
            alone(ALONE, jnp.ones(7))

    def test_an_inner_call_has_a_scope_of_its_own(self):
        @checked
        def outer(ensemble: ee.Stacked[MLP, " members"]):
            inner(jnp.ones(7))

        @checked
        def inner(w: Float[Array, " members"]): ...

        outer(ENSEMBLE)

        @checked
        def both(ensemble: ee.Stacked[MLP, " members"]):
            assert not isinstance(jnp.ones(7), Float[Array, " members"])
            assert isinstance(jnp.ones(5), Float[Array, " members"])

        both(ENSEMBLE)


def test_two_ensembles_share_one_axis():
    @checked
    def pair(a: ee.Stacked[MLP, " members"], b: ee.Stacked[MLP, " members"]): ...

    pair(ENSEMBLE, RAW)
    with pytest.raises(TypeCheckError):
        pair(ENSEMBLE, ENSEMBLE[:3])
    with pytest.raises(TypeCheckError):
        pair(ENSEMBLE[:3], RAW)


def test_isinstance_outside_of_a_call_binds_nothing():
    assert isinstance(ENSEMBLE, ee.Stacked[MLP, "members"])
    assert isinstance(ENSEMBLE[:2], ee.Stacked[MLP, "members"])
    assert isinstance(jnp.ones(7), Float[Array, " members"])


def test_a_refused_object_binds_nothing():
    @checked
    def choice(x: ee.Stacked[Linear, " members"] | ee.Stacked[MLP, " members"] | None, w: Float[Array, " members"]):
        if x is not None:
            assert not isinstance(ENSEMBLE, ee.Stacked[Linear, "other"])
            assert not isinstance(ALONE, ee.Stacked[MLP, "other"])
            assert not isinstance(GRID, ee.Stacked[MLP, "other members"])  # 5 is free for `other`, but not 3
            assert isinstance(jnp.ones(9), Float[Array, " other"])

    choice(ENSEMBLE, jnp.ones(5))
    choice(None, jnp.ones(3))
    with pytest.raises(TypeCheckError):
        choice(ENSEMBLE, jnp.ones(7))


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (ENSEMBLE, ee.Stacked[MLP, "5"]),
        (ENSEMBLE, ee.Stacked[MLP, "members=5"]),
        (ENSEMBLE, ee.Stacked[MLP, "_"]),
        (ENSEMBLE, ee.Stacked[eqx.Module, "members"]),
        (ENSEMBLE, ee.Stacked[Linear | MLP, "members"]),
        (ENSEMBLE, ee.Stacked[typing.Union[Linear, MLP], "members"]),  # noqa: UP007
        (ENSEMBLE, ee.Stacked[Any, "members"]),
        (ENSEMBLE, ee.Stacked[Callable, "members"]),
        (ENSEMBLE, ee.Stacked[Callable[[Array], Array], "members"]),
        (ENSEMBLE, ee.Stacked[PyTree, "members"]),
        (ENSEMBLE, ee.Stacked[ee.Ensemble[MLP], "members"]),
        (ENSEMBLE, ee.Stacked[ee.Ensemble[Linear | MLP], "members"]),
        (ENSEMBLE, ee.Stacked[ee.Ensemble, "members"]),
        (RAW, ee.Stacked[typing.Annotated[MLP, "note"], "members"]),
        (ENSEMBLE[:1], ee.Stacked[MLP, "#members"]),
        (NESTED, ee.Stacked[Callable, "5 3"]),
        (NESTED, ee.Stacked[ee.Ensemble[MLP], "5"]),
        (NESTED, ee.Stacked[ee.Ensemble[ee.Ensemble[MLP]], "5"]),
        (GRID, ee.Stacked[MLP, "5 3"]),
        (GRID, ee.Stacked[ee.Stacked[MLP, "3"], "5"]),
        (GRID, ee.Stacked[MLP, "5"]),
        (ee.from_stacked(eqx.nn.Dropout(jnp.ones(4))), ee.Stacked[eqx.nn.Dropout, "4"]),
    ],
    ids=in_short,
)
def test_accepted(value, annotation):
    assert isinstance(value, annotation)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (ENSEMBLE, ee.Stacked[MLP, "4"]),
        (ENSEMBLE, ee.Stacked[Linear, "members"]),
        (RAW, ee.Stacked[Linear, "members"]),
        (ENSEMBLE, ee.Stacked[Linear | eqx.nn.Conv2d, "members"]),
        (ENSEMBLE, ee.Stacked[ee.Ensemble[Linear], "members"]),
        (RAW, ee.Stacked[ee.Ensemble[MLP], "members"]),
        (ENSEMBLE, ee.Stacked[MLP, "populations members"]),
        (RAW, ee.Stacked[MLP, "a b"]),
        (ENSEMBLE, ee.Stacked[Callable, "populations members"]),
        (NESTED, ee.Stacked[MLP, "members"]),
        (NESTED, ee.Stacked[ee.Ensemble[Linear], "5"]),
        (ALONE, ee.Stacked[MLP, "members"]),
        (ALONE, ee.Stacked[Any, "members"]),
        (ENSEMBLE[0], ee.Stacked[MLP, "members"]),
        ([ALONE, ALONE], ee.Stacked[MLP, "members"]),
        (ee.Each(RAW), ee.Stacked[MLP, "members"]),
        (eqx.tree_at(lambda m: m.layers[1].bias, RAW, jnp.zeros((4, 1))), ee.Stacked[MLP, "members"]),
        (eqx.tree_at(lambda m: m.layers[1].bias, RAW, jnp.zeros(())), ee.Stacked[MLP, "members"]),
        (eqx.nn.Dropout(0.5), ee.Stacked[eqx.nn.Dropout, "members"]),
        (MLP, ee.Stacked[MLP, "members"]),
        (None, ee.Stacked[MLP, "members"]),
        (jnp.ones(5), ee.Stacked[MLP, "members"]),
    ],
    ids=in_short,
)
def test_refused(value, annotation):
    assert not isinstance(value, annotation)


@pytest.mark.slow
def test_shared_leaves_carry_no_axis():
    shared = ee.build(mlp, MEMBERS, shared=lambda m: m.layers[0], key=jax.random.key(0))
    assert shared.stacked.layers[0].weight.shape == (8, 2)
    assert isinstance(shared, ee.Stacked[MLP, "5"])
    assert isinstance(shared, ee.Stacked[ee.Ensemble[MLP], "5"])
    partly = eqx.tree_at(lambda m: m.layers[0], RAW, ALONE.layers[0])  # the same model without the wrapper
    assert not isinstance(partly, ee.Stacked[MLP, "5"])


def test_leaves_that_are_no_arrays_carry_no_axis():
    class Named(eqx.Module):
        weight: Array
        name: str
        scale: float
        labels: np.ndarray

    model = Named(jnp.ones((5, 2)), "net", 0.5, np.array(["a", "b"]))
    assert isinstance(model, ee.Stacked[Named, "5"])
    assert isinstance(eqx.tree_at(lambda m: m.weight, model, np.ones((5, 2))), ee.Stacked[Named, "5"])
    keyed = eqx.tree_at(lambda m: m.weight, model, jax.random.split(jax.random.key(0), 5))
    assert isinstance(keyed, ee.Stacked[Named, "5"])
    assert not isinstance(keyed, ee.Stacked[Named, "5 2"])


def test_protocols():
    @runtime_checkable
    class Deep(Protocol):
        depth: int

        def __call__(self, x): ...

    assert isinstance(ENSEMBLE, ee.Stacked[Deep, "members"])
    assert isinstance(RAW, ee.Stacked[Deep, "members"])
    assert not isinstance(eqx.filter_vmap(lambda key: Linear(2, 1, key=key))(keys()), ee.Stacked[Deep, "members"])


def test_type_variables():
    Free, Bound, Chosen = TypeVar("Free"), TypeVar("Bound", bound=MLP), TypeVar("Chosen", Linear, MLP)

    for variable in (Free, Bound, Chosen):
        assert isinstance(ENSEMBLE, ee.Stacked[variable, "members"])
    linears = ee.build(lambda key: Linear(2, 1, key=key), 3, key=jax.random.key(0))
    assert isinstance(linears, ee.Stacked[Free, "members"])
    assert isinstance(linears, ee.Stacked[Chosen, "members"])
    assert not isinstance(linears, ee.Stacked[Bound, "members"])


# Where it is checked


def test_arguments_defaults_keywords_and_return_values():
    @checked
    def halved(
        *parts: ee.Stacked[MLP, " members"], extra: ee.Stacked[MLP, " members"] = RAW, cut: int = 0
    ) -> ee.Stacked[MLP, " members"]:
        return jax.tree.map(lambda x: x[cut:] if eqx.is_array(x) else x, parts[0])

    halved(ENSEMBLE, RAW)
    with pytest.raises(TypeCheckError, match="return value"):
        halved(ENSEMBLE, cut=1)
    with pytest.raises(TypeCheckError, match="parameters"):
        halved(ENSEMBLE, extra=ENSEMBLE[:2])


def test_expressions_of_other_axes_and_arguments():
    @checked
    def twice(x: ee.Stacked[MLP, " members"], times: int) -> ee.Stacked[MLP, " {times}*members"]:
        return ee.tree.concatenate([eqx.filter(x, eqx.is_array)] * 2)

    twice(RAW, 2)
    with pytest.raises(TypeCheckError, match="return value"):
        twice(RAW, 3)
    with pytest.raises(AnnotationError):
        isinstance(RAW, ee.Stacked[MLP, "2*unknown"])


@pytest.mark.parametrize("wrap", [lambda t: Optional[t], lambda t: t | None, lambda t: None | t])  # noqa: UP045
def test_optional(wrap):
    @checked
    def maybe(ensemble: wrap(ee.Stacked[MLP, "members"]), w: Float[Array, " members"]): ...

    maybe(ENSEMBLE, jnp.ones(5))
    maybe(None, jnp.ones(7))
    for wrong in ((ENSEMBLE, jnp.ones(7)), (ALONE, jnp.ones(5)), (3, jnp.ones(5))):
        with pytest.raises(TypeCheckError):
            maybe(*wrong)


def test_inside_containers():
    @checked
    def several(
        listed: list[ee.Stacked[MLP, " members"]],
        named: dict[str, ee.Stacked[MLP, " members"]],
        pair: tuple[ee.Stacked[MLP, " members"], int],
        tree: PyTree[ee.Stacked[MLP, " members"]],
        w: Float[Array, " members"],
    ): ...

    good = [[ENSEMBLE], {"a": RAW}, (ENSEMBLE, 1), {"x": [RAW, ENSEMBLE]}, jnp.ones(5)]
    several(*good)
    for i, wrong in enumerate([[ALONE], {"a": ENSEMBLE[:2]}, (ALONE, 1), {"x": [RAW, ALONE]}, jnp.ones(7)]):
        with pytest.raises(TypeCheckError):
            several(*good[:i], wrong, *good[i + 1 :])


def test_fields_of_modules_and_dataclasses():
    @checked
    class Weighted(eqx.Module):
        ensemble: ee.Stacked[MLP, " members"]
        weights: Float[Array, " members"]

    @checked
    @dataclasses.dataclass
    class Record:
        ensemble: ee.Stacked[MLP, " members"]
        weights: Float[Array, " members"]

    for kind in (Weighted, Record):
        kind(ENSEMBLE, jnp.ones(5))
        kind(RAW, weights=jnp.ones(5))
        for wrong in ((ENSEMBLE, jnp.ones(7)), (ALONE, jnp.ones(5))):
            with pytest.raises(TypeCheckError):
                kind(*wrong)


@both
@pytest.mark.parametrize(
    "transform", [eqx.filter_jit, eqx.filter_grad, eqx.filter_value_and_grad, eqx.filter_eval_shape]
)
def test_under_a_transform(stacked, transform):
    count = 0

    def checked_inside(ensemble, w):
        nonlocal count
        count += 1
        return weighted(ensemble, w)

    run = lambda *args: (
        transform(checked_inside, *args) if transform is eqx.filter_eval_shape else transform(checked_inside)(*args)
    )
    run(stacked, jnp.ones(5))
    assert count
    with pytest.raises(TypeCheckError):
        run(stacked, jnp.ones(7))
    with pytest.raises(TypeCheckError):
        run(ALONE, jnp.ones(5))


@both
def test_vmap_over_the_members_takes_the_axis_away(stacked):
    @checked
    def one(model: MLP):
        assert not isinstance(model, ee.Stacked[MLP, "members"])
        return jnp.ones(())

    over_members = ee.map_members if isinstance(stacked, ee.Ensemble) else eqx.filter_vmap
    assert over_members(one)(stacked).shape == (MEMBERS,)

    @checked
    def two(ensemble: ee.Stacked[MLP, " members"], w: Float[Array, " members"], x: Float[Array, ""]):
        return x

    eqx.filter_vmap(two, in_axes=(None, None, 0))(stacked, jnp.ones(5), jnp.ones(4))
    eqx.filter_vmap(two)(GRID, jnp.ones((5, 3)), jnp.ones(5))
    with pytest.raises(TypeCheckError):
        eqx.filter_vmap(two)(GRID, jnp.ones((5, 5)), jnp.ones(5))


@both
def test_shapes_and_gradients_are_of_the_type(stacked):
    shapes = eqx.filter_eval_shape(lambda x: x, stacked)
    assert isinstance(
        jax.tree.leaves(eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct)))[0], jax.ShapeDtypeStruct
    )
    grads = eqx.filter_grad(lambda m: sum(jnp.sum(x) for x in jax.tree.leaves(eqx.filter(m, eqx.is_inexact_array))))(
        stacked
    )
    for tree in (shapes, grads, eqx.filter(stacked, eqx.is_inexact_array)):
        weighted(tree, jnp.ones(5))
        with pytest.raises(TypeCheckError):
            weighted(tree, jnp.ones(7))
    assert not isinstance(eqx.filter_eval_shape(lambda x: x, ALONE), ee.Stacked[MLP, "members"])


MODULE = """
import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

import eqx_ensemble as ee


def weighted(ensemble: ee.Stacked[eqx.nn.MLP, "members"], w: Float[Array, " members"]) -> Float[Array, ""]:
    return jnp.sum(w)


def quoted(ensemble: "ee.Stacked[eqx.nn.MLP, 'members']", w: Float[Array, " members"]) -> Float[Array, ""]:
    return jnp.sum(w)


@eqx.filter_jit
def jitted(ensemble: ee.Stacked[eqx.nn.MLP, "members"], w: Float[Array, " members"]) -> Float[Array, ""]:
    return jnp.sum(w)


class Weighted(eqx.Module):
    ensemble: ee.Stacked[eqx.nn.MLP, "members"]
    w: Float[Array, " members"]
"""
ENTRIES = ("weighted", "quoted", "jitted", "Weighted")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Imports MODULE from a file, under the import hook or not."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(name, *, hook):
        (tmp_path / f"{name}.py").write_text(MODULE)
        importlib.invalidate_caches()
        if not hook:
            return importlib.import_module(name)
        with install_import_hook(name, "beartype.beartype"):
            return importlib.import_module(name)

    yield load
    for name in ("stacked_hooked", "stacked_unhooked"):
        sys.modules.pop(name, None)


@both
@pytest.mark.parametrize("entry", ENTRIES)
def test_import_hook(module, stacked, entry):
    function = getattr(module("stacked_hooked", hook=True), entry)
    function(stacked, jnp.ones(5))
    for wrong in ((stacked, jnp.ones(7)), (ALONE, jnp.ones(5))):
        with pytest.raises(TypeCheckError):
            function(*wrong)


@pytest.mark.parametrize("entry", ENTRIES)
def test_without_the_import_hook_nothing_is_checked(module, entry):
    getattr(module("stacked_unhooked", hook=False), entry)(ALONE, jnp.ones(7))


def notebook(*cells):
    """Runs cells in a fresh IPython shell; returns the error of the last one, if any."""
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    shell.user_ns |= {"ENSEMBLE": ENSEMBLE, "RAW": RAW, "ALONE": ALONE}
    shell.showtraceback = lambda *args, **kwargs: None
    results = [shell.run_cell(cell, store_history=False) for cell in cells]
    assert all(result.success for result in results[:-1]), [result.error_in_exec for result in results]
    return results[-1].error_in_exec


IMPORTS = MODULE + "from beartype import beartype\nfrom jaxtyping import jaxtyped\n"
MAGICS = ("%load_ext jaxtyping", "%jaxtyping.typechecker beartype.beartype")
DECORATED = "weighted = jaxtyped(weighted, typechecker=beartype)\nWeighted = jaxtyped(Weighted, typechecker=beartype)"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("cells", [(*MAGICS, MODULE), (IMPORTS, DECORATED)], ids=["magic", "decorated"])
@pytest.mark.parametrize("entry", ["weighted", "Weighted"])
def test_notebook(cells, entry):
    for good in ("ENSEMBLE", "RAW"):
        assert notebook(*cells, f"{entry}({good}, jnp.ones(5))") is None
    for wrong in ("ENSEMBLE, jnp.ones(7)", "RAW, jnp.ones(7)", "ALONE, jnp.ones(5)"):
        assert isinstance(notebook(*cells, f"{entry}({wrong})"), TypeCheckError)
    assert notebook(MODULE, f"{entry}(ALONE, jnp.ones(7))") is None


@pytest.mark.slow
def test_jaxtyping_disabled_from_outside():
    code = """
        from jaxtyping import install_import_hook
        with install_import_hook("eqx_ensemble", "beartype.beartype"):
            import eqx_ensemble as ee
            ee.Ensemble, ee.Stacked, ee.build
        import equinox as eqx, jax, jax.numpy as jnp
        from beartype import beartype
        from jaxtyping import Array, Float, jaxtyped

        @jaxtyped(typechecker=beartype)
        def weighted(ensemble: ee.Stacked[eqx.nn.MLP, "members"], w: Float[Array, " members"]): ...

        ensemble = ee.build(lambda key: eqx.nn.MLP(2, 1, 8, 1, key=key), 5, key=jax.random.key(0))
        weighted(ensemble, jnp.ones(7))
        weighted(ensemble[0], jnp.ones(5))
        assert isinstance(ensemble, ee.Stacked[eqx.nn.MLP, "members"])
        assert not isinstance(ensemble[0], ee.Stacked[eqx.nn.MLP, "members"])
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAXTYPING_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# The class itself


def test_type_hints():
    def function(ensemble: "ee.Stacked[MLP, ' members']") -> Optional[ee.Stacked[MLP, " members"]]: ...  # noqa: UP045

    hints = typing.get_type_hints(function)
    assert hints["ensemble"] is ee.Stacked[MLP, "members"]
    assert ee.Stacked[MLP, "members"] in typing.get_args(hints["return"])


def test_one_class_for_each_pair_of_arguments():
    assert ee.Stacked[MLP, "members"] is ee.Stacked[MLP, " members "]
    assert ee.Stacked[MLP, "members"] is not ee.Stacked[MLP, "other"]
    assert ee.Stacked[MLP, "members"] is not ee.Stacked[Linear, "members"]
    assert ee.Stacked[MLP, "a b"] is ee.Stacked[MLP, " a   b"]


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (ee.Stacked[MLP, "members"], 'Stacked[MLP, "members"]'),
        (ee.Stacked[ee.Ensemble[MLP], "a b"], 'Stacked[Ensemble[MLP], "a b"]'),
        (ee.Stacked[MLP | eqx.nn.GRUCell, "members"], 'Stacked[MLP | GRUCell, "members"]'),
        (ee.Stacked[Callable[..., Any], "members"], 'Stacked[Callable[..., Any], "members"]'),
        (ee.Stacked[ee.Stacked[MLP, "b"], "a"], 'Stacked[MLP, "a b"]'),
    ],
)
def test_repr(annotation, text):
    assert repr(annotation) == str(annotation) == text


# beartype refuses hints whose union shows another name than they do themselves.
def test_repr_in_a_union():
    assert repr(ee.Stacked[MLP, "members"] | int) == 'Stacked[MLP, "members"] | int'


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            (ALONE, 5),
            "its arrays have no common size of leading axes: f32[8,2] at `.layers[0].weight`, "
            "f32[1,8] at `.layers[1].weight`.",
        ),
        (
            (eqx.tree_at(lambda m: m.layers[1].bias, RAW, jnp.zeros((4, 1))), 5),
            "its arrays have no common size of leading axes: f32[5,8,2] at `.layers[0].weight`, "
            "f32[4,1] at `.layers[1].bias`.",
        ),
        ((NESTED, 5), 'this `Ensemble[Ensemble[MLP]]` is no `Stacked[MLP, "members"]`.'),
        ((3, 5), 'this `int` is no `Stacked[MLP, "members"]`.'),
        ((eqx.filter(RAW, lambda _: False), 5), "its arrays have no common size of leading axes: no array."),
    ],
)
def test_messages(call, reason):
    value, count = call
    with pytest.raises(TypeCheckError) as caught:
        weighted(value, jnp.ones(count))
    assert 'Expected type: Stacked[MLP, "members"].' in str(caught.value)
    assert "parameter 'ensemble'" in str(caught.value)
    assert str(caught.value.__cause__.__cause__).endswith(reason)


def test_message_of_an_axis_that_does_not_fit():
    with pytest.raises(TypeCheckError) as caught:
        weights_first(jnp.ones(7), ENSEMBLE)
    assert "members=7" in str(caught.value)
    assert str(caught.value.__cause__.__cause__).endswith(
        'its arrays have leading axes (5,), which do not fit "members": the size of dimension members is 5 which does '
        "not equal the existing value of 7."
    )


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (MLP, TypeError, "is for annotations"),
        ((MLP, 4), TypeError, "is for annotations"),
        ((MLP, "a ..."), ValueError, "needs a fixed number of leading axes, got 'a ...'"),
        ((MLP, "#*a b"), ValueError, "needs a fixed number of leading axes"),
        ((MLP, "a, b"), ValueError, "Axes should be separated with spaces, not commas"),
        (("MLP", "members"), TypeError, "must be a type"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unhooked")
def test_misuse(item, error, message):
    with pytest.raises(error, match=message):
        ee.Stacked[item]


def test_a_protocol_that_cannot_be_checked():
    class Deep(Protocol):
        depth: int

    with pytest.raises(TypeError, match="runtime_checkable"):
        ee.Stacked[Deep, "members"]


@pytest.mark.parametrize(
    "use", [lambda: isinstance(3, ee.Stacked), lambda: ee.Stacked(), lambda: ee.Stacked[MLP, "members"](RAW)]
)
def test_no_instances(use):
    with pytest.raises(TypeError, match=r"is for annotations and `isinstance`"):
        use()


def test_a_forgotten_subscript_is_noticed_at_the_definition():
    with pytest.raises(Exception, match="is for annotations and `isinstance`"):

        @checked
        def function(ensemble: ee.Stacked): ...
