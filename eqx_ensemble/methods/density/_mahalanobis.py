import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from ..._check import check_flag
from ..._weighting import blank_masked
from ._check import check_classes, check_factors, check_features, check_new_features, check_ridge
from ._moments import centre_rows, class_means, factor, one_hot_rows, squared_distance


class Mahalanobis(eqx.Module):
    """Fitted Mahalanobis distances in the hidden units of each member; call it on features of the same members.

    **Attributes:**

    - `centre`: `(members, hidden)`, the mean of all rows.
    - `means`: `(members, classes, hidden)`, the class means relative to `centre`.
    - `factor`: `(members, hidden, hidden)`, the lower Cholesky factor of the covariance within classes.
    - `background`: `(members, hidden, hidden)`, that of the covariance of all rows.
    """

    centre: Float[Array, "members hidden"]
    means: Float[Array, "members classes hidden"]
    factor: Float[Array, "members hidden hidden"]
    background: Float[Array, "members hidden hidden"]

    def __call__(
        self, features: Float[ArrayLike, "members batch hidden"], *, relative: bool = True
    ) -> Float[Array, "members batch"]:
        """The squared distance to the nearest class; higher is more unusual.

        If `relative`, the squared distance under the Gaussian of all rows is subtracted; the result may be negative.
        """
        name = "methods.density.Mahalanobis"
        check_flag(relative, "relative", name=name)
        nearest, background = _distances(self, check_new_features(name, features, self.centre))
        return nearest - background if relative else nearest


def mahalanobis(
    features: Float[ArrayLike, "members batch hidden"],
    labels: Integer[ArrayLike, " batch"],
    *,
    num_classes: int,
    ridge: float | int = 0.0,
    mask: Bool[ArrayLike, " batch"] | None = None,
) -> Mahalanobis:
    r"""Fits class means and a common covariance to the hidden units of each member, for Mahalanobis distances.

    The squared distance of a row is $\min_c\, (h - \mu_c)^\top \Sigma^{-1} (h - \mu_c)$ with the covariance within
    classes (`ddof=0`). The relative distance subtracts $(h - \mu_0)^\top \Sigma_0^{-1} (h - \mu_0)$ with the mean and
    covariance of all rows. This discounts directions that do not discriminate between classes, and detects
    near-out-of-distribution rows.

    **Arguments:**

    - `features`, `labels`, `num_classes`, `ridge`, `mask`: as for
        [`eqx_ensemble.methods.density.gaussian_discriminant`][]. Without `ridge`, all classes together need at least as
        many rows as hidden units plus classes.

    **Returns:** [`eqx_ensemble.methods.density.Mahalanobis`][].

    **Raises:** as [`eqx_ensemble.methods.density.gaussian_discriminant`][].

    ```python
    features = jax.random.normal(key, (4, 100, 5))  # (members, batch, hidden)
    distance = ee.methods.density.mahalanobis(features, jnp.arange(100) % 2, num_classes=2)
    distance(3 * features).shape  # (4, 100)
    ```

    ??? cite
        [A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial
        Attacks](https://arxiv.org/abs/1807.03888), Lee et al., 2018; the relative distance: [A Simple Fix to
        Mahalanobis Distance for Improving Near-OOD Detection](https://arxiv.org/abs/2106.09022), Ren et al., 2021.
    """
    name = "methods.density.mahalanobis"
    checked, kept = check_features(name, features, mask)
    known = check_classes(name, labels, checked, num_classes, mask)
    level = check_ridge(name, ridge, checked.dtype)
    counted = one_hot_rows(blank_masked(known, kept), kept, num_classes, checked.dtype)
    fitted = jax.vmap(lambda x: _fit(x, counted, level))(blank_masked(checked, kept, before=1))
    check_factors(name, jnp.stack(fitted[2:], axis=1))
    return Mahalanobis(*fitted)


@jax.jit
def _fit(features: Array, counted: Array, ridge: Array) -> tuple[Array, Array, Array, Array]:
    """The centre, means and factors of one member."""
    rows = jnp.sum(counted, axis=1)
    deviations, centre = centre_rows(features, rows)
    means = class_means(deviations, counted)
    within = deviations - counted @ means
    own = lambda residuals: factor(residuals, rows, 0, ridge, jnp.max(jnp.abs(features), axis=0))
    return centre, means, own(within), own(deviations)


@jax.jit
def _distances(fitted: Mahalanobis, features: Array) -> tuple[Array, Array]:
    def of_member(features: Array, centre: Array, means: Array, within: Array, background: Array) -> tuple:
        away = features - centre[None]
        every = jax.lax.map(lambda mean: squared_distance(away - mean[None], within), means)
        return jnp.min(every, axis=0), squared_distance(away, background)

    return jax.vmap(of_member)(features, fitted.centre, fitted.means, fitted.factor, fitted.background)
