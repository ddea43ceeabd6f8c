"""What the other packages of the library use of `scores`."""

from ._binning import Binning, mean_gap, reliability
