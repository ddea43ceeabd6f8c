import abc
from typing import Any

from .._pytree import PyTree


class AbstractCombination(abc.ABC):
    """Combines predictions some members at a time, and never holds those of all.

    The members seen so far are summarised in a *partial*: a PyTree, or `None` for no members. Partials of different
    members, from one process or from several machines, can be merged. [`eqx_ensemble.predict`][] takes a combination as
    `combine`; it is also a function of the predictions of all members. For the functions of this library see
    [`eqx_ensemble.combine.streaming`][]. Your own defines three methods, from which `__call__` follows:

    ```python
    class Range(ee.combine.AbstractCombination):
        def update(self, partial, predictions, *, weights=None):
            return self.merge(
                partial, (jnp.min(predictions, axis=0), jnp.max(predictions, axis=0))
            )

        def merge(self, first, second):
            if first is None:
                return second
            return jnp.minimum(first[0], second[0]), jnp.maximum(first[1], second[1])

        def finish(self, partial):
            return partial[1] - partial[0]


    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key), 4, key=key)
    ee.predict(ensemble, jnp.ones((100, 3)), combine=Range(), memory=2**26).shape
    # (100, 2)
    ```
    """

    @abc.abstractmethod
    def update(self, partial: Any, predictions: PyTree, *, weights: Any = None) -> Any:
        """Adds members to a partial.

        **Arguments:**

        - `partial`: that of the members seen so far; `None` for none.
        - `predictions`: those of further members, `(members, ...)`; not always all members of the ensemble.
        - `weights`: one for each of these members `(members,)`, 1 each if not given. Weights of different calls are on
            one scale: only their ratios matter. A member of weight zero has no influence.
        """

    @abc.abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """The partial of the members of two partials, each of which may be `None`; the order affects rounding only."""

    @abc.abstractmethod
    def finish(self, partial: Any) -> PyTree:
        """The result for all members seen, arrays `(rows, ...)`."""

    def __call__(self, predictions: PyTree, *, weights: Any = None) -> PyTree:
        """The result for `predictions` `(members, ...)` of all members at once."""
        return self.finish(self.update(None, predictions, weights=weights))
