"""What the other packages of the library use of `scores`."""

from .._boundary import Reduction, reduce
from ._binning import Binning, bin_rows, mean_gap, reliability
from ._binning import CheckedRowWeights as RowWeights
from ._gaussian import log_density
