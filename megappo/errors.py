"""Errors that a user can mend, and the exit codes of every command.

A `UserError` ends a command with its message alone, no traceback. What is not a `UserError` is a
fault of ours or of the machine and keeps its traceback.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_GUARD = 3
EXIT_RESUMABLE = 75


class UserError(ValueError):
    """A mistake in the input: the message is the rule, the actual values and the remedy."""


class DataError(UserError):
    """A data file is missing, lacks a column, is empty, or holds a row that cannot be used."""


class SharedDataError(DataError):
    """The same on all ranks, after they have joined: told once."""


class ModelError(UserError):
    """A model folder is missing parts, or has a setting that is not supported."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, or does not fit the run that wants to load it."""


class RanksDifferError(RuntimeError):
    """Ranks that hold the same weights by design do not. On all ranks alike."""


class NodesMissingError(RuntimeError):
    """Nodes of the run did not come, or cannot reach each other. On all nodes that came alike."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were. On all ranks alike."""


class GuardStop(RuntimeError):  # noqa: N818, an outcome and not a mistake
    """A guard ended the run on purpose; the command exits with `EXIT_GUARD`."""


class StopRequested(RuntimeError):  # noqa: N818, an outcome and not a mistake
    """A signal asked the run to stop; its state is saved and it exits with `EXIT_RESUMABLE`."""
