"""Interacting particles: SVGD and repulsive ensembles, in weight space and in function space."""

from ._directions import RBF as RBF
from ._directions import AbstractKernel as AbstractKernel
from ._directions import svgd as svgd
from ._directions import wgd as wgd
from ._step import InteractingStep as InteractingStep
from ._step import make_function_space_step as make_function_space_step
from ._step import make_step as make_step
