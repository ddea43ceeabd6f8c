"""Alignment: a common order of hidden units for independent members."""

from ._align import align as align
from ._find import Heads as Heads
from ._find import Units as Units
from ._find import find_units as find_units
