"""What the other packages of the library use of `uncertainty`."""

from ._entropy import divergence
