"""What the other packages of the library use of `tree`."""

from ._check import check_distinct as check_distinct
from ._check import check_index as check_index
from ._check import check_no_tracers as check_no_tracers
from ._check import check_trees as check_trees
from ._compare import CONCATENATE_RULES as CONCATENATE_RULES
from ._compare import LOOP_RULES as LOOP_RULES
from ._compare import Rules as Rules
from ._compare import compare_trees as compare_trees
from ._index import map_columns as map_columns
from ._statics import global_names as global_names
from ._statics import static_gap as static_gap
from ._statics import static_parts as static_parts
from ._sum import combine_trees as combine_trees
