from collections.abc import Mapping
from typing import Any

import equinox as eqx

from .._check import MemberMismatchError, kind_text
from ._ensemble import Ensemble
from ._group import Group


def check_no_dict(models: Any, *, name: str) -> None:
    """No dict: a group names the parts of models after their classes."""
    if isinstance(models, Mapping):
        fix = (
            "`Group({name: ensemble, ...})` makes a group of ensembles. Pass models as a list: `list(models.values())`."
        )
        raise TypeError(f"`{name}` needs a list of models, got {kind_text(models)}.\n{fix}")


def check_models(models: list[Any], *, name: str) -> list[Any]:
    """Raises unless all items are models. Returns them."""
    for i, model in enumerate(models):
        fix = None
        if isinstance(model, Ensemble | Group):
            fix = "`Group([first, second])` makes a group of ensembles, `concatenate([first, second])` of groups."
        elif isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], eqx.nn.State):
            fix = "Pass the models alone, and their states to `predict`: `state={part: tree.stack(states)}`."
        elif not callable(model):
            fix = "Members are models that can be called."
        if fix is not None:
            raise TypeError(f"`{name}` needs models, got {kind_text(model)} at position {i}.\n{fix}")
    return models


def check_ids_of_models(ids: Any, num_models: int) -> Any:
    """Raises unless there is one id per model. Returns the ids."""
    if len(ids) != num_models:
        raise MemberMismatchError(f"`group` needs one id per model: {num_models} models, {len(ids)} ids.")
    return ids
