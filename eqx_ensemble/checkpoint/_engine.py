"""What the other packages of the library use of `checkpoint`."""

from ._call_folder import (
    CallRecord,
    Claim,
    check_resume,
    check_run_folder,
    check_same_call,
    child,
    children,
    conditions,
    has_call,
    has_checkpoints,
    lock_folder,
    read_call,
    write_call,
)
from ._check import check_format, corrupt_error, safe_text
from ._checkpoints import as_checkpoints, checkpoints_inside, remove_run
from ._disk import absolute, as_path, is_on_disk
from ._exit import exit_if_asked, hold_exit, is_exit_asked
from ._formats import FORMATS, FormatName, is_of_fit, open_checkpoint
from ._manifest import Manifest
from ._record import (
    InvalidRecordError,
    check_fields,
    check_valid,
    decode_array,
    decode_bytes,
    encode_array,
    encode_bytes,
    explain_record,
    is_count,
    is_encodable,
    is_record,
    is_seconds,
    is_string,
)
from ._restore import restore
from ._snapshot import count_bytes, snapshot, versions
from ._structure import LeafDifference, check_same_leaves, is_array_like, is_number, saved_leaves, shape_text
from ._write import write_file
