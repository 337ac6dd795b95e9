"""What a stage raises to end with one line instead of a traceback; cli.run_stage prints it."""


class UserError(Exception):
    """An error the user can fix: reported on one line (what, where, expected, found), exit code 2."""


class Complete(Exception):
    """What a stage would make is there, made by the same command from the same inputs: exit code 0."""
