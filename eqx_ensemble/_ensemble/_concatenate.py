from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import equinox as eqx
import numpy as np

from .. import tree as _tree
from .._caller import caller
from .._check import (
    check_flag,
    check_integer_ids,
    check_sequence,
    check_weight_count,
    is_traced,
    kind_text,
)
from .._keys import check_distinct_ids
from ..tree._engine import combine_trees
from ._check import check_ensemble, check_equal_members
from ._cut import ids_of, join, with_ids
from ._ensemble import Ensemble, M, one_alone


def average_parameters(ensemble: Ensemble[M], weights: Any = None) -> M:
    """Averages the members' weights into one model (a model soup).

    Floating-point arrays are averaged in at least float32; other arrays must be equal in all members.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `weights`: `(members,)`, normalised by their sum; uniform if not given.

    **Returns:** one ordinary model.

    **Raises:** `ValueError` for a wrong number of weights, or weights that are not finite or sum to 0;
    `MemberMismatchError` if other arrays differ between members; `TypeError` for another type.

    ??? cite
        [Model soups](https://arxiv.org/abs/2203.05482), Wortsman et al., 2022.
    """
    check_ensemble(ensemble)
    check_weight_count(weights, ensemble.num_members)
    inexact, exact = eqx.partition(ensemble.arrays, eqx.is_inexact_array)
    check_equal_members(exact)
    kept, _ = _tree.take((exact, ensemble.ids), 0)
    members = [part for part, _ in _tree.unstack((inexact, ensemble.ids))]
    mean = combine_trees(members, weights, mean=True)
    return one_alone(eqx.combine(mean, kept), ensemble.shared)


def check_alike(values: Any) -> list[Any]:
    """Raises unless `values` are all ensembles, all runs, or all training states. Returns them as a list."""
    values = [values] if isinstance(values, Ensemble) else check_sequence(values, "ensembles", of="ensembles")
    if not values:
        raise ValueError(f"`{caller()}` needs at least one ensemble, got none.")
    is_other = not isinstance(values[0], Ensemble) and ids_of(values[0]) is not None
    kind = type(values[0]) if is_other else Ensemble
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            wanted = f"`{kind.__name__}` only" if is_other else "ensembles"
            raise TypeError(
                f"`{caller()}` needs {wanted}, got {kind_text(value)} at position {i}.\n"
                "Make an ensemble of models with `stack([model, ...])`."
            )
        if isinstance(value, Ensemble):
            check_integer_ids(value.ids)
    return values


@runtime_checkable
class Trained(Protocol):
    """A run or a training state."""

    @property
    def ensemble(self) -> Ensemble[Any]: ...


R = TypeVar("R", bound=Trained)


@overload
def concatenate(ensembles: Iterable[Ensemble[M]], *, renumber: bool = False) -> Ensemble[M]: ...
@overload
def concatenate(ensembles: Iterable[R], *, renumber: bool = False) -> R: ...
def concatenate(ensembles: Iterable[Any], *, renumber: bool = False) -> Any:
    """Concatenates ensembles of one architecture, runs or training states, in the order given.

    **Arguments:**

    - `ensembles`: ensembles, runs or training states. What members share must be equal: shared leaves, the step, the
        plan, the steps of the curves.
    - `renumber`: give the members the ids `0, 1, 2, ...` instead of keeping theirs.

    **Returns:** the same type.

    **Raises:** `ValueError` if two members have the same id and `renumber` is not set, or if there is no ensemble;
    `MemberMismatchError` if the ensembles do not fit together; `TypeError` for anything else.

    ```python
    make = lambda key: eqx.nn.Linear(2, 1, key=key)
    old = ee.build(make, 4, key=key)
    new = ee.build(make, ids=[4, 5], key=key)
    ee.concatenate([old, new])  # the same members as ee.build(make, 6, key=key)
    ```
    """
    listed = check_alike(ensembles)
    check_flag(renumber, "renumber")
    ids = [ids_of(one) for one in listed]
    if renumber:
        ends = np.cumsum([len(own) for own in ids])
        listed = [
            with_ids(one, np.arange(end - len(own), end)) for one, own, end in zip(listed, ids, ends, strict=True)
        ]
    elif not any(map(is_traced, ids)):
        fix = "Build new members with `build(make, ids=..., key=key)`, or pass `renumber=True`."
        check_distinct_ids(np.concatenate([np.asarray(own) for own in ids]), fix)
    return join(listed)
