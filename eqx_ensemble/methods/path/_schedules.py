from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._check import check_counter
from ._check import check_learning_rate

Schedule = Callable[[Any], Float[Array, ""]]
"""An optax schedule of learning rates."""


def snapshot_schedule(init_value: Any, period: int) -> Schedule:
    r"""The cyclic cosine learning rate of snapshot ensembles.

    At step $t$ (from 0) it is $\frac{a_0}{2}\big(\cos(\pi\, (t \bmod P) / P) + 1\big)$: it starts each cycle at $a_0$
    and is smallest, but not 0, at the last step of the cycle, after which the snapshot is taken.

    **Arguments:**

    - `init_value`: $a_0$, the learning rate at the start of each cycle; the authors use 0.1 to 0.2 with SGD.
    - `period`: $P$, the number of steps per cycle; the authors use 40 epochs.

    **Returns:** a schedule for optax.

    **Raises:** `TypeError` or `ValueError` for invalid arguments.

    ```python
    schedule = ee.methods.path.snapshot_schedule(0.1, period=20)
    schedule(0), schedule(19), schedule(20)  # 0.1, 6.2e-4, 0.1
    ```

    ??? cite

        Huang, Li, Pleiss, Liu, Hopcroft and Weinberger, "Snapshot Ensembles: Train 1, Get M for Free" (ICLR 2017).
    """
    name = "methods.path.snapshot_schedule"
    init_value = check_learning_rate(init_value, "init_value", name=name)
    period = check_counter(period, "period", name=name)

    def schedule(count: Any) -> Float[Array, ""]:
        part = jnp.asarray(count % period, jnp.result_type(float)) / period
        return init_value / 2 * (jnp.cos(jnp.pi * part) + 1)

    return schedule


def fast_geometric_schedule(init_value: Any, end_value: Any, period: int) -> Schedule:
    r"""The cyclic triangular learning rate of fast geometric ensembles.

    With $u = ((t \bmod P) + 1) / P$ at step $t$ (from 0), it decreases from `init_value` to `end_value` at $u = 1/2$,
    and increases back to `init_value` at $u = 1$. Take snapshots of trained members at the minima:
    `snapshots(optax.sgd(schedule), size, every=period, start=period // 2)`.

    **Arguments:**

    - `init_value`, `end_value`: the largest and the smallest learning rate; the authors use 0.05 and 0.0005 with SGD.
    - `period`: $P$, the number of steps per cycle, an even number; the authors use 2 to 4 epochs.

    **Returns:** a schedule for optax.

    **Raises:** `TypeError` or `ValueError` for invalid arguments.

    ```python
    schedule = ee.methods.path.fast_geometric_schedule(0.05, 0.0005, period=40)
    schedule(19), schedule(39)  # 0.0005, 0.05
    ```

    ??? cite

        Garipov, Izmailov, Podoprikhin, Vetrov and Wilson, "Loss Surfaces, Mode Connectivity, and Fast Ensembling of
        DNNs" (NeurIPS 2018).
    """
    name = "methods.path.fast_geometric_schedule"
    init_value = check_learning_rate(init_value, "init_value", name=name)
    end_value = check_learning_rate(end_value, "end_value", name=name)
    period = check_counter(period, "period", name=name)
    if period % 2:
        raise ValueError(f"`{name}` needs an even `period`, got {period}: the rate is smallest after half of it.")

    def schedule(count: Any) -> Float[Array, ""]:
        part = jnp.asarray(count % period + 1, jnp.result_type(float)) / period
        fraction = jnp.abs(2 * part - 1)  # 1 at the ends of a cycle, 0 in the middle
        return fraction * init_value + (1 - fraction) * end_value

    return schedule
