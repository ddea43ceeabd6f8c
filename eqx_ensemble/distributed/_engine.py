"""What the other packages of the library use of `distributed`."""

from ._arrays import raise_on_all
