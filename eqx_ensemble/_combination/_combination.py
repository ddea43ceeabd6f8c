import abc
from typing import Any

from .._pytree import PyTree


class AbstractCombination(abc.ABC):
    """Combines predictions a few members at a time, without the predictions of all members in memory.

    A *partial*, a PyTree or `None`, summarises the members seen so far. Partials of different members, from one process
    or several machines, can be merged. [`eqx_ensemble.predict`][] takes a combination as `combine`; it can also be
    called on the predictions of all members. For the functions of this library see
    [`eqx_ensemble.combine.streaming`][]. Subclasses define three methods, from which `__call__` follows:

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

        - `partial`: the partial of the members seen so far; `None` if there are none.
        - `predictions`: the predictions of additional members, `(members, ...)`; not necessarily all members of the
            ensemble.
        - `weights`: one weight per additional member, `(members,)`, 1 if not given. All calls use the same scale: only
            ratios matter. Members of weight zero have no influence. [`eqx_ensemble.predict`][] divides all weights by
            one number first, so that the largest is between 1 and 2: likelihoods may be too small for float32.
        """

    @abc.abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """Merges two partials, each of which may be `None`; the order affects rounding only."""

    @abc.abstractmethod
    def finish(self, partial: Any) -> PyTree:
        """The result for all members seen: arrays `(rows, ...)`."""

    def __call__(self, predictions: PyTree, *, weights: Any = None) -> PyTree:
        """The result for the predictions of all members, `(members, ...)`."""
        return self.finish(self.update(None, predictions, weights=weights))
