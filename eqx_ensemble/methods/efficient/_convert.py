import itertools
import math
from typing import Any

import jax
import jax.tree_util as jtu

from ..._caller import caller
from ..._check import check_key, check_positive_int, is_member_array, kind_text
from ..._ensemble import Ensemble
from ..._leaf_text import leaf_text
from ..._warnings import warn
from .._layers import check_groups, check_module, input_shape, is_substitute, output_shape
from ._joint import JointEnsemble


def check_model(model: Any, num_submembers: Any, key: Any) -> int:
    """Raises unless `model` is one ordinary Module. Returns the number of sub-members as an `int`."""
    if isinstance(model, Ensemble):
        raise TypeError(
            f"`{caller()}` converts one model, got an `Ensemble`.\nConvert while building, with keys of their own: "
            f"`build(lambda key: {caller()}(make(key), {num_submembers}, key=key), num_members, key=key)`."
        )
    check_module(model)
    is_joint = lambda x: is_substitute(x) or isinstance(x, JointEnsemble)
    if any(map(is_joint, jax.tree.leaves(model, is_leaf=is_joint))):
        raise TypeError(f"`{caller()}` needs a model without sub-members; a part of this one has some already.")
    check_key(key)
    return check_positive_int(num_submembers, "num_submembers")


def warn_alike() -> None:
    """Warns that all sub-members have the same initial weights."""
    warn(
        f"`{caller()}`: all factors are 1, so sub-members that see the same rows have the same gradients and stay "
        "alike. Train them with `mean_loss(loss, rows='split')`, or draw the factors."
    )


def check_joint(value: Any) -> None:
    """Raises unless `value` is a joint ensemble."""
    if isinstance(value, JointEnsemble):
        return
    fix = "A loss sees one member, `ensemble[0]`; `batch_ensemble(model, 4, key=key)` makes one of a model."
    raise TypeError(f"`{caller()}` needs a `JointEnsemble`, got {kind_text(value)}.\n{fix}")


def check_predictions(predictions: Any) -> None:
    """Raises unless all arrays have at least three axes: members, rows and sub-members."""
    shapes = [x.shape for x in jax.tree.leaves(predictions)]
    if not shapes or min(map(len, shapes)) < 3:
        raise ValueError(
            f"`{caller()}` needs predictions `(members, rows, submembers, ...)`, as `predict` of an ensemble of joint "
            f"ensembles returns them; got shapes {shapes}.\n"
            "Those of one joint ensemble, `jax.vmap(joint)(x)`, need `jnp.moveaxis(predictions, 1, 0)`."
        )


def check_chain(layers: list[Any], model: Any) -> None:
    """Raises unless each layer takes the output of the previous one, perhaps flattened, and they hold all arrays."""
    sizes = [(math.prod(input_shape(layer)), math.prod(output_shape(layer))) for layer in layers]
    for i, ((_, out), (into, _)) in enumerate(itertools.pairwise(sizes), start=1):
        if into % out:
            raise ValueError(
                f"`{caller()}` needs a chain of layers; layer {i} takes {into} features, and the layer before it "
                f"returns {out}.\nSelect the layers in the order of the call: `where=lambda model: [model.a, model.b]`."
            )
    for layer in layers:
        check_groups(layer)
    held = {id(x) for layer in layers for x in jax.tree.leaves(layer)}
    for path, x in jtu.tree_leaves_with_path(model):
        if is_member_array(x) and id(x) not in held:
            raise ValueError(
                f"`{caller()}` makes layers of other widths, and cannot change the other arrays of a model; at "
                f"`{jtu.keystr(path)}`: got {leaf_text(x)}.\nBuild an ensemble of narrow models instead."
            )
