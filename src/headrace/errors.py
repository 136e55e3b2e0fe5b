"""The one exception that users see."""


class UserError(Exception):
    """Bad input: one clear line that names the file, tensor or flag and the remedy.

    Commands print it without a traceback and exit with status 2; every other exception is a bug.
    """
