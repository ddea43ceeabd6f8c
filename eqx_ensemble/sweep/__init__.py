from ._ranges import AbstractRange as AbstractRange
from ._ranges import Choice as Choice
from ._ranges import LogUniform as LogUniform
from ._ranges import Uniform as Uniform
from ._ranges import draw as draw
from ._ranges import grid as grid
from ._ranges import rescale_schedule as rescale_schedule
