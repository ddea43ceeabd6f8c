from collections.abc import Callable
from typing import Any

from .. import _check


def stretched(schedule: Callable[[Any], Any], length: float | int, new_length: Any) -> Callable[[Any], Any]:
    """A schedule that does in `new_length` steps what `schedule` does in `length`.

    For schedules whose length is a member's own hyper-parameter: optax looks at a schedule's length in Python, where a
    member's own has no value yet.

    ```python
    cosine = optax.cosine_decay_schedule(0.01, 1000)
    optimiser = lambda hyper: optax.adam(ee.sweep.stretched(cosine, 1000, hyper["steps"]))
    ```

    **Arguments:**

    - `schedule`: an optax schedule: `schedule(step) -> value`, taking any real number as step.
    - `length`: its length in steps, a number.
    - `new_length`: the wanted length in steps, a number or a member's own `()`.

    **Returns:** the schedule.
    """
    _check.schedule(schedule, length, new_length, name="sweep.stretched")
    return lambda step: schedule(step * (length / new_length))
