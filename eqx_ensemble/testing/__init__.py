"""Checks that the guarantees for ensembles hold for your own models."""

from ._faithful import Check as Check
from ._faithful import check_ensemble as check_ensemble
from ._independent import check_independent as check_independent
