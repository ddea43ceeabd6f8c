"""What the other packages of the library use of `resample`."""

from ._held_out import check_folds
