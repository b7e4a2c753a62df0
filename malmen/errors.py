"""The errors that users see: one clear message, no traceback."""


class EditError(Exception):
    """Something that was given cannot be used; the message says what was given, expected and found."""

    exit_code = 1


class UsageError(EditError):
    """A setting, name or option that does not exist or cannot be read."""

    exit_code = 2


class RunStopped(EditError):
    """A run was asked to end before its time; it can be gone on with."""
