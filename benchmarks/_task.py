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
from _data import Data, Split

import eqx_ensemble as ee


@dataclasses.dataclass(frozen=True)
class Amount:
    """`[amount]` of `quality.toml`."""

    folds: int
    members: int
    most: int
    steps: int
    batch_size: int
    width: int
    learning_rate: float
    patience: int
    draws: int
    decays: list[float]
    tuning_rates: list[float]

    @property
    def all_steps(self) -> int:
        """Of one run that costs as much as all members."""
        return self.steps * self.members

    @property
    def adam(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """One fold of one data set. Decays, and for real targets the noise, are those of the best validation rows."""

    data: Data
    amount: Amount
    fold: int

    @ft.cached_property
    def split(self) -> Split:
        return self.data.split(self.fold)

    @property
    def key(self) -> Any:
        return jax.random.key(self.fold)

    @property
    def inputs(self) -> np.ndarray:
        """All rows to predict: those of the test, and unknown ones."""
        return np.concatenate([self.split.test[0], self.split.unknown])

    @property
    def num_rows(self) -> int:
        return len(self.split.train[0])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the layers of a member: it gives logits, or a mean and a raw variance."""
        return (self.split.train[0].shape[1], self.amount.width, self.amount.width, self.data.num_classes or 2)

    @property
    def epochs(self) -> int:
        """That a member has at most where it stops early."""
        return max(1, self.amount.steps * self.amount.batch_size // self.num_rows)

    @ft.cached_property
    def _short(self) -> tuple[float, float]:
        return self._best_decay(self.amount.steps)

    @property
    def decay(self) -> float:
        """Of members that train for their own steps."""
        return self._short[0]

    @property
    def noise(self) -> float:
        """The error of one member, for members that predict no variance of their own."""
        return self._short[1]

    @ft.cached_property
    def long_decay(self) -> float:
        """Of one member that trains for the steps of all."""
        return self._best_decay(self.amount.all_steps)[0]

    @ft.cached_property
    def seeds(self) -> ee.Ensemble:
        """As many trained members as any method has."""
        return self.fit(self.build(self.amount.most)).ensemble

    @ft.cached_property
    def stopped(self) -> ee.Ensemble:
        """Members without a prior that stop early."""
        options = {"validation": self.split.validation, "patience": self.amount.patience, "epochs": self.epochs}
        return self.fit(self.build(), decay=0.0, steps=None, **options).ensemble

    @ft.cached_property
    def overfitted(self) -> ee.Ensemble:
        """Members without a prior that never stop."""
        return self.fit(self.build(), decay=0.0).ensemble

    @ft.cached_property
    def base(self) -> Any:
        """A model trained on rows `before`, to be tuned."""
        return self.fit(self.build(1), data=self.split.before, decay=self.amount.decays[0]).ensemble[0]

    def build(self, num_members: int | None = None, make: Any = None) -> ee.Ensemble:
        """Fresh members, the same at every call."""
        return ee.build(make or make_net(self.sizes), num_members or self.amount.members, key=self.key)

    def fit(
        self, ensemble: Any, optimiser: Any = None, *, loss: Any = None, data: Any = None, **options: Any
    ) -> ee.Run:
        """A run of a member's steps with its decay; with `long=True` of the steps of all, with theirs."""
        long = options.pop("long", False)
        decay = options.pop("decay", None)
        if decay is None:
            decay = self.long_decay if long else self.decay
        options = {"steps": self.amount.all_steps if long else self.amount.steps} | options
        if isinstance(ensemble, ee.Ensemble):
            decays = jnp.broadcast_to(jnp.asarray(decay, jnp.float32), (ensemble.num_members,))
            options["hyper"] = {"decay": decays} | options.pop("hyper", {})
        return ee.fit(
            ensemble,
            with_prior(nll) if loss is None else loss,
            self.amount.adam if optimiser is None else optimiser,
            self.split.train if data is None else data,
            batch_size=self.amount.batch_size,
            progress=False,
            key=self.key,
            **options,
        )

    def mixture(self, outputs: Any) -> Any:
        """The prediction of members that have `outputs` `(members, rows, outputs)`."""
        return (
            np.asarray(outputs) if self.data.num_classes else tuple(map(np.asarray, as_gaussian(jnp.asarray(outputs))))
        )

    def validation_loss(self, predict: Callable[[np.ndarray], Any]) -> float:
        """The negative log-likelihood of a mixture on the validation rows; infinite where it is NaN."""
        x, y = self.split.validation
        parts = predict(x)
        found = float(ee.scores.nll(parts, y) if self.data.num_classes else ee.scores.nll_gaussian_mixture(*parts, y))
        return found if np.isfinite(found) else np.inf

    def _best_decay(self, steps: int) -> tuple[float, float]:
        """The decay, and for real targets the root mean squared error."""
        decays = self.amount.decays
        run = self.fit(self.build(len(decays)), decay=decays, steps=steps)
        x, y = self.split.validation
        outputs = np.asarray(ee.predict(run.ensemble, x))
        best = int(np.argmin([self.validation_loss(lambda _, own=own: self.mixture(own[None])) for own in outputs]))
        noise = 1.0 if self.data.num_classes else float(np.sqrt(np.mean((outputs[best, :, 0] - y) ** 2)))
        return decays[best], noise


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A trained method.

    `predict(inputs)` gives the logits of components `(components, rows, classes)`, or their means and variances
    `(components, rows)`; scores are those of their mixture, or with `group` the mean over mixtures of so many of them.
    `weights` are those that a prediction needs.
    """

    predict: Callable[[np.ndarray], Any]
    weights: int
    group: int = 0


def of_members(task: Task, ensemble: ee.Ensemble, group: int = 0) -> Fitted:
    """The mixture of an ensemble's members, or of groups of them."""
    weights = num_weights(ensemble.stacked)
    share = group / ensemble.num_members if group else 1
    return Fitted(lambda x: task.mixture(ee.predict(ensemble, x)), round(weights * share), group)


def num_weights(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)))


