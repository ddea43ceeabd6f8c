import math
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from ... import _keys
from ..._check import (
    check_floating_arrays,
    check_function,
    check_number,
    check_positive_int,
    check_variance,
    check_word,
)
from ..._pytree import PyTree
from ...train import Frozen
from ._check import check_hidden, check_outputs, check_positive_number


def mean_field(
    mean: Float[ArrayLike, "*batch"], variance: Float[ArrayLike, "*batch"], *, factor: float | int = math.pi / 8
) -> Float[Array, "*batch"]:
    r"""Logits whose softmax or sigmoid approximates the mean probability under Gaussian logits.

    $\mu / \sqrt{1 + \lambda \sigma^2}$ for each logit. With $\lambda = \pi / 8$ the sigmoid is MacKay's approximation
    of the mean probability, accurate to about 0.01; the authors of SNGP tune $\lambda$, for example 20 on CIFAR-100,
    which moves uncertain rows much closer to uniform probabilities. For a softmax it is a heuristic: variance common to
    all classes changes probabilities, although a common shift of the logits would not.

    **Arguments:**

    - `mean`, `variance`: the mean and variance of the logits, of equal shapes, such as those of
        [`eqx_ensemble.methods.sngp.SNGPOutput`][], with or without a `members` axis.
    - `factor`: $\lambda$, zero or more.

    **Returns:** logits of the shape of `mean`.

    **Raises:** `TypeError` for arguments that are not floating-point; `ValueError` for shapes that differ, and for
    negative variances (where concrete).

    ```python
    # The mean probability is 0.697, not sigmoid(1) = 0.731
    jax.nn.sigmoid(ee.methods.sngp.mean_field(jnp.array([1.0]), jnp.array([1.0])))  # 0.700
    ```

    ??? cite
        [Uncertainty Estimation with Infinitesimal Jackknife, Its Distribution and Mean-Field
        Approximation](https://arxiv.org/abs/2006.07584), Lu et al., 2020.
    """
    name = "methods.sngp.mean_field"
    centre, variances = check_floating_arrays(name, mean=mean, variance=variance)
    check_variance(name, variance, positive=False)
    return centre / jnp.sqrt(1 + check_number(factor, "factor", name=name, least=0) * variances)


M = TypeVar("M")

Likelihood = Literal["gaussian", "bernoulli", "categorical"]
_NAME = "methods.sngp.SNGP"


class SNGPOutput(NamedTuple):
    """The prediction of an [`eqx_ensemble.methods.sngp.SNGP`][] for one row.

    **Attributes:**

    - `mean`: `(out,)`, logits of classes or means of targets.
    - `variance`: `(out,)`, the variance under the Gaussian process of the last layer, without noise; NaN before
        [`eqx_ensemble.methods.sngp.update_covariance`][].
    """

    mean: Float[Array, "*batch out"]
    variance: Float[Array, "*batch out"]


