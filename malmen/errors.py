"""The errors that users see, one clear message each and no traceback, and the messages that several places need."""

from __future__ import annotations


class EditError(Exception):
    """Input that cannot be used. The message says what was given, what was expected and what to do."""

    exit_code = 1


class UsageError(EditError):
    """A setting, name or option that does not exist or cannot be read."""

    exit_code = 2


class RunStopped(EditError):
    """A run was stopped before its last step; it can be resumed."""


def last_line(error: BaseException) -> str:
    """The last non-empty line of an error's text, or its type's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def check_base_model(what: str, trained_for: str, given: str) -> None:
    """EditError if `what` (e.g. `the editor in runs/a`) is given a base model of another fingerprint than its own."""
    if not same_base_model(trained_for, given):
        raise EditError(
            f"{what} belongs to base model {trained_for}, but the model given is {given}: "
            "it works only on the weights it was trained for"
        )


def same_base_model(one: str, other: str) -> bool:
    """Whether two fingerprints (`WEIGHTS` or `WEIGHTS-TABLES`) can be of one model. Older
    fingerprints have no tables, so there the weights decide."""
    return all(a == b for a, b in zip(one.split("-"), other.split("-"), strict=False))
