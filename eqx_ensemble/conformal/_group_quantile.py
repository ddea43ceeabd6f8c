from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Integer

from .._check import check_mask, concrete
from .._warnings import warn
from ..scores._check_groups import check_groups
from ._check import check_level, check_rows, enough_rows_text
from ._rank import fraction, ranks_by_count


def group_quantile(
    scores: Float[ArrayLike, " rows"],
    groups: Integer[ArrayLike, " rows"],
    *,
    level: float,
    num_groups: int,
    mask: Bool[ArrayLike, " rows"] | None = None,
) -> Float[Array, " groups"]:
    r"""The conformal quantile of each group: it bounds a new score of the group with probability `level` or more.

    [`eqx_ensemble.conformal.quantile`][] of the rows of each group (Mondrian conformal prediction). Coverage then holds
    in every group, not only on average over groups; each group needs enough rows.

    **Arguments:**

    - `scores`: `(rows,)`, one nonconformity score per held-out row; higher is more unusual.
    - `groups`: integers `(rows,)` from 0 to num_groups - 1, also known for new rows.
    - `level`: the coverage, a Python number between 0 and 1.
    - `num_groups`: the number of groups.
    - `mask`: booleans `(rows,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    `(groups,)`; infinite for groups with too few rows, NaN for groups with a NaN score.

    **Raises:**

    - `TypeError` for scores that are not floating-point and groups that are not integers.
    - `ValueError` for mismatched shapes, groups out of range, and a level outside (0, 1). Warns about groups with too
        few rows for a finite quantile.

    ```python
    # intervals of a width for each of two groups
    predictions, targets = jnp.zeros(18), jnp.concatenate([jnp.arange(1.0, 10.0)] * 2)
    groups = jnp.repeat(jnp.arange(2), 9)
    errors = jnp.abs(targets - predictions) * jnp.where(groups == 1, 2.0, 1.0)
    radius = ee.conformal.group_quantile(errors, groups, level=0.8, num_groups=2)
    radius  # [8.0, 16.0], for new rows `radius[groups]`
    ```

    ??? cite
        [Conditional validity of inductive conformal predictors](https://arxiv.org/abs/1209.2673)

        ```bibtex
        @article{vovk2013conditional,
            author={Vladimir Vovk},
            title={Conditional validity of inductive conformal predictors},
            journal={Machine Learning},
            year={2013},
        }
        ```
    """
    name = "conformal.group_quantile"
    (checked,) = check_rows(name, scores=scores)
    kept = check_mask(name, mask, checked.shape)
    own, count = check_groups(name, groups, num_groups, checked.shape, mask)
    check_level(name, level)
    return fit_groups(name, checked, own, count, fraction(level), kept, noun="groups")


def fit_groups(
    name: str,
    scores: Array,
    groups: Array,
    num_groups: int,
    level: Fraction,
    mask: Array | None,
    *,
    noun: str,
) -> Float[Array, " groups"]:
    """The quantile of each group; warns about groups with too few rows."""
    table = ranks_by_count(level, scores.size)
    found, counts = _values_at_ranks(scores, groups, mask, jnp.asarray(table), num_groups)
    host = concrete(counts)
    if host is not None and (few := table[host] > host).any():
        first = int(np.argmax(few))
        warn(
            f"`{name}`: {int(few.sum())} of {num_groups} {noun} have too few rows for level {float(level):g}, the "
            f"first is {first} with {int(host[first])}; their predictions are unbounded. {enough_rows_text(level)}"
        )
    return found


@partial(jax.jit, static_argnames="num_groups")
def _values_at_ranks(
    scores: Float[Array, " rows"],
    groups: Integer[Array, " rows"],
    mask: Bool[Array, " rows"] | None,
    table: Int32[Array, " counts"],
    num_groups: int,
) -> tuple[Float[Array, " groups"], Int32[Array, " groups"]]:
    known = (groups >= 0) & (groups < num_groups)
    bucket = jnp.where(known if mask is None else known & mask, groups, num_groups)
    bucket, ordered = jax.lax.sort((bucket, scores), num_keys=2)
    per_bucket = partial(jax.ops.segment_sum, segment_ids=bucket, num_segments=num_groups + 1)
    count = per_bucket(jnp.ones(bucket.shape, jnp.int32))[:-1]
    spoilt = per_bucket(jnp.isnan(ordered).astype(jnp.int32))[:-1] > 0
    rank = table[count]
    found = ordered[jnp.clip(jnp.cumsum(count) - count + rank - 1, 0, scores.size - 1)]
    return jnp.where(spoilt, jnp.nan, jnp.where(rank > count, jnp.inf, found)), count
