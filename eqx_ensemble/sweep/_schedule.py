from collections.abc import Callable
from typing import Any

from ._check import check_schedule


def rescale_schedule(schedule: Callable[[Any], Any], length: float | int, new_length: Any) -> Callable[[Any], Any]:
    """Rescales a schedule of `length` steps to `new_length` steps.

    Use it for schedules whose length is a hyper-parameter: optax needs a Python number, but hyper-parameters are traced
    inside the compiled program.

    **Arguments:**

    - `schedule`: an optax schedule: `schedule(step) -> value`, for any real number `step`.
    - `length`: the length of the schedule in steps, a Python number.
    - `new_length`: the new length in steps, a number or a member's hyper-parameter `()`.

    **Returns:** the rescaled schedule.

    **Raises:** `TypeError` for a schedule that is not a function and a `length` that is not a number, `ValueError` for
    lengths that are not positive.

    ```python
    cosine = optax.cosine_decay_schedule(0.01, 1000)
    optimiser = lambda hyper: optax.adam(
        ee.sweep.rescale_schedule(cosine, 1000, hyper["steps"])
    )
    ```
    """
    check_schedule(schedule, length, new_length, name="sweep.rescale_schedule")
    return lambda step: schedule(step * (length / new_length))
