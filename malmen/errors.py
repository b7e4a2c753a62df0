"""The one error that users see."""


class EditError(Exception):
    """Something the user gave cannot be used; the message says what was given, expected and found."""
