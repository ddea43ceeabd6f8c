"""Distillation of an ensemble into one model or a smaller ensemble: targets from its predictions, and losses."""

from ._losses import distribution_loss as distribution_loss
from ._losses import gaussian_loss as gaussian_loss
from ._losses import mixture_loss as mixture_loss
from ._targets import split_targets as split_targets
from ._targets import targets as targets
