"""What the other packages of the library use of `plot`."""

from ._figure import figure_of_run
