"""What the other packages of the library use of `scores`."""

from .._boundary import Reduction, reduce
from ._binning import Binning, CheckedRowWeights, mean_gap, reliability
from ._distributions import log_density
