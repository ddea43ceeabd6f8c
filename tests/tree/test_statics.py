"""Values that are not arrays are stored once: equal ones pass, others raise an error that names them."""

import dataclasses
import functools as ft
import operator
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import MemberMismatchError, tree


class Model(eqx.Module):
    weight: jax.Array
    activation: object
    option: object = eqx.field(static=True, default=None)


def _pair(make):
    return [Model(jnp.ones(2), make(0)), Model(jnp.zeros(2), make(1))]


def _static_pair(make):
    return [Model(jnp.ones(2), None, make(0)), Model(jnp.zeros(2), None, make(1))]


class Plain:
    def __init__(self, value, other=None):
        self.value, self.other = value, other

    def scale(self, x):
        return self.value * x


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Number(int):
    pass


@dataclasses.dataclass
class Config:
    value: object
    function: object = None


def _closure(value):
    return lambda x: x * value


def _default(value):
    return lambda x, y=value: x * y


def _keyword_default(value):
    def function(x, *, y=value):
        return x * y

    return function


def _wrapped(value):
    @ft.wraps(jnp.sin)
    def function(x):
        return x * value

    return function


def _executed(value):
    namespace = {"value": value}
    exec("def function(x): return x * value", namespace)
    return namespace["function"]


def _cyclic(value):
    one = Plain(value)
    one.other = Plain(value, one)
    return one


# How a value is hidden, and the words that name its place.
HIDDEN = {
    "closure": (_closure, "closure variable `value`"),
    "default": (_default, "default 0"),
    "keyword default": (_keyword_default, "default `y`"),
    "partial argument": (lambda v: ft.partial(jnp.multiply, v), "argument 0"),
    "partial keyword": (lambda v: ft.partial(jnp.clip, min=v), "keyword `min`"),
    "bound method": (lambda v: Plain(v).scale, "attribute `value` of the bound object"),
    "nested": (lambda v: ft.partial(_closure(v)), "closure variable `value` of the function"),
    "wrapped": (_wrapped, "closure variable `value`"),
    "global": (_executed, "global `value`"),
    "object": (Plain, "attribute `value`"),
    "slots": (Slotted, "attribute `value`"),
    "dataclass": (Config, "attribute `value`"),
    "cycle": (_cyclic, "attribute `value`"),
    "jit": (lambda v: jax.jit(_closure(v)), "closure variable `value`"),
    "vmap": (lambda v: jax.vmap(_closure(v)), "closure variable `value`"),
    "custom_jvp": (lambda v: jax.custom_jvp(_closure(v)), "closure variable `value`"),
}


@pytest.mark.parametrize("make", [make for make, _ in HIDDEN.values()], ids=HIDDEN)
@pytest.mark.parametrize("pair", [_pair, _static_pair], ids=["leaf", "static"])
def test_equal_in_meaning_passes_with_the_first_one_kept(make, pair):
    values = (lambda: 3, lambda: "a", lambda: jnp.arange(3.0), lambda: np.arange(3), lambda: jax.random.key(1))
    for value in (*values, lambda: float("nan"), lambda: [Plain(1), {"a": _closure(2)}]):
        models = pair(lambda i, value=value: make(value()))
        stacked = tree.stack(models)
        assert stacked.activation is models[0].activation
        assert stacked.option is models[0].option


