"""What the other packages of the library use of `sweep`."""

from ._ranges import TABLE_COLUMNS
