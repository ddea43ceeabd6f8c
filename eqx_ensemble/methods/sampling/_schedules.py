from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._check import check_counter
from ._check import check_explore, check_rate


def cyclical_temperature(
    period: int, *, explore: float = 0.9, temperature: Any = 1.0
) -> Callable[[Any], Float[Array, ""]]:
    r"""The temperature of cyclical stochastic-gradient MCMC: 0 while a cycle explores, then that of sampling.

    With the learning rate $\frac{a_0}{2}\big(\cos(\pi\, (t \bmod P) / P) + 1\big)$ of
    [`eqx_ensemble.methods.path.snapshot_schedule`][], each cycle descends to a mode with large steps and without noise,
    and then samples around it with small steps. Chains visit several modes, but not in proportion to their posterior
    mass.

    **Arguments:**

    - `period`: $P$, the number of steps per cycle; the authors use 50 epochs.
    - `explore`: the fraction of each cycle without noise, from 0 to below 1; at least the last step has noise. In the
        authors' CIFAR experiments, the last 5 of 50 epochs have noise.
    - `temperature`: the temperature of the other steps, a number.

    **Returns:** a schedule for `temperature` of [`eqx_ensemble.methods.sampling.sgld`][] and the other samplers.

    **Raises:** `TypeError` or `ValueError` for invalid arguments.

    ```python
    period = 50 * 10  # epochs, of 10 batches each
    sampler = ee.methods.sampling.sghmc(
        ee.methods.path.snapshot_schedule(1e-3, period),
        num_rows=1000,
        temperature=ee.methods.sampling.cyclical_temperature(period),
        key=key,
    )
    # after epochs 48, 49 and 50 of each of four cycles
    chains = ee.methods.path.snapshots(
        sampler, 12, start=48 * 10, every=10, period=period
    )
    ```

    ??? cite

        Zhang, Li, Zhang, Chen and Wilson, "Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning" (ICLR 2020).
    """
    name = "methods.sampling.cyclical_temperature"
    period = check_counter(period, "period", name=name)
    first = min(round(check_explore(explore, name=name) * period), period - 1)
    heat = check_rate(temperature, "temperature", name=name, schedules=False)

    def schedule(count: Any) -> Float[Array, ""]:
        return jnp.where(count % period >= first, jnp.asarray(heat).astype(jnp.result_type(float)), 0)

    return schedule
