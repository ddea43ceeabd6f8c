"""Checks for your own models: does what holds for ensembles hold for this one?"""

from ._faithful import check_ensemble as check_ensemble
from ._independent import check_independent as check_independent
from ._report import Check as Check
