"""Alignment: hidden units of independent members in one order, and the loss on the way from one member to another."""

from ._align import align as align
from ._connectivity import barrier as barrier
from ._connectivity import connectivity as connectivity
from ._connectivity import interpolate as interpolate
from ._find import find_units as find_units
from ._units import Heads as Heads
from ._units import Units as Units