class Net(eqx.Module):
    """An MLP, with dropout behind each of its hidden layers if `rate` is above 0."""

    layers: tuple[eqx.nn.Linear, ...]
    dropout: eqx.nn.Dropout

    def __init__(self, sizes: tuple[int, ...], rate: float = 0.0, *, key: Any):
        keys = jax.random.split(key, len(sizes) - 1)
        self.layers = tuple(eqx.nn.Linear(a, b, key=k) for a, b, k in zip(sizes, sizes[1:], keys, strict=False))
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x: Any, key: Any = None) -> Any:
        *hidden, last = self.layers
        keys = [None] * len(hidden) if key is None else jax.random.split(key, len(hidden))
        for layer, layer_key in zip(hidden, keys, strict=True):
            x = self.dropout(jax.nn.relu(layer(x)), key=layer_key)
        return last(x)


@ft.cache
def make_net(sizes: tuple[int, ...]) -> Any:
    """One function for all folds: one compiled program."""
    return lambda key: Net(sizes, key=key)


def as_gaussian(outputs: Any) -> tuple[Any, Any]:
    """The mean and the variance that two outputs stand for."""
    return outputs[..., 0], jax.nn.softplus(outputs[..., 1]) + 1e-3


def row_losses(outputs: Any, y: Any) -> Any:
    """Negative log-likelihoods of real targets or class indices `y`; all axes of `outputs` but the last are kept."""
    if jnp.issubdtype(y.dtype, jnp.integer):
        log_p = jax.nn.log_softmax(outputs)
        return -jnp.take_along_axis(log_p, jnp.broadcast_to(y, log_p.shape[:-1])[..., None], axis=-1)[..., 0]
    mean, variance = as_gaussian(outputs)
    return 0.5 * (jnp.log(2 * jnp.pi * variance) + (y - mean) ** 2 / variance)


def nll(model: Any, batch: Any, key: Any) -> Any:
    """The mean over rows; of all heads, where there are any."""
    x, y = batch
    keys = jax.random.split(key, len(x))
    return jnp.mean(jax.vmap(row_losses)(jax.vmap(model)(x, keys), y))


def with_prior(loss: Any, norm: Any = None) -> Any:
    """A loss in nats, and the share that a row has of a Gaussian prior of the weights."""
    norm = squared_norm if norm is None else norm
    return lambda model, batch, key, hyper: loss(model, batch, key) + 0.5 * hyper["decay"] * norm(model)


def squared_norm(model: Any, num_submembers: int = 1, is_own: Callable[[Any], bool] = lambda leaf: False) -> Any:
    """Of all weights. Those of one sub-member alone count as their mean, as its loss does in a mean of theirs."""
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return sum(jnp.sum(leaf**2) / (num_submembers if is_own(leaf) else 1) for leaf in leaves)
