from typing import Any

import equinox as eqx

from .. import tree as _tree
from .._check import check_weight_count
from ..tree._sum import combine_trees
from ._check import check_ensemble, check_equal_members
from ._ensemble import Ensemble, M
from ._parts import one_alone


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
