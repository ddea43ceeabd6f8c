"""Checks that the guarantees for ensembles hold for your own models."""

from ._independent import check_independent as check_independent
