"""What the other packages of the library use of `scores`."""

from ._binning import Binning as Binning
from ._binning import bin_rows as bin_rows
from ._binning import check_bins as check_bins
from ._binning import mean_gap as mean_gap
from ._binning import of_top_label as of_top_label
from ._by_group import check_groups as check_groups
from ._check import check_reduction as check_reduction
from ._check import check_some_rows as check_some_rows
from ._gaussian import log_density as log_density
from ._reduce import Reduction as Reduction
from ._reduce import reduce as reduce
