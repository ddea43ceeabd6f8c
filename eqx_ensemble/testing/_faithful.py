import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .. import _keys
from .. import tree as _tree
from .._build import build
from .._caller import caller
from .._check import check_number, check_optional_function, is_key, is_member_array
from .._ensemble import Ensemble, concatenate, stack
from .._pytree import PyTree
from .._warnings import ignore_warnings


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


def raise_failures(checks: list[Check]) -> list[Check]:
    """Returns the checks, or raises an error that lists them if one failed."""
    if any(check.problem is not None for check in checks):
        raise AssertionError("\n".join([f"`{caller()}`:", *map(str, checks)]))
    return checks


def check_ensemble(
    make: Callable[..., Any],
    x: PyTree = None,
    *,
    fn: Callable[..., Any] | None = None,
    num_members: int = 4,
    rtol: float = 1e-5,
    key: Any,
) -> list[Check]:
    """Checks that a model can be a member: that its ensemble is built, unstacked and called correctly.

    A model without random numbers may have equal members. One that draws random numbers without its key fails.

    **Arguments:**

    - `make`: makes one member from one key, as for [`eqx_ensemble.build`][].
    - `x`: one example; if given, the ensemble is called as well.
    - `fn`: called instead of the member, as `fn(model, x)` or `fn(model, x, state)`.
    - `num_members`: the number of members to build.
    - `rtol`: the tolerance for weights and outputs, relative to the largest number of each array.
    - `key`: the root key.

    **Returns:** a list of [`eqx_ensemble.testing.Check`][].

    **Raises:** `AssertionError` that lists all checks if one fails; `TypeError` for a `fn` that is not a function;
    `ValueError` for a `fn` without `x`.

    ```python
    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    for check in ee.testing.check_ensemble(make, jnp.ones(3), key=key):
        print(check)

    cell = lambda key: eqx.nn.GRUCell(3, 2, key=key)
    call = lambda cell, x: cell(x, jnp.zeros(2))
    ee.testing.check_ensemble(cell, jnp.ones(3), fn=call, key=key)
    ```
    """
    check_optional_function(fn, "fn", example="lambda model, x: model(x)")
    if fn is not None and x is None:
        raise ValueError(f"`{caller()}` needs `x` with `fn`, which is called as `fn(model, x)`; got `x=None`.")
    check_number(rtol, "rtol", least=0)
    made = build(make, num_members, key=key)
    ensemble, state = made if isinstance(made, tuple) else (made, None)
    alone = [make(key) for key in _keys.member_keys(key, num_members)]
    models = [one[0] if state is not None else one for one in alone]
    middle = num_members // 2
    parts = [ensemble[i : i + 1] for i in range(num_members)]

    with ignore_warnings("`stack` got identical models"):  # one of the checks is for them
        again = stack(ensemble.unstack())

    checks = [
        same("each member equals what `make` gives alone", ensemble.unstack(), models, rtol),
        same("stacking the members gives the ensemble", again, ensemble, 0.0),
        same("an index gives a member", ensemble[middle], ensemble.unstack()[middle], 0.0),
        same("a mask keeps members and their ids", ensemble[ensemble.ids >= middle], ensemble[middle:], 0.0),
        same("concatenated parts give the whole", concatenate(parts), ensemble, 0.0),
        same("it passes through `filter_jit`", eqx.filter_jit(lambda tree: tree)(ensemble), ensemble, 0.0),
        differ("members with different keys differ", ensemble),
    ]
    if x is not None:
        checks += _calls(ensemble, state, x, fn, rtol)
    return raise_failures(checks)


def _calls(ensemble: Ensemble, state: Any, x: PyTree, fn: Callable[..., Any] | None, rtol: float) -> list[Check]:
    states = [()] * len(ensemble) if state is None else [(one,) for one in _tree.unstack(state)]
    rest = () if state is None else (state,)
    call = (lambda model, *args: model(*args)) if fn is None else fn
    outputs = [call(model, x, *own) for model, own in zip(ensemble, states, strict=True)]
    called = ensemble(x, *rest) if fn is None else ensemble.map(fn, x, *rest)
    return [same("calling it calls every member", called, _tree.stack(outputs), rtol)]
