"""What the other packages of the library use of `train`."""

from ._check import (
    check_hyper_used,
    check_inner_optimiser,
    check_mode,
    check_no_transformation,
    check_optimiser,
    check_optimiser_kind,
    check_same_structure,
    check_some_training,
)
from ._check_member import (
    check_same_hyper,
    check_state_arrays,
    hyper_column_text,
)
from ._check_run import check_run_weights, diverged_message, excluded_message, warn_of_diverged
from ._fit import fit
from ._hyper import change_hyper, follow_hyper, hyper_arrays
from ._options import Checkpoint, Options, Stopping, as_checkpoint, check_options, limits_of
from ._ranking import rank_members
from ._revive import Revive, copy_donors
from ._run import Run, check_rows_of_folds, data_frame
from ._scan_steps import CommonFitOptions
from ._state import MemberConstants, MemberState, TrainState, check_state, check_train_state, init
from ._status import NotSavedError, Status, UnfinishedError, allow_idle, only_read, status_names
from ._texts import array_texts, check_same_call, digest_of, option_text, program_text, versions_text
from ._trainable import Trainable, frozen_flags, partition_trainable
from .compiled._check import check_loss_output, check_loss_signature, explain_loss
from .compiled._health import nan_is_data, revert_diverged_one
from .compiled._loss import as_loss
from .compiled._optimiser import Optimiser, init_member, resolve, supported_arguments, update_member
from .compiled._program import take_rows
from .compiled._selection import Mode, make_limits, reset_best, stop_at_limits, stop_members
from .data._check import check_batch_size
from .data._reader import RowReader, check_no_scan
from .data._source import as_row_indices, decode, encode, is_batches, is_data_function, is_wrapper, without_marks
from .host._check import check_not_given_again, check_same_mode, missing_validation_message
from .host._record import History, mean_of_last_epoch