@pytest.mark.parametrize(("make", "words"), HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("pair", [_pair, _static_pair], ids=["leaf", "static"])
def test_hidden_arrays_that_differ_are_refused_by_name(make, words, pair):
    field = "activation" if pair is _pair else "option"
    keys = tuple(jax.random.split(jax.random.key(0)))
    for values in ((jnp.ones(3), jnp.zeros(3)), (np.arange(3), np.arange(1, 4)), keys):
        with pytest.raises(MemberMismatchError) as caught:
            tree.stack(pair(lambda i, values=values: make(values[i])))
        text = str(caught.value)
        assert f"at `.{field}`: member 1 " in text
        assert "that differs from member 0's" in text
        assert words in text
        assert text.endswith("make it a field of the Module.")


@pytest.mark.parametrize("make", [make for make, _ in HIDDEN.values()], ids=HIDDEN)
def test_hidden_values_that_differ_are_refused(make):
    alike = [] if make is Config else [(1, True), (1, 1.0), (0.0, -0.0)]  # a class with its own `==` decides itself
    for values in (*alike, (1, 2), ("a", "b"), (None, 0), ([1], [1, 2]), ({"a": 1}, {"b": 1})):
        with pytest.raises(MemberMismatchError, match="`.activation`"):
            tree.stack(_pair(lambda i, values=values: make(values[i])))


@pytest.mark.parametrize("shape", [(2,), (3, 1)])
def test_hidden_arrays_of_other_shape_or_dtype_are_refused(shape):
    with pytest.raises(MemberMismatchError, match=re.escape("not f32[3])")):
        tree.stack(_pair(lambda i: _closure([jnp.ones(3), jnp.ones(shape)][i])))
    with pytest.raises(MemberMismatchError, match=re.escape("(bf16[3], not f32[3])")):
        tree.stack(_pair(lambda i: _closure([jnp.ones(3), jnp.ones(3, jnp.bfloat16)][i])))


def _traced(function, size=3):
    return jax.make_jaxpr(function)(np.ones(size))


EQUAL = {
    "markers": lambda i: object(),
    "empty objects": lambda i: eqx.nn._shared.SharedNode(),
    "dictionary order": lambda i: dict(sorted({"a": 1, "b": 2}.items(), reverse=bool(i))),
    "dtypes": lambda i: (np.dtype("float32"), jnp.float32),
    "frozen sets": lambda i: frozenset(["a", "b"]),
    "arrays of strings": lambda i: _closure(np.array(["a", "b"])),
    "same lambda on another line": lambda i: [
        lambda x: x + 1,
        lambda x: x + 1,
    ][i],
    "equal by ==": lambda i: Number(3),
    "method of an array": lambda i: jnp.asarray([1.0, 2.0]).dot,
    "traced programs": lambda i: _traced(lambda x: jax.lax.scan(lambda c, x: (c - 2 * x, c), 1.0, jnp.sin(x))),
    "constants of a traced program": lambda i: _traced(lambda x: x * np.arange(3.0)),
    "a function converted to a program": lambda i: eqx.filter_closure_convert(lambda x: jnp.sin(x) + 1, 1.0),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_more_that_is_equal(make):
    tree.stack(_pair(make))
    tree.stack(_static_pair(make))


DIFFERENT = {
    "builtin operators": lambda i: operator.itemgetter(i),
    "subclass of int": lambda i: Number(i),
    "functions": lambda i: [jnp.sin, jnp.cos][i],
    "lambdas": lambda i: [lambda x: x, lambda x: x + 1][i],
    "lambdas with other constants": lambda i: [lambda x: x + 1, lambda x: x + 2][i],
    "types": lambda i: [int, float][i],
    "objects of other type": lambda i: [Plain(1), Config(1)][i],
    "partials": lambda i: [ft.partial(jnp.add, 1), ft.partial(jnp.add, 1, 2)][i],
    "arrays of strings": lambda i: _closure(np.array(["a", "bc"[i]])),
    "method of an array": lambda i: np.asarray([1.0, i]).dot,
    "builtin method of a list": lambda i: [1, i].count,
    "generators": lambda i: np.random.default_rng(i),
    "array and number": lambda i: _closure([1.0, np.ones(())][i]),
    "operations of traced programs": lambda i: _traced([jnp.sin, jnp.cos][i]),
    "operands of traced programs": lambda i: _traced([lambda x: x - x[0], lambda x: x[0] - x][i]),
    "literals of traced programs": lambda i: _traced([lambda x: x + 1, lambda x: x + 2][i]),
    "loops of traced programs": lambda i: _traced(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x * (1.0 + i), x)),
    "results of traced programs": lambda i: _traced([lambda x: (x[0], x[1]), lambda x: (x[1], x[0])][i]),
    "types of traced programs": lambda i: _traced(lambda x: x, [2, 3][i]),
    "constants of traced programs": lambda i: _traced(lambda x: x * (np.arange(3.0) + i)),
}


@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT)
def test_more_that_differs(make):
    with pytest.raises(MemberMismatchError, match="`.activation`"):
        tree.stack(_pair(make))
    with pytest.raises(MemberMismatchError, match="`.option`"):
        tree.stack(_static_pair(make))


def test_markers_must_pair_up_one_to_one():
    a, b, c = object(), object(), object()

    def member(*markers):
        return [Model(jnp.ones(1), marker) for marker in markers]

    tree.stack([member(a, a), member(b, b)])
    tree.stack([member(a, b), member(b, c)])
    for first, second in ((member(a, a), member(b, c)), (member(b, c), member(a, a))):
        with pytest.raises(MemberMismatchError):
            tree.stack([first, second])


def test_a_difference_seen_once_is_seen_again_elsewhere():
    first, second = Plain(1), Plain(2)
    with pytest.raises(MemberMismatchError) as caught:
        tree.stack([{"a": first, "b": first, "w": jnp.ones(1)}, {"a": second, "b": second, "w": jnp.ones(1)}])
    assert "`['a']`" in str(caught.value)
    assert "`['b']`" in str(caught.value)


def test_an_object_that_calls_itself_equal_is_equal():
    class Equal:
        def __init__(self):
            self.cache = object(), {}, np.random.default_rng()

        def __eq__(self, other):
            return isinstance(other, Equal)

        __hash__ = None

    tree.stack(_pair(lambda i: Equal()))


def test_an_empty_closure_variable_is_no_error():
    def make():
        def function(x):
            return later * x

        if False:
            later = 1
        return function

    tree.stack(_pair(lambda i: make()))


def test_traced_hidden_arrays_are_refused_unless_they_are_the_same_one():
    @eqx.filter_jit
    def same(x):
        f = _closure(x)
        return tree.stack([Model(x, f), Model(x + 1, f)]).weight

    @eqx.filter_jit
    def other(x):
        return tree.stack([Model(x, _closure(x)), Model(x, _closure(x + 0))]).weight

    assert same(jnp.ones(2)).tolist() == [[1, 1], [2, 2]]
    with pytest.raises(MemberMismatchError, match="closes over an array"):
        other(jnp.ones(2))


def test_a_lambda_over_a_member_array_never_runs_with_member_0s():
    def make(seed):
        scale = jax.random.normal(jax.random.key(seed), (3,))
        return eqx.nn.Lambda(lambda x: x * scale)

    with pytest.raises(MemberMismatchError, match="closure variable `scale`"):
        tree.stack([make(0), make(1)])
