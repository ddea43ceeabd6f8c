"""The code of functions, objects and classes as texts: the same in every process, different after every edit."""

import os
import subprocess
import sys
import textwrap

import pytest

from eqx_ensemble.train.resume._code_texts import code_text

HEAD = """
import abc, argparse, collections, dataclasses, enum, functools, logging, types, typing
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
"""
# The code, an edit of it, and the expression whose text must then differ.
EDITS = {
    "a method": ("class A(eqx.Module):\n    def __call__(self): return 1.0", "1.0", "2.0", "A()"),
    "a base": ("class A:\n    def f(self): return 1.0\nclass B(A): pass", "1.0", "2.0", "B()"),
    "a jitted method": (
        "class A(eqx.Module):\n    @eqx.filter_jit\n    def __call__(self): return 1.0", "1.0", "2.0", "A()",
    ),
    "a property": ("class A:\n    @property\n    def f(self): return 1.0", "1.0", "2.0", "A()"),
    "a cached property": ("class A:\n    @functools.cached_property\n    def f(self): return 1.0", "1.0", "2.0", "A()"),
    "a static method": ("class A:\n    @staticmethod\n    def f(): return 1.0", "1.0", "2.0", "A()"),
    "a class attribute": ("class A:\n    scale = 1.0", "1.0", "2.0", "A()"),
    "a default of a field": ("@dataclasses.dataclass\nclass A:\n    scale: float = 1.0", "1.0", "2.0", "A"),
    "a slot": ("class A:\n    __slots__ = ('a',)\n    def __init__(self): self.a = 1.0", "1.0", "2.0", "A()"),
    "an enumeration": ("class A(enum.Enum):\n    B = 1.0\ndef f(): return A.B", "1.0", "2.0", "f"),
    "a named tuple": ("class A(typing.NamedTuple):\n    scale: float = 1.0", "1.0", "2.0", "A()"),
    "a subclass of a number": ("class A(float):\n    def f(self): return 1.0", "1.0", "2.0", "A(3.0)"),
    "a class in a function": (
        "class A(eqx.Module):\n    def __call__(self): return 1.0\ndef make(key): return A()", "1.0", "2.0", "make",
    ),
    "a global number": ("SCALE = 1.0\ndef f(): return SCALE", "1.0", "2.0", "f"),
    "a global list": ("SCALES = [[1.0]]\ndef f(): return SCALES", "1.0", "2.0", "f"),
    "a global dictionary": ("SCALES = {'a': 1.0}\ndef f(): return SCALES['a']", "1.0", "2.0", "f"),
    "a key of a dictionary": ("SCALES = {1.0: 'a'}\ndef f(): return SCALES", "1.0", "2.0", "f"),
    "a global tuple": ("SCALES = (1.0, 3.0)\ndef f(): return SCALES", "1.0", "2.0", "f"),
    "a global partial": (
        "def g(s): return s\nh = functools.partial(g, 1.0)\ndef f(): return h()", "1.0", "2.0", "f",
    ),
    "a global jitted function": ("@jax.jit\ndef g(): return 1.0\ndef f(): return g()", "1.0", "2.0", "f"),
    "a filter-jitted function": ("@eqx.filter_jit\ndef g(): return 1.0\ndef f(): return g()", "1.0", "2.0", "f"),
    "a cached function": ("@functools.cache\ndef g(): return 1.0\ndef f(): return g()", "1.0", "2.0", "f"),
    "a custom derivative": (
        "@jax.custom_jvp\ndef g(x): return x\n@g.defjvp\ndef _(p, t): return p[0], 1.0 * t[0]\ndef f(x): return g(x)",
        "1.0", "2.0", "f",
    ),
    "a global namespace": ("n = types.SimpleNamespace(a=1.0)\ndef f(): return n.a", "1.0", "2.0", "f"),
    "global arguments": ("n = argparse.Namespace(a=1.0)\ndef f(): return n.a", "1.0", "2.0", "f"),
    "a global object": (
        "@dataclasses.dataclass\nclass A:\n    a: float\nn = A(1.0)\ndef f(): return n.a", "1.0", "2.0", "f",
    ),
    "a global array": ("x = jnp.array([1.0])\ndef f(): return x", "1.0", "2.0", "f"),
    "a global model": ("m = eqx.nn.Lambda(lambda x: 1.0)\ndef f(): return m(0)", "1.0", "2.0", "f"),
    "a global of a method": (
        "SCALE = 1.0\nclass A(eqx.Module):\n    def __call__(self): return SCALE", "1.0", "2.0", "A()",
    ),
    "an optimiser": ("o = optax.chain(optax.clip(1.0), optax.adam(1e-3))", "1.0", "2.0", "o"),
    "a schedule": ("o = optax.adam(optax.cosine_decay_schedule(1.0, 9))", "1.0", "2.0", "o"),
    "a type-checked function": (
        "import jaxtyping, beartype\n@jaxtyping.jaxtyped(typechecker=beartype.beartype)\n"
        "def f(x: jaxtyping.Float[jax.Array, 'a']) -> float: return 1.0",
        "1.0", "2.0", "f",
    ),
    "a function checked by beartype": (
        "import beartype\n@beartype.beartype\ndef f(x: jax.Array) -> float: return 1.0", "1.0", "2.0", "f",
    ),
    "a type-checked class": (
        "import jaxtyping, beartype\n@jaxtyping.jaxtyped(typechecker=beartype.beartype)\n"
        "class A(eqx.Module):\n    w: jaxtyping.Float[jax.Array, 'a']\n    def f(self): return 1.0",
        "1.0", "2.0", "A(jnp.ones(3))",
    ),
    "a recursion": (
        "def f(n): return g(n) if n else 1.0\ndef g(n): return f(n - 1)\nd = {}\nd['d'] = d, f\ndef h(): return d",
        "1.0", "2.0", "h",
    ),
}  # fmt: skip


