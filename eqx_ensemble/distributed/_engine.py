"""What the other packages of the library use of `distributed`."""

from ._arrays import all_gather, raise_on_all
