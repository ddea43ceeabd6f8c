from ._inner import callbacks as callbacks
from ._inner import has_callbacks as has_callbacks
from ._inner import inner_jaxprs as inner_jaxprs
from ._inner import plain_jit as plain_jit
from ._promotion import warn_of_two_batch_axes as warn_of_two_batch_axes
from ._unused import output_sources as output_sources
from ._unused import unused_inputs as unused_inputs
