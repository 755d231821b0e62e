"""The error for what a user can mend: one line with the name, the value and what would be right."""


class InputError(ValueError):
    """A configuration key, file, column or record that cannot be used; command lines print it and exit with 2."""
