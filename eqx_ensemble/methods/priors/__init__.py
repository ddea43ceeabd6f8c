"""Prior functions, anchors and noisy targets, which make members approximate draws from a Bayesian posterior."""

from ._anchor import Anchor as Anchor
from ._anchor import RandomisedPrior as RandomisedPrior
from ._anchor import draw_anchors as draw_anchors
from ._anchor import gaussian_penalty as gaussian_penalty
from ._anchor import noisy_targets as noisy_targets
