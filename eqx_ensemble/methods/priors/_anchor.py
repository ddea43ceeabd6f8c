from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from ... import _keys
from ..._ensemble import Ensemble
from ..._ensemble._check import check_ensemble
from ..._pytree import PyTree
from ...train._trainable import Trainable, partition_trainable
from ._check import check_num_rows, check_real, check_same_model, check_std, prefix_message

_is_none = lambda x: x is None


class Anchor(eqx.Module):
    r"""A draw from the prior over a member's weights, towards which its weights are regularised.

    [`eqx_ensemble.methods.priors.draw_anchors`][] returns the anchors of all members, to be passed as hyper-parameters
    to [`eqx_ensemble.fit`][]; a loss with a parameter `hyper` receives the anchor of its member.

    **Attributes:**

    - `weights`: the draw $w_0$ for each trained leaf; `None` for other leaves.
    - `std`: the standard deviation $\sigma$ of the prior, one number per trained leaf.
    """

    weights: PyTree
    std: PyTree

    def penalty(self, model: PyTree, *, num_rows: Any) -> Float[Array, ""]:
        r"""The penalty $\frac{1}{N} \sum_j (w_j - w_{0j})^2 / (2 \sigma_j^2)$ of one member, in nats per row.

        Add it to a loss that is a **mean** over rows of negative log-likelihoods. A mean squared error lacks the factor
        $1 / (2 s^2)$, with the standard deviation $s$ of the noise in the targets: multiply the penalty by $2 s^2$. For
        a sum over all rows, use `num_rows=1`.

        **Arguments:**

        - `model`: the model of one member, as the loss receives it.
        - `num_rows`: $N$, the number of all training rows of the member, not of a batch. It scales the prior to a mean
            over rows.

        **Returns:** a scalar, at least float32.

        **Raises:** `ValueError` for a model of other shapes, and for `num_rows` that is not above 0 and finite;
        `TypeError` if it is not one number.
        """
        anchors, _ = jtu.tree_flatten_with_path(self.weights, is_leaf=_is_none)
        leaves = jax.tree.leaves(model, is_leaf=_is_none)
        check_same_model(anchors, leaves)
        num_rows = check_num_rows(num_rows)
        kept = [(w, a) for w, (_, a) in zip(leaves, anchors, strict=True) if a is not None]
        terms = []
        for (w, a), std in zip(kept, jax.tree.leaves(self.std), strict=True):
            dtype = _at_least_single(a.dtype)
            scaled = (w.astype(dtype) - a.astype(dtype)) / jnp.asarray(std, dtype)
            terms.append(jnp.sum(scaled**2) / 2)
        widest = max((term.dtype for term in terms), key=lambda dtype: dtype.itemsize)
        total = jnp.sum(jnp.stack([term.astype(widest) for term in terms]))
        return total / jnp.asarray(num_rows, total.dtype)


def draw_anchors(
    ensemble: Ensemble[Any], std: PyTree = 1.0, *, trainable: Trainable = eqx.is_inexact_array, key: Any
) -> Anchor:
    r"""Draws an anchor for each member from a Gaussian prior over the weights, with mean 0.

    Training with the penalty of [`eqx_ensemble.methods.priors.Anchor.penalty`][] is maximum a posteriori estimation
    with a prior whose mean is the member's own draw. For a linear model with Gaussian noise, members trained on noisy
    targets ([`eqx_ensemble.methods.priors.noisy_targets`][]) are exact draws from the posterior; without noisy targets
    their variance is too small. For networks this is an approximation.

    Anchors are hyper-parameters, and must be excluded from random perturbation: revive diverged members with
    `on_diverge=train.Revive(perturb=None)`.

    **Arguments:**

    - `ensemble`: the ensemble to be trained. Only its structure is used; anchors are not an initialisation.
    - `std`: the standard deviation of the prior: a number, a function of a leaf of one member (a
        `jax.ShapeDtypeStruct`), or a tree of either that is a prefix of a member's tree.
    - `trainable`: the leaves with an anchor; the same as for [`eqx_ensemble.fit`][].
    - `key`: the root key. A member's anchor is drawn from it and the member's id.

    **Returns:** the anchors of all members, each leaf `(members, ...)`.

    **Raises:** `TypeError` or `ValueError` for standard deviations that are not numbers above zero or not a prefix of a
    member's tree, complex weights, and an ensemble without trained leaves.

    ```python
    x, y, noise = jnp.ones((100, 3)), jnp.zeros((100, 1)), 0.1
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    anchors = ee.methods.priors.draw_anchors(
        ensemble, lambda leaf: 1 / np.sqrt(leaf.shape[-1]), key=key
    )
    targets = ee.methods.priors.noisy_targets(y, ensemble.ids, std=noise, key=key)


    def loss(model, batch, key, hyper):
        x, y = batch
        nll = jnp.mean((jax.vmap(model)(x) - y) ** 2) / (2 * noise**2)
        return nll + hyper["anchor"].penalty(model, num_rows=100)


    run = ee.fit(
        ensemble,
        loss,
        optax.adam(1e-3),
        (x, targets),
        hyper={"anchor": anchors},
        epochs=2,
        key=key,
    )
    ```

    ??? cite

        Pearce, Leibfried, Brintrup, Zaki and Neely, *Uncertainty in Neural Networks: Approximately Bayesian
        Ensembling*, AISTATS 2020, arXiv:1810.05546.
    """
    name = "methods.priors.draw_anchors"
    check_ensemble(ensemble, name=name)
    keys = _keys.member_keys(key, ensemble.ids, purpose="anchor")
    params, _ = partition_trainable(ensemble, trainable, name=name)
    for path, leaf in jtu.tree_leaves_with_path(params):
        check_real(leaf, jtu.keystr(path))
    stds = _std_of_leaves(std, params)
    leaves, treedef = jax.tree.flatten(params)
    drawn, widths = [], []
    for i, (leaf, scale) in enumerate(zip(leaves, stds, strict=True)):
        one = lambda key, i=i, leaf=leaf: jax.random.normal(jax.random.fold_in(key, i), leaf.shape[1:], leaf.dtype)
        drawn.append(jnp.asarray(scale, leaf.dtype) * jax.vmap(one)(keys))
        widths.append(jnp.full(len(ensemble), scale, _at_least_single(leaf.dtype)))
    return Anchor(jax.tree.unflatten(treedef, drawn), jax.tree.unflatten(treedef, widths))


def _at_least_single(dtype: Any) -> Any:
    """The dtype to compute in, at least float32; explicit, because dtype promotion may be strict."""
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def _std_of_leaves(std: PyTree, params: PyTree) -> list[float]:
    """The standard deviation of every trained leaf, from a prefix of a member's tree."""
    given: list[tuple[str, Any]] = []
    note = lambda path, own, part: given.extend([(f"std{jtu.keystr(path)}", own)] * len(jax.tree.leaves(part)))
    try:
        jtu.tree_map_with_path(note, std, params)
    except ValueError as error:
        raise ValueError(prefix_message(std)) from error
    one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    leaves = zip(given, jax.tree.leaves(params), strict=True)
    return [check_std(own(one(x)) if callable(own) else own, where) for (where, own), x in leaves]
