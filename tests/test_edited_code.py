"""Code that is edited in place, as `%autoreload 2` does, is used by the next call."""

import dataclasses
import functools as ft
import gc
import importlib.util
import io
import sys
import types
import weakref
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._code import code_of

X, Y = np.ones((6, 2), np.float32), np.zeros((6, 1), np.float32)
KEY = jax.random.key(0)
SGD = optax.sgd(0.0)

SOURCE = """
import equinox as eqx, jax, jax.numpy as jnp, optax, types

inner = types.ModuleType("inner")
inner.value = 1.0
LEVEL, ZERO = 1.0, 0.0
lin = 1.0
WEIGHTS = jnp.ones(3)
traces = 0

class Base(eqx.Module):
    lin: eqx.nn.Linear
    def __call__(self, x): return self.head(self.lin(x))

class Net(Base):
    slope = _slope = 1.0
    calls = 0
    def __init__(self, key): self.lin = eqx.nn.Linear(2, 1, key=key)
    def head(self, z): return 0 * self.slope * z + level()

def first(z): return z
def second(z): return z
ACTS = {"a": first, "b": second}
act = first

def level(plus=0.0):
    import imported_by_edited
    act, len(ACTS), lin, WEIGHTS, imported_by_edited.value
    return LEVEL + plus + ZERO * inner.value * abs(ZERO)

def loss(model, batch, key):
    global traces
    traces += 1
    Net.calls += 1
    return jnp.mean(jax.vmap(model)(batch[0]))

def wrapped(fn):
    def call(*args): return fn(*args)
    return call

outer = wrapped(wrapped(loss))

def mean_of(model, x): return jnp.mean(jax.vmap(model)(x))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    imported = types.ModuleType("imported_by_edited")
    imported.value = 1.0
    monkeypatch.setitem(sys.modules, "imported_by_edited", imported)
    (tmp_path / "edited.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("edited", tmp_path / "edited.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fit(module, ensemble):
    return ee.fit(ensemble, module.loss, SGD, (X, Y), steps=1, batch_size=6, key=KEY).history.loss[:, -1]


def _wrapped(module, ensemble):
    return ee.fit(ensemble, module.outer, SGD, (X, Y), steps=1, batch_size=6, key=KEY).history.loss[:, -1]


def _score(module, ensemble):
    run = ee.fit(
        ensemble,
        lambda model, batch, key: 0.0 * jnp.sum(model.lin.weight),
        SGD,
        (X, Y),
        steps=1,
        batch_size=6,
        validation=ee.train.Validation((X, Y), score=module.loss, mode="min"),
        key=KEY,
    )
    return run.history.validation[:, -1]


def _step(module, ensemble):
    step = ee.train.make_step(module.loss, SGD)
    return step(ee.train.init(ensemble, SGD, key=KEY), (X, Y))[1].loss


def _particles(module, ensemble):
    step = ee.methods.particles.make_step(module.loss, SGD, num_rows=6)
    return step(ee.train.init(ensemble, SGD, key=KEY), (X, Y))[1].loss


def _scan(module, ensemble):
    step = ee.train.make_step(module.loss, SGD)
    return ee.train.scan_steps(step, ee.train.init(ensemble, SGD, key=KEY), (X[None], Y[None]))[1].loss[0]


def _few(module, ensemble):
    return ee.predict(ensemble, X)[:, 0, 0]


def _many(module, ensemble):
    return ee.predict(ensemble, X, batch_size=4)[:, 0, 0]


def _fn(module, ensemble):
    return ee.predict(ensemble, X, fn=_call)[:, 0, 0]


def _call(model, x):
    return model(x)


def _map(module, ensemble):
    return ee.map_members(module.mean_of, plan=ee.plan.Sequential())(ensemble, X)


CALLS = [_fit, _wrapped, _score, _step, _particles, _scan, _few, _many, _fn, _map]


def test_is_used_by_the_next_call(module):
    ensemble = ee.build(module.Net, 2, key=KEY)
    values = lambda: {call.__name__: call(module, ensemble).tolist() for call in CALLS}
    assert values() == dict.fromkeys([call.__name__ for call in CALLS], [1, 1])
    module.level.__code__ = (lambda: 3.0).__code__
    assert values() == dict.fromkeys([call.__name__ for call in CALLS], [3, 3])


EDITS = {
    "a global of a helper": lambda module: vars(module).update(LEVEL=3.0),
    "the zero of a global": lambda module: vars(module).update(ZERO=-0.0),
    "a global, one of whose name a constructor assigns": lambda module: vars(module).update(lin=3.0),
    "another function of a container": lambda module: vars(module).update(act=module.ACTS["b"]),
    "an array that is freed, and None instead": lambda module: vars(module).update(WEIGHTS=None),
    "a helper": lambda module: vars(module).update(level=lambda: 3.0),
    "the code of a helper": lambda module: setattr(module.level, "__code__", (lambda: 3.0).__code__),
    "a default": lambda module: setattr(module.level, "__defaults__", (3.0,)),
    "a method": lambda module: setattr(module.Net, "head", lambda self, z: 3 * z),
    "a method of a base": lambda module: setattr(module.Base, "__call__", lambda self, x: 3 * x),
    "a method that overrides": lambda module: setattr(module.Net, "__call__", lambda self, x: 3 * x),
    "an attribute of a class": lambda module: setattr(module.Net, "slope", 3.0),
    "a private attribute of a class": lambda module: setattr(module.Net, "_slope", 3.0),
    "a closure": lambda module: setattr(module.outer.__closure__[0], "cell_contents", module.level),
    "a module in a module": lambda module: vars(module.inner).update(value=3.0),
    "a module that a function imports": lambda module: vars(sys.modules["imported_by_edited"]).update(value=3.0),
    "a built-in function": lambda module: vars(module).update(abs=lambda x: x),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits(module, edit):
    roots = [module.outer, module.Net]
    before = code_of(roots)
    assert code_of(roots) is before
    EDITS[edit](module)
    assert code_of(roots) is not before


def test_no_edits(module):
    roots = [module.outer, module.Net]
    before = code_of(roots)
    for name in ("LEVEL", "traces", "other"):
        vars(module)[name] = float("1.0")
    module.Net.__doc__ = "Another."
    module.Net.calls += 1
    assert code_of(roots) is before
    assert code_of([jnp.sum, eqx.nn.MLP, *optax.adam(1e-3)]) is None
    assert code_of([*optax.adam(lambda step: module.level())]) is not None


def test_objects_that_are_made_anew(module):
    @dataclasses.dataclass(frozen=True)
    class Settings:
        fn: Callable

    net = module.Net(KEY)
    for make in (
        lambda: net.head,
        lambda: Settings(module.level),
        lambda: ft.partial(module.loss, 1),
        lambda: [module.loss],
    ):
        assert code_of([make()]) is code_of([make()]) is not None


def test_strange_objects(module):
    class Raises:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    class Endless:
        def __getattr__(self, name):
            return Endless()

    class Items(dict):
        def values(self):
            raise RuntimeError

    class Length(list):
        def __len__(self):
            raise RuntimeError

    gone = weakref.proxy(Endless())
    file = io.StringIO()
    file.close()
    for strange in (Raises(), Endless(), Items(a=1), Length([1]), gone, file, np.zeros(2), object()):
        vars(module)["LEVEL"] = strange
        assert code_of([module.loss]) is code_of([module.loss])


def test_many_modules_that_import_each_other(module):
    modules = [types.ModuleType(f"mutual{i}") for i in range(12)]
    for x in modules:
        vars(x).update({f"m{i}": y for i, y in enumerate(modules)}, value=1.0)
    module.inner.__dict__.update(vars(modules[0]))
    names = "inner." + ".".join(f"m{i}" for i in range(12)) + ".value"
    fn = types.FunctionType(compile(f"lambda: {names}", "edited", "eval").co_consts[0], vars(module))
    before = code_of([fn])
    modules[7].value = 3.0
    assert code_of([fn]) is not before


def test_functions_and_arrays_are_freed(module):
    class Array(np.ndarray):
        pass

    def freed(make):
        large = np.ones(9).view(Array)
        fn, array = make(large), weakref.ref(large)
        vars(module)["LEVEL"] = large
        code = code_of([fn, module.loss])
        del fn, large
        module.LEVEL = 1.0
        gc.collect()
        return array() is None and code is not None and not code.is_current()

    assert freed(lambda large: lambda x: x * large)
    assert freed(lambda large: lambda x, large=large: x * large)
    assert freed(lambda large: type("Own", (), {"value": large}))


def test_what_is_the_same_is_not_traced_again(module):
    ensemble = ee.build(module.Net, 2, key=KEY)

    class Loss(eqx.Module):
        weight: jax.Array

        def __call__(self, model, batch, key):
            return self.weight * module.loss(model, batch, key)

    own = Loss(jnp.ones(()))
    fit = lambda module, ensemble: ee.fit(ensemble, own, SGD, (X, Y), steps=1, batch_size=6, key=KEY)
    calls = (_step, _few, _many, _fn, _map, fit)
    for call in calls:
        call(module, ensemble)
    before = module.traces
    vars(module).update(LEVEL=float("1.0"))  # an equal object
    for call in calls:
        call(module, ensemble)
    assert module.traces == before


@pytest.mark.parametrize("scanned", [False, True])
def test_a_step_made_anew_has_the_edited_code_on_a_state_of_an_earlier_step(scanned):
    scale = types.SimpleNamespace(value=1.0)
    loss = lambda model, batch, key: scale.value * jnp.mean(jax.vmap(model)(batch) ** 2)
    state = ee.train.init(ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 2, key=KEY), SGD, key=KEY)

    def losses(state):
        step = ee.train.make_step(loss, SGD)
        if scanned:
            state, metrics = ee.train.scan_steps(step, state, X[None])
            return state, np.ravel(metrics.loss)
        state, metrics = step(state, X)
        return state, np.ravel(metrics.loss)

    state, before = losses(state)
    loss.__defaults__ = None
    loss.__code__ = (lambda model, batch, key: scale.value * 10 * jnp.mean(jax.vmap(model)(batch) ** 2)).__code__
    _, after = losses(state)
    np.testing.assert_allclose(after, 10 * before, rtol=1e-6)
