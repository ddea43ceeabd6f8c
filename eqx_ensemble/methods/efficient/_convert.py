import collections
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..._caller import caller
from ..._check import check_key, check_optional_function, check_positive_int, is_member_array, kind_text
from ..._ensemble import Ensemble
from ..._leaf_text import leaf_text
from ..._warnings import warn
from ...train import Frozen
from ._joint import JointEnsemble, is_joint_layer
from ._layers import Layer, input_shape, output_shape

_TIED = eqx.nn.Shared | eqx.nn.WeightNorm | eqx.nn.SpectralNorm
_KNOWN = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d)


def check_model(model: Any, num_submembers: Any, key: Any) -> int:
    """Raises unless `model` is one ordinary Module. Returns the number of sub-members as an `int`."""
    if isinstance(model, Ensemble):
        raise TypeError(
            f"`{caller()}` converts one model, got an `Ensemble`.\nConvert while building, with keys of their own: "
            f"`build(lambda key: {caller()}(make(key), {num_submembers}, key=key), num_members, key=key)`."
        )
    if not isinstance(model, eqx.Module) or not callable(model):
        raise TypeError(f"`{caller()}` needs an Equinox Module that can be called, got {kind_text(model)}.")
    nodes = jax.tree.leaves(model, is_leaf=lambda x: is_joint_layer(x) or isinstance(x, JointEnsemble | Ensemble))
    if any(is_joint_layer(x) or isinstance(x, JointEnsemble | Ensemble) for x in nodes):
        raise TypeError(f"`{caller()}` needs a model without sub-members; a part of this one has some already.")
    check_key(key)
    return check_positive_int(num_submembers, "num_submembers")


def check_layers(layers: list[Any], model: Any, *, least: int) -> None:
    """Raises unless linear layers or convolutions of one model are selected, each once, and none is tied."""
    fix = "`where` is a type such as `eqx.nn.Linear`, or a function such as `lambda model: model.layers[1:]`."
    if len(layers) < least:
        wanted = "a linear layer or convolution" if least == 1 else f"at least {least} linear layers or convolutions"
        raise ValueError(f"`{caller()}` needs {wanted}; {len(layers)} selected.\n{fix}")
    for layer in layers:
        if not isinstance(layer, Layer):
            raise TypeError(
                f"`{caller()}` needs `where` to select linear layers or convolutions, got {kind_text(layer)}."
            )
        _check_weight(layer)
    times = collections.Counter(id(x) for x in jax.tree.leaves(model) if is_member_array(x))
    tied = any(times[id(layer.weight)] > 1 for layer in layers)
    for node in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, _TIED)):
        inside = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, Layer)) if isinstance(node, _TIED) else []
        tied |= any(layer is x for x in inside for layer in layers) or isinstance(node, eqx.nn.Shared)
    if tied:
        raise ValueError(
            f"`{caller()}` needs layers whose weights are their own: weights that are tied, by `eqx.nn.Shared`, "
            "`WeightNorm`, `SpectralNorm` or one array in two places, cannot be converted.\n"
            "Select other layers by `where`, or a model without the tie."
        )
    if len(set(map(id, layers))) < len(layers):
        raise ValueError(f"`{caller()}` needs `where` to select each layer once.\n{fix}")


def _check_weight(layer: Any) -> None:
    """Raises unless a layer has the floating-point weight of one model."""
    weight, ndim = layer.weight, 2 if isinstance(layer, eqx.nn.Linear) else layer.num_spatial_dims + 2
    if not is_member_array(weight) or weight.ndim != ndim:
        got = leaf_text(weight) if is_member_array(weight) else kind_text(weight)
        raise ValueError(
            f"`{caller()}` needs the layers of ONE model; expected a weight of {ndim} axes, got {got}.\n"
            "Convert a model before stacking it: inside the function that `build` calls."
        )
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise TypeError(f"`{caller()}` needs real floating-point weights, got {leaf_text(weight)}.")


def check_known(layers: list[Any]) -> None:
    """Raises for subclasses of linear layers and convolutions, which may compute something else."""
    for layer in layers:
        if type(layer) not in _KNOWN:
            raise TypeError(
                f"`{caller()}` supports `eqx.nn.Linear`, `eqx.nn.Conv` and `Conv1d` to `Conv3d`, not other subclasses; "
                f"got {kind_text(layer)}.\nSelect other layers by `where`."
            )


def check_groups(layer: Any) -> None:
    """Raises for a grouped convolution."""
    if isinstance(layer, eqx.nn.Conv) and layer.groups > 1:
        raise ValueError(
            f"`{caller()}` needs a first and a last layer without groups, got `groups={layer.groups}`: groups would "
            "separate the sub-members.\nSelect other layers by `where`."
        )


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
    fix = "`batch_ensemble(model, 4, key=key)` makes one of a model."
    if isinstance(value, Ensemble):
        fix = "A loss sees one member: pass it to `fit`, or use `map_members`."
    raise TypeError(f"`{caller()}` needs a `JointEnsemble`, got {kind_text(value)}.\n{fix}")


def check_predictions(predictions: Any) -> None:
    """Raises unless all arrays have at least three axes: members, rows and sub-members."""
    for path, x in jtu.tree_leaves_with_path(predictions) or [((), None)]:
        if not is_member_array(x) or x.ndim < 3:
            got = leaf_text(x) if is_member_array(x) else kind_text(x)
            where = jtu.keystr(path)
            raise ValueError(
                f"`{caller()}` needs predictions `(members, rows, submembers, ...)`, as `predict` of an ensemble of "
                f"joint ensembles returns them; {f'at `{where}`: ' if where else ''}got {got}.\n"
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


M = TypeVar("M")

Select = Callable[[Any], Any] | type | None
"""The layers to convert: nodes as in `equinox.tree_at`, all of a type, or all; the latter two skip frozen layers."""

_is_layer = lambda x: isinstance(x, Layer)


def select_layers(model: Any, where: Select, *, least: int = 1) -> tuple[Callable[[Any], list[Any]], list[Any]]:
    """Returns a function that finds the layers in a tree, and the layers of the model in the order of its fields."""
    check_optional_function(where, "where", example="lambda model: model.layers[1:]")
    kind = where if isinstance(where, type) else Layer

    def find(tree: Any) -> list[Any]:
        if where is None or isinstance(where, type):
            nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Layer | Frozen))
            return [x for x in nodes if isinstance(x, Layer) and isinstance(x, kind)]
        return jax.tree.leaves(where(tree), is_leaf=lambda x: _is_layer(x) or isinstance(x, eqx.Module))

    layers = find(model)
    check_layers(layers, model, least=least)
    return find, layers
