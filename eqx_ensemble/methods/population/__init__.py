"""Decisions between epochs, as functions of a training state: for callbacks of `fit` and for loops of your own."""

from ...train._revive import copy_members as copy_members
from ._decisions import exploit as exploit
from ._decisions import keep_best as keep_best
from ._decisions import perturb_hyper as perturb_hyper
from ._decisions import rank as rank
from ._decisions import truncation as truncation
