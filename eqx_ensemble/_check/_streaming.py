from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arrays import check_plain_weights, concrete
from ._leaves import is_traced
from ._options import check_optional_flag


def members_of_chunk(predictions: Any, *, name: str) -> int:
    """The members in a chunk of predictions, at least one; each array carries them in front."""
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(predictions)}
    counts = {shape[:1] for shape in shapes}
    if len(counts) != 1 or counts & {(), (0,)}:
        raise ValueError(
            f"`eqx_ensemble.{name}` needs predictions with a leading `members` axis of at least one member.\n"
            f"  got shapes {', '.join(map(str, sorted(shapes)))}\nOne member? Add a leading axis: `prediction[None]`."
        )
    return counts.pop()[0]


def chunk_weights(weights: Any, num_members: int, *, name: str) -> Any:
    """Weights of the members of a chunk: finite and not negative; they may all be zero. Concrete ones are NumPy's."""
    check_plain_weights(name, weights)
    host = concrete(weights)
    array = jnp.asarray(weights) if host is None else host
    if array.shape != (num_members,):
        raise ValueError(
            f"`eqx_ensemble.{name}` needs one weight per member of the chunk.\n"
            f"  expected shape {(num_members,)}, got {array.shape}\nWeights stand in the order of the members."
        )
    if host is None:
        return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)
    host = host.astype(np.float64)
    if not np.isfinite(host).all() or (host < 0).any():
        raise ValueError(
            f"`eqx_ensemble.{name}` needs finite `weights` of zero or more.\n  got {weights}\n"
            "A member of weight zero is left out; raw scores become weights by `jax.nn.softmax`."
        )
    return host


def members_seen(partial: Any, *, name: str) -> None:
    """Somebody of a weight above zero was seen."""
    if partial is None:
        raise ValueError(
            f"`eqx_ensemble.{name}` has nothing to finish: it has seen no member, or none of a weight above zero."
        )


def one_array(predictions: Any, *, name: str) -> Any:
    """Predictions of one array, which NumPy would make of a tuple of them, with an axis too many."""
    if isinstance(predictions, tuple | list | dict):
        raise TypeError(
            f"`eqx_ensemble.{name}` needs predictions that are one array, got {_several(predictions)}.\n"
            "Pairs `(mean, variance)` are for `reduce.Gaussian()` and `reduce.DecomposeVariance()`; to keep one of "
            "several outputs: `predict(..., fn=lambda model, x: model(x)[0])`."
        )
    return predictions


def pair_of_moments(predictions: Any, *, name: str) -> tuple[Any, Any]:
    """Predictions of a mean and a variance."""
    if not isinstance(predictions, tuple | list) or len(predictions) != 2:
        got = f"{type(predictions).__name__} of shape {np.shape(predictions)}"
        if isinstance(predictions, tuple | list | dict):
            got = _several(predictions)
        raise TypeError(
            f"`eqx_ensemble.{name}` needs predictions that are a pair `(mean, variance)`, got {got}.\n"
            "Other outputs become a pair by `predict(..., fn=lambda model, x: (mean, variance))`; for points "
            "take `reduce.Moments()`."
        )
    return predictions[0], predictions[1]


def quantile_levels(levels: Any, *, name: str) -> tuple[float, ...]:
    """Several numbers from 0 to 1."""
    found = np.asarray(levels)
    if found.ndim != 1 or found.size == 0 or found.dtype.kind not in "fiu":
        raise TypeError(f"`eqx_ensemble.{name}` needs a list of `levels`, got {levels!r}.")
    if not ((found >= 0) & (found <= 1)).all():
        raise ValueError(f"`eqx_ensemble.{name}` needs `levels` from 0 to 1, got {levels!r}.")
    return tuple(float(level) for level in found)


def rows_in_front(combined: Any, num_rows: int) -> None:
    """What `combine` made of some rows has these rows in front."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(combined)]
    if not shapes or any(shape[:1] != (num_rows,) for shape in shapes):
        listed = ", ".join(map(str, shapes)) or "no array"
        raise ValueError(
            f"`predict` calls `combine` with some rows at a time and needs arrays `(rows, ...)` from it; it gave "
            f"{listed} for {num_rows} rows.\n"
            "To move an axis: `combine=lambda p: jnp.moveaxis(jnp.quantile(p, levels, axis=0), 0, -1)`. What needs all "
            "rows at once, such as a mean over them, is to be called on what `predict` returns."
        )


def combiner(combine: Any, weights: Any, num_members: int) -> Any:
    """Something that can combine, with one weight per member if any: returns these as an array."""
    if combine is None:
        if weights is not None:
            raise TypeError("`predict` needs `combine=` with `weights`: what should they weight?")
        return None
    if isinstance(combine, type) or not callable(combine):
        fix = f" Pass `{combine.__name__}(...)` instead of the class." if isinstance(combine, type) else ""
        raise TypeError(f"`predict` needs `combine` to be a function or a reduction, got {combine!r}.{fix}")
    checked = None if weights is None else chunk_weights(weights, num_members, name="predict")
    if isinstance(checked, np.ndarray) and not checked.any():
        raise ValueError(f"`predict` needs `weights` that are not all zero, got {num_members} zeros.")
    return checked


def inference_mode(inference: Any, key: Any, *, name: str) -> bool:
    """Whether members are put into inference mode: with a key, which may be meant for dropout, only when asked for."""
    check_optional_flag(inference, "inference", name=name)
    if inference is None and key is not None:
        raise ValueError(
            f"`{name}` needs `inference` with `key`: by default members are in inference mode, where dropout does "
            "nothing.\n"
            "For Monte-Carlo dropout pass `inference=False`; for members that draw random numbers in inference mode, "
            "`inference=True`."
        )
    return True if inference is None else bool(inference)


def nothing_traced(tree: Any) -> None:
    """A budget is kept by measuring, which a program that is being compiled cannot."""
    if any(is_traced(leaf) for leaf in jax.tree.leaves(tree)):
        raise TypeError(
            "`predict` keeps to `memory` by measuring what it needs, and cannot inside `jax.jit` and the like: choose "
            "a `batch_size` there, and a `plan`."
        )


def budget_too_small(need: int, memory: int) -> str:
    """The message that not even one row of one member fits."""
    return (
        f"`predict` needs about {in_bytes(need)} for one row and one member beside the inputs and the result, more "
        f"than `memory={memory}` ({in_bytes(memory)})."
    )


def result_too_large(need: int, free: int, shapes: Any, *, combined: bool) -> str:
    """The message that the result has no place."""
    listed = ", ".join(str(x.shape) for x in jax.tree.leaves(shapes))
    advice = "Predict some rows at a time, and keep what is needed of them."
    if not combined:
        advice = (
            "What is to be made of it needs less: `combine=eqx_ensemble.combine.mean`, `.mixture` or `.vote` give "
            "`(rows, ...)`, and a reduction of `eqx_ensemble.reduce`, such as `DecomposeEntropy()`, does so too."
        )
    return f"`predict` has no place for its result {listed}: {in_bytes(need)}, with {in_bytes(free)} free.\n{advice}"


def in_bytes(count: int) -> str:
    """`1.5 MiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def _several(predictions: Any) -> str:
    return f"a {type(predictions).__name__} of {len(predictions)}"