class SNGP(eqx.Module, Generic[M]):
    r"""A member whose last layer is a Gaussian process, approximated by random Fourier features.

    For hidden units $h$ of `network`, the features are $\phi = \sqrt{2 / D} \cos(W h + b)$ with fixed random
    $W \sim \mathcal{N}(0, 1 / l^2)$ and $b \sim \mathcal{U}(0, 2 \pi)$, so that $\phi^\top \phi'$ approximates the
    kernel $\exp(-|h - h'|^2 / 2 l^2)$. Outputs have the mean $\beta^\top \phi$ and the variance
    $\phi^\top \Sigma \phi$. Network and $\beta$ are trained; $W$, $b$ and $\Sigma$ are [`eqx_ensemble.train.Frozen`][].
    The variance is NaN until [`eqx_ensemble.methods.sngp.update_covariance`][] computes $\Sigma$ from the training
    data; call it again after further training.

    Each member of [`eqx_ensemble.build`][] draws its own $W$ and $b$ from its key. The variance depends on distances
    between rows in $h$, which reflect distances between inputs if the network is nearly distance-preserving: train it
    with [`eqx_ensemble.methods.sngp.bound_spectral_norm`][], and use residual connections.

    $\beta$ has the prior $\mathcal{N}(0, 1 / \text{ridge})$: with a loss that is a mean over $N$ rows, add
    `ridge / (2 * N) * jnp.sum(model.weight**2)`. The covariance takes `num_features**2` numbers per member, times the
    number of classes for `"categorical"`.

    **Arguments:**

    - `network`: a function of a row to hidden units `(in_size,)`: any model without its last layer. It may be stateful.
    - `in_size`, `out_size`: the numbers of hidden units and of outputs.
    - `num_features`: $D$. The error of the kernel is about $1 / \sqrt{D}$.
    - `length_scale`: $l$, in the unit of the hidden units, which an `equinox.nn.LayerNorm` at the end of the network
        fixes.
    - `ridge`: the prior precision of $\beta$.
    - `likelihood`: the likelihood of the outputs, for the covariance: `"gaussian"` with `noise_variance`, one
        covariance for all outputs, which the authors' code also uses for classes; `"bernoulli"` for one logit;
        `"categorical"` for logits of classes, with one covariance per class.
    - `noise_variance`: the noise variance of `"gaussian"`.
    - `key`: the member's key.

    **Returns** (when called): [`eqx_ensemble.methods.sngp.SNGPOutput`][]; if a state is among the inputs, also the new
    state.

    **Raises:** `TypeError` or `ValueError` for invalid arguments; when called, `ValueError` if the output of the
    network is not `(in_size,)`, and `TypeError` if it is not floating-point.

    ```python
    def make(key):
        own, head = jax.random.split(key)
        network = eqx.nn.MLP(3, 16, 16, 2, key=own)
        return ee.methods.sngp.SNGP(network, 16, 2, num_features=64, key=head)


    def loss(model, batch, key):
        x, labels = batch
        logits = jax.vmap(model)(x).mean
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


    ensemble = ee.build(make, 4, key=key)
    x = jax.random.normal(key, (100, 3))
    optimiser = ee.methods.sngp.bound_spectral_norm(optax.adam(1e-2), 0.95)
    data = (x, (x[:, 0] > 0).astype(int))
    run = ee.fit(ensemble, loss, optimiser, data, epochs=2, key=key)
    ensemble = ee.methods.sngp.update_covariance(run.ensemble, x)
    out = ee.predict(ensemble, x)
    ee.combine.mixture(ee.methods.sngp.mean_field(out.mean, out.variance))
    ```

    ??? cite
        [Simple and Principled Uncertainty Estimation with Deterministic Deep Learning via Distance
        Awareness](https://arxiv.org/abs/2006.10108), Liu et al., 2020.
    """

    network: M
    weight: Float[Array, "out features"]
    frequencies: Frozen[Any]
    phases: Frozen[Any]
    root: Frozen[Any]
    ridge: float = eqx.field(static=True)
    likelihood: Likelihood = eqx.field(static=True)
    noise_variance: float = eqx.field(static=True)

    def __init__(
        self,
        network: M,
        in_size: int,
        out_size: int,
        *,
        num_features: int = 1024,
        length_scale: float | int = 1.0,
        ridge: float | int = 1.0,
        likelihood: Likelihood = "gaussian",
        noise_variance: float | int = 1.0,
        key: Any,
    ) -> None:
        check_function(network, "network", name=_NAME, example="eqx.nn.MLP(3, 16, 16, 2, key=key)")
        width = check_positive_int(in_size, "in_size", name=_NAME)
        count = check_positive_int(num_features, "num_features", name=_NAME)
        scale = check_positive_number(length_scale, "length_scale", name=_NAME)
        check_word(likelihood, "likelihood", ("gaussian", "bernoulli", "categorical"), name=_NAME)
        outputs = check_outputs(out_size, likelihood)
        own, first, second = jax.random.split(_keys.root(key, name=_NAME), 3)
        self.network = network
        self.weight = jax.random.normal(own, (outputs, count)) / count**0.5
        self.frequencies = Frozen(jax.random.normal(first, (count, width)) / scale)
        self.phases = Frozen(jax.random.uniform(second, (count,), maxval=2 * jnp.pi))
        self.ridge = check_positive_number(ridge, "ridge", name=_NAME)
        shape = (outputs, count, count) if likelihood == "categorical" else (count, count)
        self.root = Frozen(jnp.zeros(shape))
        self.likelihood = likelihood
        self.noise_variance = check_positive_number(noise_variance, "noise_variance", name=_NAME)

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Mean and variance of the outputs for one row; if a state is among the inputs, also the new state."""
        is_stateful = any(isinstance(x, eqx.nn.State) for x in args)
        out = self.network(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        hidden, *state = out if is_stateful else (out,)
        phi = self.features(hidden)
        root = jax.lax.stop_gradient(self.root.value).astype(phi.dtype)
        variance = jnp.where(root[..., 0, 0] == 0, jnp.nan, jnp.sum((root @ phi) ** 2, axis=-1))  # 0: not yet computed
        mean = self.weight.astype(phi.dtype) @ phi
        found = SNGPOutput(mean, jnp.broadcast_to(variance, mean.shape))
        return (found, *state) if is_stateful else found

    def features(self, hidden: Float[Array, " hidden"]) -> Float[Array, " features"]:
        """The random features of one row's hidden units."""
        frequencies, phases = (jax.lax.stop_gradient(x.value) for x in (self.frequencies, self.phases))
        check_hidden(hidden, frequencies.shape[1])
        cosines = jnp.cos(frequencies.astype(hidden.dtype) @ hidden + phases.astype(hidden.dtype))
        return (2 / phases.shape[0]) ** 0.5 * cosines
