import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._caller import caller
from ..._check import check_number, is_traced, kind_text
from ..._leaf_text import leaf_text

_PRIOR = "methods.priors.RandomisedPrior"
_PENALTY = "methods.priors.Anchor.penalty"
_TARGETS = "methods.priors.noisy_targets"
_ANCHORS = "methods.priors.draw_anchors"


def check_scale(scale: Any) -> Any:
    """Raises unless `scale` is one finite number or scalar array. Returns it."""
    if not isinstance(scale, jax.Array):
        return check_number(scale, "scale")
    if scale.shape or scale.dtype == bool or not jnp.isrealobj(scale):
        raise TypeError(f"`{_PRIOR}` needs `scale` to be one number, got {leaf_text(scale)}.")
    if not is_traced(scale) and not math.isfinite(scale):
        raise ValueError(f"`{_PRIOR}` needs `scale` to be finite, got {scale}.")
    return scale


def check_outputs(out: Any, prior: Any) -> None:
    """Raises unless the outputs of a network and of its prior can be added leaf by leaf."""
    fix = "Give both the same output size."
    if jax.tree.structure(out) != jax.tree.structure(prior):
        raise ValueError(
            f"`{_PRIOR}` needs a network and a prior with outputs of one structure; got {jax.tree.structure(out)} and "
            f"{jax.tree.structure(prior)}.\n{fix}"
        )
    for (path, f), p in zip(jtu.tree_leaves_with_path(out), jax.tree.leaves(prior), strict=True):
        if jnp.shape(f) != jnp.shape(p):
            raise ValueError(
                f"`{_PRIOR}` needs a network and a prior with outputs of one shape; at `output{jtu.keystr(path)}`: got "
                f"{jnp.shape(f)} and {jnp.shape(p)}.\n{fix}"
            )


def check_std(std: Any, path: str) -> float:
    """Raises unless `std` is a finite number or scalar array above zero. Returns it as a Python number."""
    if isinstance(std, jax.Array | np.ndarray) and not std.shape and not is_traced(std):
        std = std.item()
    number = check_number(std, path)
    if number <= 0:
        raise ValueError(f"`{caller()}` needs `{path}` to be above 0, got {std!r}.")
    return number


def check_penalty_std(std: Any, path: str) -> Any:
    """As `check_std`, but a traced one is not checked."""
    if is_traced(std) and not std.shape:
        return std
    return check_std(std, path)


def prefix_message(std: Any) -> str:
    """The message for standard deviations that are not a prefix of a member's tree."""
    return (
        f"`{_ANCHORS}` needs `std` to be a number, a function of a leaf, or a tree like one member's, got "
        f"{kind_text(std)}.\nFor example `lambda leaf: 1 / np.sqrt(leaf.shape[-1])`."
    )


def check_real(leaf: Any, path: str) -> None:
    """Raises for a complex leaf."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"`{caller()}` needs real floating-point arrays; at `{path}`: got {leaf.dtype}.\n"
            "Leave it out with `trainable=`."
        )


def check_num_rows(num_rows: Any) -> Any:
    """Raises unless `num_rows` is a finite number or scalar array above zero (if concrete). Returns it."""
    if not isinstance(num_rows, jax.Array | np.generic | np.ndarray):
        value = check_number(num_rows, "num_rows")
    elif num_rows.shape:
        raise TypeError(f"`{caller()}` needs `num_rows` to be one number, got {leaf_text(num_rows)}.")
    else:
        value = num_rows
    if not is_traced(value) and not 0 < float(value) < math.inf:
        raise ValueError(f"`{caller()}` needs `num_rows` to be above 0 and finite, got {num_rows}.")
    return num_rows


def check_same_model(anchor: list[Any], model: list[Any]) -> None:
    """Raises unless a model has a leaf of the same shape for every anchor."""
    fix = "Pass the model that the loss receives, and the anchors drawn from its ensemble."
    if len(anchor) != len(model):
        raise ValueError(
            f"`{_PENALTY}` needs a model like those that the anchors were drawn for; expected {len(anchor)} leaves, "
            f"got {len(model)}.\n{fix}"
        )
    for (path, a), w in zip(anchor, model, strict=True):
        if a is not None and jnp.shape(w) != jnp.shape(a):
            raise ValueError(
                f"`{_PENALTY}` needs one member's model and anchor; at `{jtu.keystr(path)}`: expected {jnp.shape(a)}, "
                f"got {kind_text(w) if w is None else jnp.shape(w)}.\n{fix}"
            )


def check_targets(targets: Any) -> None:
    """Raises unless `targets` is a floating-point array with rows."""
    if not isinstance(targets, jax.Array | np.ndarray):
        raise TypeError(f"`{_TARGETS}` needs an array `(rows, ...)` as `targets`, got {kind_text(targets)}.")
    if not jnp.issubdtype(targets.dtype, jnp.floating):
        raise TypeError(
            f"`{_TARGETS}` needs floating-point `targets`, got {targets.dtype}.\n"
            "Noise is for regression: convert whole numbers with `.astype(float)`."
        )
    if targets.ndim == 0 or len(targets) == 0:
        raise ValueError(f"`{_TARGETS}` needs `targets` of at least one row `(rows, ...)`, got shape {targets.shape}.")


def check_noise(std: Any, shape: tuple[int, ...]) -> Any:
    """Raises unless `std` is one number, or an array of the shape of the targets, and not negative. Returns it."""
    if not isinstance(std, jax.Array | np.ndarray):
        return check_number(std, "std", least=0)
    if std.shape not in ((), shape) or not jnp.issubdtype(std.dtype, jnp.floating):
        raise ValueError(
            f"`{_TARGETS}` needs `std` to be one number, or one for each target: expected {shape}, got "
            f"{leaf_text(std)}.\nOne per row: `jnp.broadcast_to(std[:, None], targets.shape)`."
        )
    if not is_traced(std) and not (np.isfinite(host := np.asarray(std)) & (host >= 0)).all():
        raise ValueError(f"`{_TARGETS}` needs a finite `std` that is not negative.")
    return std


def check_row_ids(row_ids: Any, num_rows: int) -> None:
    """Raises unless `row_ids` has one integer from 0 to 2**31 - 1 per row."""
    array = row_ids if isinstance(row_ids, jax.Array) else np.asarray(row_ids)
    if not np.issubdtype(array.dtype, np.integer) or array.shape != (num_rows,):
        raise TypeError(
            f"`{_TARGETS}` needs one integer per row as `row_ids` ({num_rows},), got {array.dtype} of shape "
            f"{array.shape}."
        )
    if not is_traced(array) and ((host := np.asarray(array)).min() < 0 or host.max() >= 2**31):
        raise ValueError(f"`{_TARGETS}` needs `row_ids` from 0 to 2**31 - 1, got {host.min()} to {host.max()}.")
