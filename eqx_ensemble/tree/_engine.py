"""What the other packages of the library use of `tree`."""

from ._check import check_distinct, check_index, check_no_tracers, check_trees
from ._compare import CONCATENATE_RULES, Rules, compare_trees
from ._index import map_columns
from ._sum import combine_trees
