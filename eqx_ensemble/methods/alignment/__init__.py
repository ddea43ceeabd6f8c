"""Alignment: a common order of hidden units for independent members."""

from ._align import align as align
from ._units import Units as Units
from ._units import find_units as find_units
