import dataclasses
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
from ._protocol import AbstractMethod, Posterior, as_loss, begin, load_posterior, num_rows_of, train

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
