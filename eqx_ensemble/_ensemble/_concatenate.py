from collections.abc import Iterable
from typing import Any, overload

import equinox as eqx
import numpy as np

from .. import _keys
from .. import tree as _tree
from .._check import MemberMismatchError, check_flag, check_weight_count
from .._keys import check_distinct_ids
from ..tree._compare import Rules, compare_trees
from ..tree._sum import combine_trees
from ._check import check_ensemble, check_ensembles, check_equal_members, check_equal_shared
from ._ensemble import Ensemble, M, one_alone
from ._group import Group, member_positions, part_names


def average(ensemble: Ensemble[M], weights: Any = None) -> M:
    """Averages the members' weights into one model (a model soup).

    Floating-point arrays are averaged in at least float32; other arrays must be equal in all members.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `weights`: `(members,)`, normalised by their sum; uniform if not given.

    **Returns:** one ordinary model.

    **Raises:** `ValueError` for a wrong number of weights, for weights that are not finite, and if they sum to 0;
    `MemberMismatchError` if other arrays differ between members; `TypeError` for a group or another type.

    ??? cite
        [Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing inference
        time](https://arxiv.org/abs/2203.05482), Wortsman et al., 2022.
    """
    check_ensemble(ensemble, name="average")
    check_weight_count(weights, ensemble.num_members, name="average")
    inexact, exact = eqx.partition(ensemble.arrays, eqx.is_inexact_array)
    check_equal_members(exact, name="average")
    kept, _ = _tree.take((exact, ensemble.ids), 0)
    members = [part for part, _ in _tree.unstack((inexact, ensemble.ids))]
    mean = combine_trees(members, weights, name="average", mean=True)
    return one_alone(eqx.combine(mean, kept), ensemble.shared)


@overload
def concatenate(ensembles: Iterable[Ensemble[M]], *, renumber: bool = False) -> Ensemble[M]: ...
@overload
def concatenate(ensembles: Iterable[Ensemble[M] | Group], *, renumber: bool = False) -> Group: ...
def concatenate(ensembles: Iterable[Any], *, renumber: bool = False) -> Ensemble[Any] | Group:
    """Concatenates ensembles of one architecture, or groups, in the order given.

    **Arguments:**

    - `ensembles`: the ensembles or groups. Shared leaves must be equal.
    - `renumber`: give the members the ids `0, 1, 2, ...` instead of keeping theirs.

    **Returns:** an ensemble; an [`eqx_ensemble.Group`][] if one of the inputs is a group, in which parts with the same
    name are concatenated and each ensemble is a part.

    **Raises:** `ValueError` if two members have the same id and `renumber` is not set, or if there is no ensemble;
    `MemberMismatchError` if the ensembles do not fit together; `TypeError` for anything else.

    ```python
    make = lambda key: eqx.nn.Linear(2, 1, key=key)
    old = ee.build(make, 4, key=key)
    new = ee.build(make, ids=[4, 5], key=key)
    ee.concatenate([old, new])  # the same members as ee.build(make, 6, key=key)
    ```
    """
    listed = check_ensembles(ensembles, name="concatenate")
    check_flag(renumber, "renumber", name="concatenate")
    ensembles = [one for one in listed if isinstance(one, Ensemble)]
    if len(ensembles) < len(listed):
        return _of_groups(listed, renumber=renumber)
    return _of_ensembles(ensembles, renumber=renumber)


def _of_ensembles(ensembles: list[Ensemble[Any]], *, renumber: bool) -> Ensemble[Any]:
    stacked, ids = _tree.concatenate([ensemble.per_member() for ensemble in ensembles])
    shared = [ensemble.shared for ensemble in ensembles]
    rules = Rules(needs="ensembles whose members share the same", noun="ensemble")
    compare_trees(shared, name="concatenate", rules=rules)
    check_equal_shared(shared, name="concatenate")
    if renumber:
        ids = _keys.member_ids(ids.shape[0], name="concatenate")
    else:
        check_distinct_ids(ids, "Build new members with `build(make, ids=..., key=key)`, or pass `renumber=True`.")
    return Ensemble(stacked, shared[0], ids)


def _of_groups(listed: list[Ensemble[Any] | Group], *, renumber: bool) -> Group:
    """Concatenates parts with the same name; `positions` are those of their members in the result."""
    parts: dict[str, list[Ensemble[Any]]] = {name: [] for one in listed if isinstance(one, Group) for name in one.parts}
    positions: dict[str, list[np.ndarray]] = {name: [] for name in parts}
    start = 0
    for one in listed:
        if isinstance(one, Group):
            own = {name: (part, member_positions(one)[name]) for name, part in one.parts.items()}
        else:
            own = {part_names([one], taken=parts)[0]: (one, np.arange(one.num_members))}
        for name, (part, of_part) in own.items():
            parts.setdefault(name, []).append(part)
            positions.setdefault(name, []).append(start + of_part)
        start += one.num_members
    order = np.argsort(np.concatenate([x for name in sorted(positions) for x in positions[name]])).tolist()
    joined = {name: _of_part(name, own, renumber=renumber) for name, own in parts.items()}
    return Group(joined, order=order, renumber=renumber)


def _of_part(name: str, ensembles: list[Ensemble[Any]], *, renumber: bool) -> Ensemble[Any]:
    try:
        return _of_ensembles(ensembles, renumber=renumber)
    except MemberMismatchError as error:
        error.add_note(f"Both groups have a part `{name}`, and parts of one name become one ensemble.")
        raise
