from ._batch import take_rows as take_rows
from ._check import check_combine as check_combine
from ._check import check_rows_of_result as check_rows_of_result
from ._inputs import check_members_and_rows as check_members_and_rows
from ._predict import PredictOptions as PredictOptions
from ._predict import predict as predict
