from ._draw import Choice as Choice
from ._draw import LogUniform as LogUniform
from ._draw import Uniform as Uniform
from ._draw import draw as draw
from ._grid import grid as grid
from ._grid import zipped as zipped
from ._schedule import stretched as stretched
