import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def make_series(length: int, *, seed: int = 0) -> Float[np.ndarray, " time"]:
    """Two sines and noise, in 64 bits as most files have it."""
    time = np.arange(length)
    noise = np.random.default_rng(seed).normal(scale=0.1, size=length)
    return 20 + 3 * np.sin(time / 5) + np.sin(time / 2.3) + noise


def make_windows(
    series: Float[Array, " time"], num_steps: int
) -> tuple[Float[Array, "rows {num_steps}"], Float[Array, " rows"]]:
    """All windows of so many steps, each with the value that follows it."""
    starts = jnp.arange(series.shape[0] - num_steps)
    return series[starts[:, None] + jnp.arange(num_steps)[None]], series[starts + num_steps]
