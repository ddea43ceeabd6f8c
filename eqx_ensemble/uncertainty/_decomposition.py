from typing import NamedTuple

from jaxtyping import Array, Float


class Decomposition(NamedTuple):
    """Uncertainty in two parts, `total` = `aleatoric` + `epistemic`, all of the same shape.

    Aleatoric uncertainty is the noise that members predict; epistemic uncertainty is the disagreement between members,
    which more data would reduce.
    """

    total: Float[Array, "..."]
    aleatoric: Float[Array, "..."]
    epistemic: Float[Array, "..."]
