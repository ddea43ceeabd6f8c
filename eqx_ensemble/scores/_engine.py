"""What the other packages of the library use of `scores`."""

from ._binning import Binning, bin_rows, check_bins, mean_gap, of_top_label
from ._by_group import check_groups
from ._gaussian import log_density
from ._reduce import Reduction, RowWeights, reduce
