"""Bad values for every argument of a function, and what became of each call."""

import dataclasses
import pathlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import eqx_ensemble as ee

_PACKAGE = str(pathlib.Path(ee.__file__).parent)

# A tired user's values. `np.int64(2)` and `np.float32(0.5)` are right wherever 2 and 0.5 are.
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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one call did: `"accepted"`, `"ours"` (an error of the library), or `"raw"` (anybody else's error)."""

    kind: str
    message: str
    result: Any = None


def call(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    """Calls `fn`, and says whose error came of it."""
    try:
        return Outcome("accepted", "", fn(**arguments))
    except Exception as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        ours = innermost.startswith(_PACKAGE) and "`" in text
        return Outcome("ours" if ours else "raw", f"{type(error).__name__}: {text}")


def each_bad(
    fn: Callable[..., Any], arguments: Mapping[str, Callable[[], Any]], names: tuple[str, ...]
) -> Iterator[tuple[str, str, Outcome]]:
    """The outcome of a call with one argument replaced, for each of `names` and each bad value."""
    for name in names:
        for label, value in BAD.items():
            made = {other: make() for other, make in arguments.items() if other != name}
            yield name, label, call(fn, {**made, name: value})


def array(*shape: int) -> jnp.ndarray:
    """Numbers that differ, between 0 and 1."""
    size = int(np.prod(shape))
    return jnp.asarray((np.arange(size) * 0.37 % 1.0).reshape(shape), jnp.float32)
