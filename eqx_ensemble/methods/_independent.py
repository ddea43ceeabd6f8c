import dataclasses
import functools as ft
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .. import resample
from .._caller import caller
from .._check import check_number, check_positive_int
from .._ensemble import Ensemble
from .._pytree import PyTree
from .._warnings import warn
from ._check import check_options
from ._protocol import (
    AbstractMethod,
    Posterior,
    add_to_loss,
    as_loss,
    begin,
    check_maker,
    check_noise,
    check_pair,
    check_prior_std,
    load_posterior,
    num_rows_of,
    train,
)
from .priors import RandomisedPrior, draw_anchors, noisy_targets

Make = Callable[..., Any] | Ensemble[Any]
LossLike = Callable[..., Any] | str


class Seeds(AbstractMethod):
    """A deep ensemble: members that differ by their initial weights and row orders.

    **Arguments:**

    - `num_members`: the number of members.

    ```python
    method = ee.methods.Seeds(8)
    make = lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key)
    data = jax.random.normal(key, (100, 3)), jnp.arange(100) % 2
    posterior = method.fit(make, "classification", optax.adam(1e-3), data, epochs=2, key=key)
    posterior.predict(data[0]).shape  # (8, 100, 2)
    ```

    ??? cite
        [Lakshminarayanan et al. 2017](https://arxiv.org/abs/1612.01474)
    """

    num_members: int

    def __check_init__(self) -> None:
        check_positive_int(self.num_members, "num_members")

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][]."""
        run, healthy = train(make, self.num_members, as_loss(loss), optimiser, data, options, key)
        return Posterior(healthy.ensemble, healthy.state, run)


class Bootstraps(AbstractMethod):
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

    def __check_init__(self) -> None:
        check_positive_int(self.num_members, "num_members")
        if self.size is not None:
            check_number(self.size, "size", least=0)

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][], without `rows`."""
        check_options(options, ("rows",), "the method draws them")
        num_rows = num_rows_of(data, options, instead="Draw the rows of each member in the iterable, and use `Seeds`.")
        rows = resample.bootstrap(num_rows, self.num_members, size=self.size, key=key)
        options |= {"rows": rows}
        run, healthy = train(make, self.num_members, as_loss(loss), optimiser, data, options, key)
        return Posterior(healthy.ensemble, healthy.state, run)


class Dropout(AbstractMethod):
    """Monte-Carlo dropout: stochastic passes of members that have dropout layers.

    **Arguments:**

    - `num_members`: the number of members; several are an ensemble of dropout networks.
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
        check_positive_int(self.num_members, "num_members")
        check_positive_int(self.num_passes, "num_passes")

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][]."""
        ensemble, options = begin(make, self.num_members, options, key)
        is_dropout = lambda x: isinstance(x, eqx.nn.Dropout)
        if not any(map(is_dropout, jax.tree.leaves(ensemble.stacked, is_leaf=is_dropout))):
            warn(f"`{caller()}` found no `eqx.nn.Dropout` in the members: without random layers all passes are equal.")
        run, healthy = train(ensemble, self.num_members, as_loss(loss), optimiser, data, options, key)
        return Posterior(healthy.ensemble, healthy.state, run, num_passes=self.num_passes)

    def load(self, path: str | os.PathLike[str], make: Callable[..., Any], data: PyTree = None) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.load`][]."""
        del data
        return load_posterior(path, make, num_passes=self.num_passes)


class MakeWithPrior(eqx.Module):
    """The function that makes a member with a prior function from a key; equal ones are one function."""

    make: Callable[..., Any] = eqx.field(static=True)
    scale: Any = eqx.field(static=True)

    def __call__(self, key: Any) -> Any:
        made, prior = map(self.make, jax.random.split(key))
        if isinstance(made, tuple):
            raise TypeError(f"`{caller()}` needs members without state: a prior function has none.")
        return RandomisedPrior(made, prior, scale=self.scale)


class RandomisedPriors(AbstractMethod):
    """Randomised prior functions: to the output of each member the fixed output of an untrained one is added.

    **Arguments:**

    - `num_members`: the number of members.
    - `scale`: the factor of the prior functions, as for [`eqx_ensemble.methods.priors.RandomisedPrior`][].

    ```python
    ee.methods.RandomisedPriors(8, scale=3.0)
    ```

    ??? cite
        [Osband et al. 2018](https://arxiv.org/abs/1806.03335)
    """

    num_members: int
    _: dataclasses.KW_ONLY
    scale: float | int = 1.0

    def __check_init__(self) -> None:
        check_positive_int(self.num_members, "num_members")
        check_number(self.scale, "scale", least=0)

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][], without state."""
        made = MakeWithPrior(check_maker(make), self.scale)
        run, healthy = train(made, self.num_members, as_loss(loss), optimiser, data, options, key)
        return Posterior(healthy.ensemble, healthy.state, run)

    def load(self, path: str | os.PathLike[str], make: Callable[..., Any], data: PyTree = None) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.load`][]."""
        del data
        return load_posterior(path, MakeWithPrior(check_maker(make), self.scale))


@ft.lru_cache(maxsize=64)
def anchored(loss: Callable[..., Any], num_rows: int) -> Callable[..., Any]:
    """The loss with the penalty of a member's anchor; the same one for the same arguments."""

    def total(model: Any, *inputs: Any, hyper: Any) -> Any:
        return add_to_loss(loss(model, *inputs), hyper["anchor"].penalty(model, num_rows=num_rows))

    return total


class Anchors(AbstractMethod):
    """Anchored ensemble: each member is regularised towards its own draw from the prior over weights.

    **Arguments:**

    - `num_members`: the number of members.
    - `prior_std`: the standard deviation of the prior, as for [`eqx_ensemble.methods.priors.draw_anchors`][].
    - `noise`: for regression, the standard deviation of the noise in the targets, which each member's targets get once
        more. A loss of your own must be the negative log-likelihood with this noise.

    ```python
    ee.methods.Anchors(8, prior_std=0.5, noise=0.1)
    ```

    ??? cite
        [Pearce et al. 2020](https://arxiv.org/abs/1810.05546)
    """

    num_members: int
    _: dataclasses.KW_ONLY
    prior_std: Any = 1.0
    noise: float | None = None

    def __check_init__(self) -> None:
        check_positive_int(self.num_members, "num_members")
        check_prior_std(self.prior_std)
        check_noise(self.noise)

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][], without `hyper`, which the anchors are."""
        check_options(options, ("hyper",), "the anchors are the hyper-parameters")
        num_rows = num_rows_of(data, options, instead="Load it as arrays, or read it with `train.RowReader`.")
        ensemble, options = begin(make, self.num_members, options, key)
        trainable = {} if options.get("trainable") is None else {"trainable": options["trainable"]}
        options |= {"hyper": {"anchor": draw_anchors(ensemble, self.prior_std, key=key, **trainable)}}
        if self.noise is not None:
            x, y = check_pair(data)
            data = x, noisy_targets(y, ensemble.ids, std=self.noise, key=key)
        own = anchored(as_loss(loss, noise=self.noise), num_rows)
        run, healthy = train(ensemble, self.num_members, own, optimiser, data, options, key)
        return Posterior(healthy.ensemble, healthy.state, run)
