from ._like import as_like as as_like
from ._like import check_like_given as check_like_given
from ._like import evaluate_make as evaluate_make
from ._save_load import load as load
from ._save_load import marks as marks
from ._save_load import save as save
