from ._members import export_members as export_members
from ._members import load_members as load_members
from ._save_load import load as load
from ._save_load import marks as marks
from ._save_load import save as save
