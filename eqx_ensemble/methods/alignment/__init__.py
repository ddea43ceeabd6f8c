"""Alignment: a common order of hidden units for independent members, and the loss along the lines between members."""

from ._align import align as align
from ._connectivity import barrier as barrier
from ._connectivity import connectivity as connectivity
from ._connectivity import interpolate as interpolate
from ._find import Heads as Heads
from ._find import Units as Units
from ._find import find_units as find_units
