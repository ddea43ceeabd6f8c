"""One model of several sub-members, which share its weights or its forward pass."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import numpy as np
from _members import loss

import eqx_ensemble as ee

from ._task import Fitted, Setting, Task, num_bytes, plain, squared_norm

efficient = ee.methods.efficient


def batch_ensemble(task: Task) -> Fitted:
    """Rank-one factors of every weight; a step has all rows for each sub-member, and counts as often."""
    return _train(task, "batch_ensemble", task.amount.members, task.amount.steps, "same")


def tabm(task: Task) -> Fitted:
    """As before, with factors that start at 1 except for the first."""
    return _train(task, "tabm", task.amount.members, task.amount.steps, "same")


def packed(task: Task) -> Fitted:
    """Four narrow models, which together have about the weights and operations of one."""
    task = task.in_one_run
    return _train(task, "packed_ensemble", 4, task.setting.all_steps, "same")


def masksembles(task: Task) -> Fitted:
    """Sub-members that see parts of the hidden features, and of the rows of a batch."""
    task = task.in_one_run
    return _train(task, "masksembles", 4, task.setting.all_steps, "split")


def mimo(task: Task) -> Fitted:
    """Three inputs and outputs of one forward pass."""
    task = task.in_one_run
    return _train(task, "mimo", 3, task.setting.all_steps, "shuffle")


def _train(task: Task, kind: str, num_submembers: int, steps: int, rows: str) -> Fitted:
    ensemble = ee.build(_make(task.setting.sizes, kind, num_submembers), 1, key=task.key)
    ensemble = task.fit(ensemble, loss=_penalised(task.setting, kind, num_submembers, rows), steps=steps).ensemble
    return Fitted(
        lambda x: task.mixture(efficient.as_members(np.asarray(ee.predict(ensemble, x)))), num_bytes(ensemble.stacked)
    )


@ft.cache
def _make(sizes: tuple[int, ...], kind: str, num_submembers: int) -> Any:
    def make(key: Any) -> Any:
        own, convert = jax.random.split(key)
        return getattr(efficient, kind)(plain(sizes)(own), num_submembers, key=convert)

    return make


@ft.cache
def _penalised(setting: Setting, kind: str, num_submembers: int, rows: Any) -> Any:
    """The prior is that of the weights, and not of the factors, which are about 1."""
    mean_loss = efficient.mean_loss(loss, rows=rows)

    def is_own(leaf: Any) -> bool:
        """Whether an array belongs to sub-members, one by one: in MIMO, the parts for their inputs and outputs."""
        if kind == "mimo":
            first, last = num_submembers * setting.sizes[0], num_submembers * setting.sizes[-1]
            return leaf.ndim == 2 and (leaf.shape[1] == first or leaf.shape[0] == last)
        return kind != "masksembles" and leaf.shape[0] == num_submembers

    def total(model: Any, batch: Any, key: Any) -> jax.Array:
        weights = eqx.filter(model, eqx.is_inexact_array)
        slow = jax.tree.map(lambda w, label: w if label == "slow" else None, weights, efficient.weight_labels(weights))
        return mean_loss(model, batch, key) + 0.5 * setting.decay * squared_norm(slow, num_submembers, is_own)

    return total
