import dataclasses
from typing import Any

import equinox as eqx
import jax

from .. import tree
from . import adapters
from ._layers import Select
from ._protocol import AbstractOwnMethod, Posterior, Task, check_counts, check_maker


class LowRank(AbstractOwnMethod):
    """Low-rank adapters: members that share a frozen base model, and differ by a low-rank change of some weights.

    `make` is the trained base model, or a function that returns it, whatever the key.

    **Arguments:**

    - `num_members`: the number of members.
    - `rank`, `where`, `scale`, `full`: as for [`eqx_ensemble.methods.adapters.low_rank`][].

    ```python
    base = eqx.nn.MLP(3, 2, 16, 2, key=key)  # trained before
    data = jax.random.normal(key, (100, 3)), jnp.arange(100) % 2
    method = ee.methods.LowRank(8, rank=4)
    posterior = method.fit(base, "classification", optax.adam(1e-3), data, epochs=2, key=key)
    ```

    ??? cite
        [Hu et al. 2022](https://arxiv.org/abs/2106.09685); ensembles: [Wang et al.
        2023](https://arxiv.org/abs/2310.00035)
    """

    num_members: int
    _: dataclasses.KW_ONLY
    rank: int
    where: Select = None
    full: Select = None
    scale: float | int = 1.0

    def __check_init__(self) -> None:
        check_counts(self)

    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        return self._adapt(make, jax.random.key(0)), {}

    def train(self, task: Task) -> Posterior[Any]:
        made = self._adapt(task.make, task.key)
        ensemble, options = (made, {}) if not isinstance(made, tuple) else (made[0], {"state": made[1]})
        return task._replace(options=task.options | options).posterior(self, ensemble)

    def _adapt(self, make: Any, key: Any) -> Any:
        """The members, and their state if the base has one."""
        made = make if isinstance(make, eqx.Module) else check_maker(make)(key)
        base, *state = made if isinstance(made, tuple) else (made,)
        options = {name: getattr(self, name) for name in ("rank", "where", "full", "scale")}
        ensemble = adapters.low_rank(base, self.num_members, key=key, **options)
        return (ensemble, tree.stack(state * self.num_members)) if state else ensemble
