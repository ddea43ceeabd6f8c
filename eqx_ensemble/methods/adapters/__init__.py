"""Adapters: members that fine-tune one frozen base model, which is stored once, by few weights of their own."""

from ._adapt import bias_only as bias_only
from ._adapt import layers_only as layers_only
from ._adapt import low_rank as low_rank
from ._adapt import merge as merge
from ._adapt import scales as scales
