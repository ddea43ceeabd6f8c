from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Key, Real

from .._check import check_key, check_mask, check_no_nan, check_regression
from .._keys import member_keys
from .._weighting import blank_masked


def rank_histogram(
    samples: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    key: Any,
) -> Int32[Array, " ranks"]:
    """Histogram of the target's rank among the members, from lowest to highest; flat if calibrated.

    Ties between target and members are broken uniformly at random. Members are equally weighted: for weights see
    [`eqx_ensemble.scores.pit`][]. It takes no `row_weights`: sums of weights are not counts, and have different noise.

    **Arguments:**

    - `samples`: `(members, *batch)`, one number per member and entry.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `key`: one threefry key, typed or legacy, to break ties.

    **Returns:**

    int32 counts `(members + 1,)`.

    **Raises:**

    - `TypeError` for samples that are not floating-point, and for an invalid key.
    - `ValueError` for mismatched shapes and NaN (where concrete; rows with NaN are ignored while tracing).

    ```python
    samples, targets = jnp.array([[0.0, 0.0], [2.0, 2.0]]), jnp.array([1.0, 3.0])
    ee.scores.rank_histogram(samples, targets, key=jax.random.key(0))  # [0, 1, 1]
    ```

    ??? cite
        [Interpretation of Rank Histograms for Verifying Ensemble
        Forecasts](https://doi.org/10.1175/1520-0493(2001)129%3C0550:IORHFV%3E2.0.CO;2)

        ```bibtex
        @article{hamill2001interpretation,
            author={Thomas M. Hamill},
            title={Interpretation of Rank Histograms for Verifying Ensemble Forecasts},
            journal={Monthly Weather Review},
            year={2001},
        }
        ```
    """
    name = "scores.rank_histogram"
    points, observed = check_regression(name, targets, members=True, samples=samples)
    kept = check_mask(name, mask, observed.shape)
    check_no_nan(name, "samples", samples, mask)
    check_no_nan(name, "targets", targets, mask)
    check_key(key, name=name)
    return _rank_histogram(points, observed, kept, member_keys(key, 1, purpose="rank_histogram"))


@jax.jit
def _rank_histogram(
    samples: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    mask: Bool[Array, "*batch"] | None,
    keys: Key[Array, "1"],
) -> Int32[Array, " ranks"]:
    samples, targets = blank_masked(samples, mask, before=1), blank_masked(targets, mask)
    kept = ~(jnp.any(jnp.isnan(samples), axis=0) | jnp.isnan(targets))
    kept = kept if mask is None else kept & mask
    below = jnp.sum(samples < targets[None], axis=0, dtype=jnp.int32)
    level = jnp.sum(samples == targets[None], axis=0, dtype=jnp.int32)
    rank = below + jax.random.randint(keys[0], targets.shape, 0, level + 1, dtype=jnp.int32)
    return jax.ops.segment_sum(jnp.ravel(kept).astype(jnp.int32), jnp.ravel(rank), samples.shape[0] + 1)
