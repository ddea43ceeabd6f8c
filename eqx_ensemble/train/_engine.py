"""What the other packages of the library use of `train`."""

from ._check import check_inner_optimiser, check_mode, check_no_transformation, check_optimiser, check_optimiser_kind
from ._check_member import check_same_hyper, check_state_arrays
from ._check_run import diverged_message, warn_of_diverged
from ._fit import fit
from ._hyper import change_hyper, follow_hyper, hyper_arrays
from ._options import Checkpoint, as_checkpoint
from ._revive import Revive, copy_donors
from ._run import Run, check_healthy, check_rows_of_folds, data_frame
from ._state import MemberConstants, MemberState, check_state, check_train_state, init
from ._status import Status, UnfinishedError, allow_idle, only_read
from ._texts import array_texts, check_same_call, function_text, option_text, repr_text, versions_text
from ._trainable import Trainable, frozen_flags, partition_trainable
from .compiled._check import check_loss_output, check_loss_signature, explain_loss
from .compiled._health import nan_is_data, revert_diverged_one
from .compiled._loss import as_loss
from .compiled._optimiser import Optimiser, init_member, resolve, supported_arguments, update_member
from .compiled._program import take_rows
from .compiled._selection import reset_best, stop_members
from .data._check import check_batch_size
from .data._reader import RowReader
from .data._source import decode, encode, is_batches, is_data_function
from .host._record import align_histories
