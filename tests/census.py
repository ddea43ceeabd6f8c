"""Bad values for every argument of a function, and the outcome of each call."""

import dataclasses
import inspect
import pathlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqx_ensemble as ee

_PACKAGE = str(pathlib.Path(ee.__file__).parent)

# What a tired user passes. NumPy's 2 and 0.5 are as good as Python's wherever those are.
BAD: dict[str, Any] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-1": -1,
    "0": 0,
    "text": "three",
    "int64": np.int64(2),
    "float32": np.float32(0.5),
    "array": np.ones((2, 5), np.float32),
    "None": None,
}
PYTHONS_OWN = {"int64": 2, "float32": 0.5}
# Functions of arrays are also given an array of three axes.
BAD_OF_ARRAYS = BAD | {"3d": np.ones((5, 7, 2), np.float32)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, arguments that it takes (each created for every call), and which of its arguments to spoil."""

    fn: Callable[..., Any]
    arguments: Mapping[str, Callable[[], Any]]
    spoiled: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments to spoil: by default all arguments of the function."""
        parameters = inspect.signature(self.fn).parameters.values()
        named = (p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        return self.spoiled or tuple(named)

    def call(self, name: str, value: Any) -> "Outcome":
        """The call with one argument spoiled."""
        made = {other: make() for other, make in self.arguments.items() if other != name}
        try:
            return Outcome("accepted", "", self.fn(**made, **{name: value}))
        except Exception as error:
            innermost = traceback.extract_tb(error.__traceback__)[-1].filename
            text = str(error).split("\n--------------------\n")[0]
            ours = innermost.startswith(_PACKAGE) and "`" in text
            return Outcome("refused" if ours else "raw", f"{type(error).__name__}: {text}")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call did: `"accepted"`, `"refused"` by a check of the library's own, or `"raw"`: another's error."""

    kind: str
    message: str
    result: Any = None


def outcomes(case: Case) -> Iterator[tuple[str, str, Outcome]]:
    """For every argument and every bad value: argument, label of the value, and the outcome."""
    for name in case.names:
        for label, value in BAD.items():
            yield name, label, case.call(name, value)


def assert_same(got: Any, expected: Any) -> None:
    """Two results are equal, as far as they are made of numbers; of runs, the members are looked at."""
    is_run = lambda x: isinstance(x, ee.Run)
    members = lambda tree: jax.tree.map(lambda x: x.ensemble if is_run(x) else x, tree, is_leaf=is_run)
    numbers = lambda tree: [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray | int | float)]
    for x, y in zip(numbers(members(got)), numbers(members(expected)), strict=True):
        if not jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key):
            np.testing.assert_array_equal(x, y)


def array(*shape: int) -> jax.Array:
    """Numbers that differ, between 0 and 1."""
    return jnp.asarray((np.arange(int(np.prod(shape))) * 0.37 % 1.0).reshape(shape), jnp.float32)
