import abc
from typing import Any

from jaxtyping import PyTree


class AbstractCombination(abc.ABC):
    """Combines predictions some members at a time, and never holds those of all.

    What was seen so far is a *partial*: an ordinary PyTree, `None` before anything was seen. Partials of parts of the
    ensemble, made one after another or on different machines, are merged. [`eqx_ensemble.predict`][] takes a
    combination as `combine`; it is also a plain function of the predictions of all members. Those of this library's
    functions come from [`eqx_ensemble.combine.streaming`][]. One of your own defines three methods, `__call__` follows:

    ```python
    class Range(ee.combine.AbstractCombination):
        def update(self, partial, predictions, *, weights=None):
            return self.merge(partial, (jnp.min(predictions, axis=0), jnp.max(predictions, axis=0)))

        def merge(self, first, second):
            if first is None:
                return second
            return jnp.minimum(first[0], second[0]), jnp.maximum(first[1], second[1])

        def finish(self, partial):
            return partial[1] - partial[0]

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key), 4, key=key)
    ee.predict(ensemble, jnp.ones((100, 3)), combine=Range(), memory=2**26).shape  # (100, 2)
    ```
    """

    @abc.abstractmethod
    def update(self, partial: Any, predictions: PyTree, *, weights: Any = None) -> Any:
        """The partial with some more members.

        **Arguments:**

        - `partial`: of the members seen so far; `None` for none.
        - `predictions`: of some more members, `(members, ...)`.
        - `weights`: one for each of these members `(members,)`, on the scale of all others: only their ratios matter.
            1 each if not given. A member of weight zero is left out.
        """

    @abc.abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """The partial of the members of two partials, up to rounding the same in either order."""

    @abc.abstractmethod
    def finish(self, partial: Any) -> PyTree:
        """The result for all members seen."""

    def __call__(self, predictions: PyTree, *, weights: Any = None) -> PyTree:
        """The result for `predictions` `(members, ...)` of all members at once."""
        return self.finish(self.update(None, predictions, weights=weights))
