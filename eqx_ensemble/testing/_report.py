import dataclasses
import itertools
from collections.abc import Mapping

import equinox as eqx
import jax
import numpy as np

from .._check import is_key, is_member_array
from .._ensemble import Ensemble
from .._pytree import PyTree


@dataclasses.dataclass(frozen=True)
class Check:
    """One check, which prints as one line.

    **Attributes:**

    - `name`: the property that was checked.
    - `problem`: a description of the failure; `None` if the check passed.
    """

    name: str
    problem: str | None

    def __str__(self) -> str:
        return f"ok      {self.name}" if self.problem is None else f"FAILED  {self.name}: {self.problem}"


def same(
    name: str, got: PyTree, expected: PyTree, rtol: float, *, slack: Mapping[str, float] | None = None, noun: str = ""
) -> Check:
    """Checks that two trees hold the same arrays, within `rtol` or `slack` of each array's largest number."""
    problem = unlike(got, expected)
    if problem is not None:
        return Check(name, problem)
    for where, distance in distances(got, expected).items():
        allowed = max(rtol, (slack or {}).get(where, 0.0))
        if not distance <= allowed:
            return Check(name, f"at {noun}`{where}`: relative distance {distance:.2g}, at most {allowed:.2g} allowed")
    return Check(name, None)


def unlike(got: PyTree, expected: PyTree) -> str | None:
    """Why the arrays of two trees cannot be compared, or `None`."""
    ours, theirs = _arrays(got), _arrays(expected)
    if list(ours) != list(theirs):
        return "they hold different arrays"
    for (where, x), y in zip(ours.items(), theirs.values(), strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"at `{where}`: {y.dtype}{y.shape} became {x.dtype}{x.shape}"
    return None


def distances(got: PyTree, expected: PyTree) -> dict[str, float]:
    """The distance of each array from the expected one, relative to the largest number of the latter."""
    ours, theirs = _arrays(got), _arrays(expected)
    return {where: _distance(x, theirs[where]) for where, x in ours.items()}


def _arrays(tree: PyTree) -> dict[str, np.ndarray]:
    found, _ = jax.tree_util.tree_flatten_with_path(eqx.filter(tree, is_member_array))
    return {jax.tree_util.keystr(path): np.asarray(jax.random.key_data(x) if is_key(x) else x) for path, x in found}


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    if x.size == 0 or np.array_equal(x, y):
        return 0.0
    x, y = (z.astype(np.complex128 if np.iscomplexobj(z) else np.float64) for z in (x, y))
    with np.errstate(invalid="ignore"):  # infinite numbers give NaN, which always fails
        return float(np.max(np.abs(x - y)) / max(np.max(np.abs(y)), np.finfo(np.float64).tiny))


def differ(name: str, ensemble: Ensemble) -> Check:
    """Checks that some array differs between all members. Constant arrays do not indicate an unused key."""
    arrays = [np.asarray(x, np.float64) for x in jax.tree.leaves(ensemble.stacked) if eqx.is_inexact_array(x)]
    random = any(len(np.unique(x)) > 1 for x in arrays)
    members = range(len(ensemble)) if random else ()
    equal = (pair for pair in itertools.combinations(members, 2) if all(np.array_equal(*x[[*pair]]) for x in arrays))
    first = next(equal, None)
    return Check(name, None if first is None else "members {} and {} have the same arrays".format(*first))


def raise_failures(checks: list[Check], name: str) -> list[Check]:
    """Returns the checks, or raises an error that lists them if one failed."""
    if any(check.problem is not None for check in checks):
        raise AssertionError("\n".join([f"`{name}`:", *map(str, checks)]))
    return checks
