import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._axes import Each
from ..._caller import caller
from ..._check import (
    check_array,
    check_positive_int,
    check_word,
    concrete,
    first_text,
    is_traced,
    type_error,
    value_error,
)
from ...train import DivergedError
from ._member import LINKS


def check_healthy(run: Any, healthy: np.ndarray) -> None:
    """Raises if all members diverged."""
    if not healthy.any():
        raise DivergedError(f"`{caller()}` needs members that did not diverge: all {len(healthy)} did.", run)


def check_finite_posterior(posterior: Any, ids: Any) -> None:
    """Raises unless curvatures are finite and noise is above zero."""
    values, loss = concrete(posterior.curvature.values), concrete(posterior.loss)
    if values is None or loss is None:
        return
    bad = ~(np.isfinite(values).all(axis=1) & np.isfinite(loss))
    if bad.any():
        raise ValueError(
            f"`{caller()}` needs finite outputs and derivatives; those of the members {_ids(ids, bad)} are not.\n"
            "Members that diverged? Pass the run instead of its ensemble, or `run.healthy`."
        )
    noise = None if posterior.noise is None else concrete(posterior.noise)
    if noise is not None and not (noise > 0).all():
        raise ValueError(
            f"`{caller()}` takes the noise from the residuals by default; members {_ids(ids, noise <= 0)} have zero "
            "residuals.\nPass `noise`, the standard deviation of the targets around their means."
        )


def check_optimum(precision: Any, noise: Any, ids: Any) -> None:
    """Raises unless all optima are inside their brackets."""
    host = concrete(precision)
    if host is None:
        return
    spread = None if noise is None else concrete(noise)
    bad = ~(np.isfinite(host) & (host > 1e-30))
    if spread is not None:
        bad |= ~(np.isfinite(spread) & (spread > 0))
    if bad.any():
        raise ValueError(
            f"`{caller()}` found no maximum of the marginal likelihood for the members {_ids(ids, bad)}: their "
            "selected weights are zero, or the outputs do not depend on them."
        )


def _ids(ids: Any, chosen: np.ndarray) -> str:
    return ", ".join(map(str, np.asarray(ids)[chosen].tolist())) if not is_traced(ids) else "..."


_MOST_SQUARE = 2**15  # weights with a full covariance: 4 GiB in single precision


@contextlib.contextmanager
def explain_where() -> Iterator[None]:
    """Turns an error of `where` into one that explains how to select nodes of a member."""
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"`{caller()}` needs `where` to select nodes of one member as `equinox.tree_at` does, for example "
            f"`lambda model: model.layers[-1]`; it raised {type(error).__name__}.\n"
            'With `structure="kron"` it has to select a whole `equinox.nn.Linear`, not its weight.'
        ) from error


def check_chosen(leaves: Sequence[Any], count: int) -> None:
    """Raises unless at least one per-member floating-point array, and no complex one, is selected."""
    for leaf in leaves:
        if jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.complexfloating):
            raise TypeError(f"`{caller()}` needs real weights, got {leaf.dtype} of shape {leaf.shape}.")
    if count == 0:
        raise ValueError(
            f"`{caller()}` needs `where` to select at least one floating-point array of each member, got none.\n"
            "Arrays that the members share, and those inside of `train.Frozen`, have no posterior."
        )


def check_sizes(count: int, structure: str) -> None:
    """Raises if a full covariance would be too large for memory."""
    if structure == "full" and count > _MOST_SQUARE:
        raise ValueError(
            f'`{caller()}` with `structure="full"` holds a matrix of the square of the selected weights; got {count}, '
            f'at most {_MOST_SQUARE}.\nSelect fewer, or pass `structure="kron"` for a linear layer, or `"diag"`.'
        )


def check_indices(indices: Any, num_weights: int, structure: str) -> Any:
    """Raises unless `indices` are unique positions of selected weights, shared or in an `Each`. Returns them."""
    if indices is None:
        return None
    if structure == "kron":
        raise TypeError(
            f'`{caller()}` takes `indices` with `structure="full"` or `"diag"`: `"kron"` applies to a whole layer.'
        )
    own = isinstance(indices, Each)
    array = check_array("indices", indices.per_member() if isinstance(indices, Each) else indices)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim != 1 + own or array.shape[-1] == 0:
        fix = "They are positions in the selected leaves, one after another; of each member `Each((members, n))`."
        raise type_error("integers `(n,)` as `indices`", f"got {array.dtype} {array.shape}", fix)
    host = concrete(array)
    if host is not None:
        if host.min() < 0 or host.max() >= num_weights:
            got = f"got {host.min()} to {host.max()}"
            raise value_error(f"`indices` from 0 to {num_weights - 1}", got, "`where` selects so many weights.")
        if (np.diff(np.sort(host, axis=-1), axis=-1) == 0).any():
            raise value_error("every one of `indices` once", "got some twice", "Use `np.unique`.")
    return Each(array) if own else array


def check_per_member(argument: str, value: Any, own: Any) -> Any:
    """Raises unless `value` is one positive number, or one per member. Returns `(members,)`; `own` by default."""
    if own is None:
        if value is not None:
            raise TypeError(f"`{caller()}` takes `{argument}` for regression only: classes have no noise.")
        return None
    if value is None:
        return own
    array = check_array(argument, value.per_member() if isinstance(value, Each) else value)
    if array.shape not in ((), own.shape) or not jnp.issubdtype(array.dtype, jnp.number):
        got = f"expected () or {own.shape}, got {array.dtype} {array.shape}"
        fix = "It is a scalar or `(members,)`."
        raise value_error(f"one `{argument}`, or one per member", got, fix)
    host = concrete(array)
    if host is not None and not ((host > 0) & np.isfinite(host)).all():
        wrong = ~((host > 0) & np.isfinite(host))
        fix = "The prior must be proper: choose a small positive precision."
        fix = "It is a standard deviation, in the unit of the targets." if argument == "noise" else fix
        raise value_error(f"`{argument}` above zero and finite", first_text(host, wrong), fix)
    return jnp.broadcast_to(array.astype(own.dtype), own.shape)


def check_link(link: Any, likelihood: str) -> Any:
    """Raises unless the likelihood supports the link. Returns the link, or its default."""
    if likelihood == "regression":
        if link is not None:
            raise TypeError(f"`{caller()}` takes `link` for classes only: a regression's mean and variance are exact.")
        return None
    link = "probit" if link is None else link
    check_word(link, "link", LINKS)
    if likelihood == "binary" and link in ("bridge", "bridge_norm"):
        raise ValueError(f'`{caller()}` needs `link="probit"` or `"mc"` for `likelihood="binary"`, got {link!r}.')
    return link


def check_sampling(link: Any, num_samples: Any, key: Any) -> int:
    """Raises unless samples and a key are given for `link="mc"`, and only then. Returns the number of samples."""
    if link != "mc":
        given = [word for word, value in (("num_samples", num_samples), ("key", key)) if value is not None]
        if given:
            raise TypeError(f'`{caller()}` takes `{given[0]}` with `link="mc"` only: nothing else is random.')
        return 0
    if key is None:
        raise TypeError(f'`{caller()}` needs `key` with `link="mc"`.')
    return 100 if num_samples is None else check_positive_int(num_samples, "num_samples")
