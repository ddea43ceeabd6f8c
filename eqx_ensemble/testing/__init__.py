"""Checks that the guarantees for ensembles hold for your own models."""

from .. import _suggest
from ._independent import check_independent as check_independent

_suggest.explain_names(__name__)
