"""Members over many workers: shards of an ensemble on any executor, with the results of one process."""

from ._fit import fit as fit
