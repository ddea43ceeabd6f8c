import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def positions(
    ordered: Float[Array, "*batch classes"], values: Float[Array, "*batch classes"], side: str
) -> Int32[Array, "*batch classes"]:
    """The number of sorted values of each row that are below each value (left), or at most equal to it (right)."""
    find = lambda row, wanted: jnp.searchsorted(row, wanted, side=side)
    return jnp.vectorize(find, signature="(c),(c)->(c)")(ordered, values).astype(jnp.int32)
