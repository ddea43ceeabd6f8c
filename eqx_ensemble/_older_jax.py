"""Names that older supported releases of JAX have in another module."""

try:
    from jax.errors import InconclusiveDimensionOperation as InconclusiveDimensionOperation
except ImportError:  # before 0.10
    from jax.core import InconclusiveDimensionOperation as InconclusiveDimensionOperation

try:
    from jax.extend.core import get_opaque_trace_state as get_opaque_trace_state
except ImportError:  # before 0.10
    from jax.core import get_opaque_trace_state as get_opaque_trace_state
