from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import _keys
from .._check import MemberMismatchError
from ..tree._check import check_trees
from ..tree._compare import compare_trees
from ._check_models import check_ids_of_models, check_models, check_no_dict
from ._construct import stack
from ._group import Group
from ._part_names import part_names


def group(models: Iterable[Any], *, ids: Any = None) -> Group:
    """Makes an [`eqx_ensemble.Group`][] of a list of models of any architectures.

    Models that differ only in the values of their arrays become one part, as by [`eqx_ensemble.stack`][], and are
    computed together. Members and their predictions are in the order of the list. A model that differs in anything
    else, such as a dropout rate, is a separate part.

    **Arguments:**

    - `models`: the models. Parts are named after their classes: `MLP`, and `MLP_2` for the second architecture of that
        class.
    - `ids`: the members' ids `(members,)`; `0, 1, 2, ...` if not given.

    **Returns:** the group. To name the parts, pass them to [`eqx_ensemble.Group`][].

    **Raises:** `TypeError` for anything but a list of models; `ValueError` for an empty list; `MemberMismatchError` for
    a wrong number of `ids`.

    ```python
    first, second, third = jax.random.split(key, 3)
    models = [
        eqx.nn.MLP(2, 1, 8, 1, key=first),
        eqx.nn.Linear(2, 1, key=second),
        eqx.nn.MLP(2, 1, 8, 1, key=third),
    ]
    group = ee.group(models)
    group.parts  # {"Linear": one member, "MLP": two members}
    group(jnp.ones(2)).shape  # (3, 1), in the order of the list
    ```
    """
    check_no_dict(models, name="group")
    models = check_models(check_trees(models, name="group", noun="model"), name="group")
    numbers = _keys.member_ids(len(models) if ids is None else ids, name="group")
    numbers = check_ids_of_models(numbers, len(models))
    members: list[list[int]] = []
    for i, model in enumerate(models):
        alike = next((own for own in members if _is_alike(models[own[0]], model)), None)
        if alike is None:
            members.append([i])
        else:
            alike.append(i)
    ensembles = [stack([models[i] for i in own], ids=numbers[np.asarray(own)]) for own in members]
    parts = dict(zip(part_names(ensembles), zip(ensembles, members, strict=True), strict=True))
    given = [i for name in sorted(parts) for i in parts[name][1]]
    return Group({name: part for name, (part, _) in parts.items()}, order=np.argsort(np.asarray(given)).tolist())


def _is_alike(first: Any, second: Any) -> bool:
    """Whether two models can be stacked."""
    try:
        compare_trees([first, second], name="group")
    except MemberMismatchError:
        return False
    return True
