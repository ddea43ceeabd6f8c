import abc
from typing import Any

import numpy as np


class AbstractRange(abc.ABC):
    """The distribution of one hyper-parameter. Subclass it for other distributions.

    A range is used by [`eqx_ensemble.sweep.draw`][], [`eqx_ensemble.methods.hyperband`][] and
    [`eqx_ensemble.methods.population.perturb_hyper`][].

    ```python
    class Normal(ee.sweep.AbstractRange):
        def __init__(self, mean, scale) -> None:
            self.mean, self.scale = mean, scale

        def draw(self, generator):
            return generator.normal(self.mean, self.scale)

        def rescale(self, value, factor):
            return value * factor

    hyper = ee.sweep.draw({"shift": Normal(0.0, 1.0)}, 8, key=key)
    ```
    """

    @abc.abstractmethod
    def draw(self, generator: np.random.Generator) -> Any:
        """Draws one value.

        **Arguments:**

        - `generator`: the random generator of one member.

        **Returns:** a Python number.
        """

    @abc.abstractmethod
    def rescale(self, value: float, factor: float) -> Any:
        """Returns the value of the range nearest to `factor` times `value`.

        **Arguments:**

        - `value`: a value of the range.
        - `factor`: a positive number.

        **Returns:** a Python number.
        """