def text(code, expression):
    namespace = {"__name__": "a_script"}
    exec(HEAD + textwrap.dedent(code), namespace)
    return code_text(eval(expression, namespace))


def texts():
    return {name: text(code, expression) for name, (code, *_, expression) in EDITS.items()}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit(name):
    code, old, new, expression = EDITS[name]
    before = text(code, expression)
    assert text("\n\n" + code, expression) == before
    assert text(code.replace(old, new), expression) != before


def test_a_module_of_the_user(tmp_path, monkeypatch):
    """`module.name`, in a package too."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("from . import losses\n")
    (tmp_path / "own_package" / "losses.py").write_text("import own_package\ndef f(): return own_package\nG = 1.0\n")
    namespace = {}
    exec("import own_package\ndef loss(): return own_package.losses.f() * own_package.losses.G", namespace)
    before = code_text(namespace["loss"])
    monkeypatch.setattr(namespace["own_package"].losses, "G", 2.0)
    assert code_text(namespace["loss"]) != before
    monkeypatch.undo()
    assert code_text(namespace["loss"]) == before


def test_use_changes_nothing():
    """Caches of JAX, Equinox and Python fill; loggers are configured."""
    namespace = {"__name__": "a_script"}
    code = """
    log = logging.getLogger("eqx_ensemble_test")
    @functools.cache
    def cached(x): return x
    @jax.jit
    def jitted(x): return x
    @eqx.filter_jit
    def filtered(x): return x
    @functools.singledispatch
    def single(x): return x
    class A(eqx.Module, abc.ABC):
        w: jax.Array
        @jax.jit
        def f(self): return self.w
        def __call__(self, x):
            log.debug("called")
            return single(filtered(jitted(cached(x)))) + self.f()
    a = A(jnp.ones(()))
    """
    exec(HEAD + textwrap.dedent(code), namespace)
    import copy
    import pickle

    a = namespace["a"]
    before = code_text(a)
    a(3), isinstance(3, namespace["A"]), copy.copy(a), hash(namespace["A"])
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(a)
    namespace["log"].setLevel("ERROR")
    namespace["log"].isEnabledFor(10)
    assert code_text(a) == before


def test_a_deep_structure():
    deep = []
    for _ in range(5000):
        deep = [deep]
    assert code_text(lambda: deep) == code_text(lambda: deep)


PROGRAM = """
import sys
from tests.train import test_code_texts as t
print(t.texts())
"""


@pytest.mark.slow
def test_another_process_gives_the_same_text():
    """Its addresses are others, and so are the orders of its sets and what is in its caches."""
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"
    ]
    assert said[0] == said[1] == f"{texts()}\n".encode()
