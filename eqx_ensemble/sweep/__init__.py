from .. import _suggest
from ._draw import draw as draw
from ._grid import grid as grid
from ._grid import zip_values as zip_values
from ._range import AbstractRange as AbstractRange
from ._ranges import Choice as Choice
from ._ranges import LogUniform as LogUniform
from ._ranges import Uniform as Uniform
from ._schedule import rescale_schedule as rescale_schedule

_suggest.explain_names(__name__)
