"""Averages of weights that are chosen by a held-out score; [`eqx_ensemble.average`][] takes all members, or weights."""

from ._greedy import Soup as Soup
from ._greedy import greedy as greedy
