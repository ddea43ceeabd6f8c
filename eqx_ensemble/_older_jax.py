"""Names that older supported releases of JAX have in another module."""

try:
    from jax.errors import InconclusiveDimensionOperation as InconclusiveDimensionOperation  # pyright: ignore
except ImportError:  # before 0.10
    from jax.core import InconclusiveDimensionOperation as InconclusiveDimensionOperation  # pyright: ignore

try:
    from jax.extend.core import get_opaque_trace_state as get_opaque_trace_state  # pyright: ignore
except ImportError:  # before 0.10
    from jax.core import get_opaque_trace_state as get_opaque_trace_state  # pyright: ignore
