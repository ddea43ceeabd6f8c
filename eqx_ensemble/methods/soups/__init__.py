"""Averages of members chosen by a held-out score; [`eqx_ensemble.average_parameters`][] averages all members."""

from ._greedy import Soup as Soup
from ._greedy import greedy as greedy
