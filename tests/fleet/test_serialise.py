"""Functions that return are the caller's own, and what refers to itself can be sent."""

import dataclasses
import functools as ft
import threading
import weakref
from typing import Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

from eqx_ensemble.fleet import _serialise  # noqa: E402
from eqx_ensemble.fleet._serialise import dumps, loads, refs_of  # noqa: E402
from eqx_ensemble.fleet._worker import Task, _read_task  # noqa: E402

T = TypeVar("T")


def both(value, **options):
    return loads(dumps(value), **options)


def test_functions_come_back():
    scale = 3.0
    local = lambda x: scale * x
    assert both([local, local])[0] is local
    assert both(jax.nn.relu) is jax.nn.relu
    assert both(np.sum) is np.sum


def test_a_function_that_changed_is_another():
    values = [1.0]
    local = lambda: values[0]
    before = dumps(local)
    values[0] = 2.0
    assert dumps(local) != before


def test_functions_that_refer_to_each_other():
    def first(x):
        return second(x - 1) if x else 0

    def second(x):
        return first(x - 1) if x else 1

    found = both({"first": first, "second": second})
    assert found["first"] is first
    assert found["second"](3) == second(3)


def test_arrays_in_place_of_their_numbers():
    array = np.arange(1000.0)
    data = dumps({"x": array, "y": 3}, refs_of([array]))
    assert len(data) < 200
    assert loads(data, [array])["x"] is array


def test_shards_of_a_call_share_their_task():
    """What compiled programs are found by, such as a combination, is one object on a worker."""
    array, other = np.arange(1000.0), np.ones(1000)
    task = dumps(Task(max, {"combine": object(), "data": array}), refs_of([array]))
    assert _read_task(task, [array]) is _read_task(task, [array])
    assert _read_task(task, [other])[1]["data"] is other
    assert _read_task(task, [array])[1]["data"] is array


class Sentinel:
    """Without a state of its own, and compared by identity."""


ABSENT = Sentinel()


class WithDefault(eqx.Module):
    weight: jax.Array
    scale: float = 2.0

    def __init__(self):
        self.weight = jnp.ones(3)


class Of(eqx.Module, Generic[T]):
    weight: T


@pytest.mark.parametrize("make", [WithDefault, lambda: Of[jax.Array](jnp.ones(3))])
def test_modules_come_back_with_their_structure(make):
    """Equinox compares a sentinel in the structure of a module by identity."""
    model = make()
    assert jax.tree.structure(both(model)) == jax.tree.structure(model)
    assert jax.tree.structure(both(jax.tree.map(lambda x: x, model))) == jax.tree.structure(model)


def test_sentinels_of_modules():
    assert both(ABSENT) is ABSENT
    assert both(dataclasses.MISSING) is dataclasses.MISSING
    other = Sentinel()
    assert both(other) is not ABSENT
    ABSENT.state = 1  # which the module of another process lacks
    try:
        assert both(ABSENT).state == 1
        assert both(ABSENT) is not ABSENT
    finally:
        del ABSENT.state


LOCK = threading.Lock()
square = jax.checkpoint(lambda x: x * x)


def with_lock(lock):
    return lambda x: (lock, x)


class Holder:
    """Callable, with an attribute that cannot be serialised."""

    def __init__(self):
        self.lock = LOCK

    def __call__(self, x):
        """Never called."""


REFUSED = {
    "closure": (with_lock(LOCK), r"the function `<lambda>` \(.*:\d+\) .*'_thread.lock' object, in closure variable `l"),
    "in a tree": ({"loss": Holder()}, r"a lock, attribute `lock` of `loss`, for workers"),
    "a method": ({"loss": Holder().__call__}, r"the function `__call__` \(.*in attribute `lock` of the bound object"),
    "a value": (LOCK, r"a lock for workers"),
    "checkpoint": (
        {"loss": square},
        r"the function `<lambda>`(.|\n)*In place of `jax.checkpoint`, use `equinox",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_serialised(name):
    value, text = REFUSED[name]
    with pytest.raises(TypeError, match="`dumps` cannot serialise " + text):
        dumps(value)


class Slope:
    """A callable object, which JAX compares by identity."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, x):
        """A line."""
        return self.slope * x

    def again(self, x):
        """The same."""
        return self(x)


@pytest.fixture
def as_worker(monkeypatch):
    """A function that runs another in the place of a worker, which has received nothing from this process."""
    tables = weakref.WeakValueDictionary(), weakref.WeakKeyDictionary()

    def run(fn, *args):
        with monkeypatch.context() as context:
            for word, table in zip(("_known", "_digests"), tables, strict=True):
                context.setattr(_serialise, word, table)
            return fn(*args)

    return run


class Double:
    """Without a state."""

    def __call__(self, x):
        """Twice its argument."""
        return 2 * x


CALLABLES = {
    "a partial": ft.partial(jax.nn.leaky_relu, negative_slope=0.2),
    "an object": Slope(2.0),
    "no state": Double(),
}
CALLABLES["a method"] = CALLABLES["an object"].again


@pytest.mark.parametrize("name", CALLABLES)
def test_callables_keep_their_identity(name, as_worker):
    """As functions do: programs compiled for them are found again."""
    fn = CALLABLES[name]
    assert both(fn) is fn
    data = dumps({"activation": fn})
    first, second = (as_worker(loads, data)["activation"] for _ in range(2))
    assert first is second
    assert first is not fn
    assert first(-1.0) == fn(-1.0)
    assert loads(as_worker(lambda: dumps([first])))[0] is fn


def test_objects_that_changed_are_sent_anew(as_worker):
    line = Slope(1.0)
    data = dumps(line)
    first = as_worker(loads, data)
    first.slope = 3.0  # on the worker, by a shard
    assert as_worker(loads, data).slope == 1.0
    assert loads(as_worker(lambda: dumps(first))).slope == 3.0
    line.slope = 5.0  # in the caller's process
    assert both(line) is line
    assert loads(data).slope == 1.0


def test_trees_that_can_be_called_are_no_constants():
    tree = jax.tree_util.Partial(jnp.add, jnp.ones(3))
    assert both(tree) is not tree
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    assert both(linear) is not linear


def test_static_fields_of_nan_are_one_object():
    """As in the parts of one ensemble, whose structures are compared."""
    nan = float("nan")
    found = both([(nan, 1), (nan, 1), float("nan")])
    assert found[0] == found[1]  # by identity
    assert found[2] is found[0][0]
    assert np.isnan(found[2])
