from ._blocks import by_rows as by_rows
from ._blocks import pays as pays
from ._blocks import pays_if_large as pays_if_large
from ._order import by_order as by_order
from ._order import sort_rows as sort_rows
from ._pairs import of_predictions as of_predictions
from ._pairs import takes_pair as takes_pair
