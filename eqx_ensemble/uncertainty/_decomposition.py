from typing import NamedTuple

from jaxtyping import Array, Float


class Decomposition(NamedTuple):
    """Uncertainty in two parts, `total` = `aleatoric` + `epistemic`, all of one shape.

    Aleatoric is what the members agree is noise; epistemic is their disagreement, which more data would reduce.
    """

    total: Float[Array, "..."]
    aleatoric: Float[Array, "..."]
    epistemic: Float[Array, "..."]
