from ._outer import callbacks as callbacks
from ._outer import has_callbacks as has_callbacks
from ._outer import inner_jaxprs as inner_jaxprs
from ._outer import output_sources as output_sources
from ._outer import plain_jit as plain_jit
from ._outer import unused_inputs as unused_inputs
from ._outer import warn_of_two_batch_axes as warn_of_two_batch_axes
