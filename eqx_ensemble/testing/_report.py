import dataclasses

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .. import _check
from .._ensemble import Ensemble


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at: its name, and what is wrong, or `None`. It prints as one line."""

    name: str
    problem: str | None

    def __str__(self) -> str:
        return f"ok      {self.name}" if self.problem is None else f"FAILED  {self.name}: {self.problem}"


def same(name: str, got: PyTree, expected: PyTree, rtol: float) -> Check:
    """Two trees hold the same arrays, within `rtol` of each array's largest number."""
    got, expected = (jax.tree_util.tree_flatten_with_path(eqx.filter(x, eqx.is_array))[0] for x in (got, expected))
    if [path for path, _ in got] != [path for path, _ in expected]:
        return Check(name, "they hold different arrays")
    for (path, x), (_, y) in zip(got, expected, strict=True):
        x, y = (np.asarray(jax.random.key_data(z) if _check.is_key(z) else z) for z in (x, y))
        if x.shape != y.shape or x.dtype != y.dtype:
            return Check(name, f"at `{jax.tree_util.keystr(path)}`: {y.dtype}{y.shape} became {x.dtype}{x.shape}")
        distance = _distance(x, y)
        if not distance <= rtol:
            where = jax.tree_util.keystr(path)
            return Check(name, f"at `{where}`: relative distance {distance:.2g}, at most {rtol:.2g} allowed")
    return Check(name, None)


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    if x.size == 0 or np.array_equal(x, y):
        return 0.0
    x, y = (z.astype(np.complex128 if np.iscomplexobj(z) else np.float64) for z in (x, y))
    return float(np.max(np.abs(x - y)) / max(np.max(np.abs(y)), np.finfo(np.float64).tiny))


def differ(name: str, ensemble: Ensemble) -> Check:
    """The members are not all alike."""
    arrays = [x for x in jax.tree.leaves(ensemble.stacked) if eqx.is_inexact_array(x)]
    distinct = any(len(np.unique(np.asarray(x, np.float64).reshape(len(x), -1), axis=0)) == len(x) for x in arrays)
    return Check(name, None if distinct or not arrays else "all members have the same arrays")


def raised(checks: list[Check], name: str) -> list[Check]:
    """The checks, or an error that lists them when one failed."""
    if any(check.problem is not None for check in checks):
        raise AssertionError("\n".join([f"`{name}`:", *map(str, checks)]))
    return checks
