import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .. import resample
from .._caller import caller
from .._check import check_number
from .._warnings import warn
from ._check import check_options
from ._protocol import (
    AbstractOwnMethod,
    MakeMember,
    Posterior,
    Task,
    add_to_loss,
    as_loss,
    as_made,
    check_above_zero,
    check_counts,
    check_maker,
)
from .priors import RandomisedPrior, draw_anchors, noisy_targets


class Seeds(AbstractOwnMethod):
    """A deep ensemble: members that differ by their initial weights and row orders.

    **Arguments:**

    - `num_members`: the number of members.

    ```python
    make = lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key)
    data = jax.random.normal(key, (100, 3)), jnp.arange(100) % 2
    method = ee.methods.Seeds(8)
    posterior = method.fit(make, "classification", optax.adam(1e-3), data, epochs=2, key=key)
    posterior.predict(data[0]).shape  # (8, 100, 2)
    ```

    ??? cite
        [Lakshminarayanan et al. 2017](https://arxiv.org/abs/1612.01474)
    """

    num_members: int
    template = as_made

    def __check_init__(self) -> None:
        check_counts(self)

    def train(self, task: Task) -> Posterior[Any]:
        return task.posterior(self)


class Bootstraps(AbstractOwnMethod):
    """Bagging: a deep ensemble whose members are trained on bootstraps of the rows.

    **Arguments:**

    - `num_members`: the number of members.
    - `size`: rows per member, as for [`eqx_ensemble.resample.bootstrap`][].

    ```python
    ee.methods.Bootstraps(8, size=0.5)
    ```

    ??? cite
        [Breiman 1996](https://doi.org/10.1007/BF00058655)
    """

    num_members: int
    _: dataclasses.KW_ONLY
    size: int | float | None = None
    template = as_made

    def __check_init__(self) -> None:
        check_counts(self)
        check_above_zero(self, "size")

    def train(self, task: Task) -> Posterior[Any]:
        check_options(task.options, ("rows",), "the method draws them")
        num_rows = task.num_rows("Draw the rows of each member in the iterable, and use `Seeds`.")
        rows = resample.bootstrap(num_rows, self.num_members, size=self.size, key=task.key)
        return task.posterior(self, rows=rows)


class Dropout(AbstractOwnMethod):
    """Monte-Carlo dropout: stochastic passes of members that have dropout layers.

    **Arguments:**

    - `num_members`: the number of members.
    - `num_passes`: passes of each member per prediction, which needs `key`.

    ```python
    ee.methods.Dropout(num_passes=50)
    ```

    ??? cite
        [Gal and Ghahramani 2016](https://arxiv.org/abs/1506.02142)
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    num_passes: int = 20

    def __check_init__(self) -> None:
        check_counts(self, "num_passes")

    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        return make, {"num_passes": self.num_passes}

    def train(self, task: Task) -> Posterior[Any]:
        ensemble, options = task.build(self.num_members, task.make)
        is_dropout = lambda x: isinstance(x, eqx.nn.Dropout)
        if not any(map(is_dropout, jax.tree.leaves(ensemble.stacked, is_leaf=is_dropout))):
            warn(f"`{caller()}` found no `eqx.nn.Dropout` in the members: without random layers all passes are equal.")
        return task._replace(options=options).posterior(self, ensemble)


def _with_prior(make: Callable[..., Any], key: Any, scale: Any) -> Any:
    made, prior = map(make, jax.random.split(key))
    if isinstance(made, tuple):
        raise TypeError(f"`{caller()}` needs members without state: a prior function has none.")
    return RandomisedPrior(made, prior, scale=scale)


class RandomisedPriors(AbstractOwnMethod):
    """Randomised prior functions: to the output of each member the fixed output of an untrained one is added.

    **Arguments:**

    - `num_members`: the number of members.
    - `scale`: the factor of the prior functions, as for [`eqx_ensemble.methods.priors.RandomisedPrior`][].

    ```python
    ee.methods.RandomisedPriors(8, scale=3.0)
    ```
    """

    num_members: int
    _: dataclasses.KW_ONLY
    scale: float | int = 1.0

    def __check_init__(self) -> None:
        check_counts(self)
        check_number(self.scale, "scale", least=0)

    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        return MakeMember(check_maker(make), _with_prior, (self.scale,)), {}

    def train(self, task: Task) -> Posterior[Any]:
        return task.posterior(self)


@ft.lru_cache(maxsize=64)
def _add_anchor(loss: Callable[..., Any], num_rows: int) -> Callable[..., Any]:
    """The loss with the penalty of a member's anchor; the same one for the same arguments."""

    def total(model: Any, *inputs: Any, hyper: Any) -> Any:
        return add_to_loss(loss(model, *inputs), hyper["anchor"].penalty(model, num_rows=num_rows))

    return total


class Anchors(AbstractOwnMethod):
    """Anchored ensemble: each member is regularised towards its own draw from the prior over weights.

    **Arguments:**

    - `num_members`: the number of members.
    - `prior_std`: the standard deviation of the prior, as for [`eqx_ensemble.methods.priors.draw_anchors`][].
    - `noise`: for regression, the standard deviation of the noise in the targets, which each member's targets get once
        more. A loss of your own must be the negative log-likelihood with this noise.

    ```python
    ee.methods.Anchors(8, prior_std=0.5, noise=0.1)
    ```
    """

    num_members: int
    _: dataclasses.KW_ONLY
    prior_std: Any = 1.0
    noise: float | int | None = None
    template = as_made

    def __check_init__(self) -> None:
        check_counts(self)
        check_above_zero(self, "prior_std", "noise")

    def train(self, task: Task) -> Posterior[Any]:
        check_options(task.options, ("hyper",), "the anchors are the hyper-parameters")
        loss = _add_anchor(as_loss(task.loss, noise=self.noise), task.num_rows())
        ensemble, options = task.build(self.num_members, task.make)
        trainable = {name: options[name] for name in ("trainable",) if name in options}
        anchors = draw_anchors(ensemble, self.prior_std, key=task.key, **trainable)
        if self.noise is not None:
            x, y = task.pair()
            task = task._replace(data=(x, noisy_targets(y, len(ensemble), std=self.noise, key=task.key)))
        return task._replace(options=options).posterior(self, ensemble, loss=loss, hyper={"anchor": anchors})
