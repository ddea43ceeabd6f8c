"""What all methods share: data, members, the loss with its prior, the number of steps, and what they give."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _members import Net, as_gaussian, loss
from _tables import Split

import eqx_ensemble as ee

LEARNING_RATE = 3e-3
ADAM = optax.adam(LEARNING_RATE)


@dataclasses.dataclass(frozen=True)
class Amount:
    """How much is compared. `timed` folds train every method twice."""

    folds: int = 5
    timed: int = 3
    members: int = 8
    steps: int = 2000
    draws: int = 40
    decays: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What compiled programs depend on: sizes of layers, rows to train by, what validation rows chose.

    `noise` is the error of one member on them, for members that predict no variance of their own.
    """

    sizes: tuple[int, ...]
    num_classes: int
    num_rows: int
    amount: Amount
    decay: float = 0.0
    long_decay: float = 0.0
    noise: float = 1.0

    @property
    def all_steps(self) -> int:
        """Of one run that costs as much as all members."""
        return self.amount.steps * self.amount.members

    @property
    def prior_precision(self) -> float:
        """Of every weight: the decay is its share of one row."""
        return self.decay * self.num_rows


@dataclasses.dataclass(frozen=True)
class Task:
    """One split, and its setting."""

    split: Split
    setting: Setting
    fold: int
    batch_size: int = 32

    @property
    def key(self) -> Any:
        """Every fold has its own."""
        return jax.random.key(self.fold)

    @property
    def amount(self) -> Amount:
        return self.setting.amount

    @property
    def in_one_run(self) -> "Task":
        """The task of one run that costs as much as all members, with the decay for that."""
        return dataclasses.replace(self, setting=dataclasses.replace(self.setting, decay=self.setting.long_decay))

    @property
    def inputs(self) -> np.ndarray:
        """All rows to predict: those of the test, and unknown ones."""
        return np.concatenate([self.split.test[0], self.split.unknown])

    def build(self, num_members: int | None = None) -> ee.Ensemble:
        """Fresh members, the same at every call."""
        return ee.build(
            plain(self.setting.sizes), self.amount.members if num_members is None else num_members, key=self.key
        )

    def fit(self, ensemble: ee.Ensemble, optimiser: Any = ADAM, *, loss: Any = None, data: Any = None, **options: Any):
        """A run of the task's steps, or of those in `options`; without early stopping."""
        options = {"steps": self.amount.steps, "batch_size": self.batch_size, "key": self.key} | options
        loss = penalised(self.setting.decay) if loss is None else loss
        data = self.split.train if data is None else data
        return ee.fit(ensemble, loss, optimiser, data, progress=False, **options)

    def mixture(self, outputs: Any) -> Any:
        """The prediction of members that have `outputs` `(members, rows, outputs)`."""
        return (
            np.asarray(outputs)
            if self.setting.num_classes
            else tuple(map(np.asarray, as_gaussian(jnp.asarray(outputs))))
        )

    def validation_loss(self, outputs: Any) -> np.ndarray:
        """The negative log-likelihood of each member `(members,)` on the validation rows."""
        y = self.split.validation[1]
        if self.setting.num_classes:
            scores = [ee.scores.nll(member[None], y) for member in np.asarray(outputs)]
        else:
            scores = [ee.scores.nll_gaussian(*as_gaussian(member), y) for member in jnp.asarray(outputs)]
        return np.array(scores, float)


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A trained method.

    `predict(inputs)` gives the logits of components `(components, rows, classes)`, or their means and variances
    `(components, rows)`. `num_bytes` are those of the weights that a prediction needs. The scores of `separate`
    components are means over them; of others, those of their mixture.
    """

    predict: Callable[[np.ndarray], Any]
    num_bytes: int
    separate: bool = False


@ft.cache
def plain(sizes: tuple[int, ...]) -> Callable[[Any], eqx.Module]:
    return lambda key: Net(sizes, 0.0, key=key)


@ft.cache
def penalised(decay: float) -> Callable[[Any, Any, Any], jax.Array]:
    """The mean negative log-likelihood of rows, and the share of a Gaussian prior of all weights."""
    return lambda model, batch, key: loss(model, batch, key) + 0.5 * decay * squared_norm(model)


def squared_norm(model: Any, num_submembers: int = 1, is_own: Callable[[Any], bool] = lambda leaf: False) -> jax.Array:
    """Of all weights. Those of one sub-member alone count as their mean, as its loss does in a mean of theirs."""
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return sum(jnp.sum(leaf**2) / (num_submembers if is_own(leaf) else 1) for leaf in leaves)


def num_bytes(tree: Any) -> int:
    """Of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)))


def members(task: Task, ensemble: ee.Ensemble) -> Fitted:
    """The mixture of an ensemble's members."""
    return Fitted(lambda x: task.mixture(ee.predict(ensemble, x)), num_bytes(ensemble.stacked))


def validation_loss(task: Task, predict: Callable[[np.ndarray], Any]) -> float:
    """The negative log-likelihood of a mixture on the validation rows; infinite where it is NaN."""
    x, y = task.split.validation
    parts = predict(x)
    found = float(ee.scores.nll(parts, y) if task.setting.num_classes else ee.scores.nll_gaussian_mixture(*parts, y))
    return found if np.isfinite(found) else np.inf


def choose_decays(task: Task) -> Task:
    """The task with the decays that give one member the best validation rows, after its own steps and those of all."""
    decay, noise = _best_decay(task, task.amount.steps)
    long_decay, _ = _best_decay(task, task.setting.all_steps)
    setting = dataclasses.replace(task.setting, decay=decay, long_decay=long_decay, noise=noise)
    return dataclasses.replace(task, setting=setting)


def _best_decay(task: Task, steps: int) -> tuple[float, float]:
    """The decay, and for real targets the root mean squared error."""
    decays = task.amount.decays
    ensemble = ee.build(plain(task.setting.sizes), len(decays), key=task.key)
    run = task.fit(ensemble, constant_adam, loss=_decayed, hyper={"decay": jnp.array(decays)}, steps=steps)
    x, y = task.split.validation
    outputs = np.asarray(ee.predict(run.ensemble, x))
    best = int(np.nanargmin(task.validation_loss(outputs)))
    noise = 1.0 if task.setting.num_classes else float(np.sqrt(np.mean((outputs[best, :, 0] - y) ** 2)))
    return decays[best], noise


def constant_adam(hyper: Any) -> optax.GradientTransformation:
    """For hyper-parameters that only the loss has."""
    return ADAM


def _decayed(model: Any, batch: Any, key: Any, hyper: Any) -> jax.Array:
    return loss(model, batch, key) + 0.5 * hyper["decay"] * squared_norm(model)
