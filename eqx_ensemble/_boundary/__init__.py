from . import kinds as kinds
from ._function import array_function as array_function
from ._rows import counted_rows as counted_rows
from ._rows import mean_of_rows as mean_of_rows
from ._rows import reduce as reduce
from ._rows import weigh as weigh
from ._weights import check_row_weights as check_row_weights
