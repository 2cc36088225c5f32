"""The one exception that means: the user gave something we cannot use."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input, told in one line: what it was, what it got, what it expected, what to do.

    The command-line tools print the line on stderr and exit with code 2.

    Args:
      field: the name of the flag, parameter or file at fault.
      got: what was found there.
      expected: what would have been right.
      hint: what to do about it (optional).
    """

    def __init__(self, field: str, got: object, expected: str, hint: str = ""):
        text = f"{field}: got {got}; expected {expected}"
        if hint:
            text += f"; {hint}"
        super().__init__(" ".join(text.split()))
        self.field = field
