"""The base of what m3rl expects to go wrong. Standard library only: the command line imports it."""


class M3rlError(RuntimeError):
    """A failure that its message explains; the command line shows that alone and ends with 1.

    One argument, so that it survives pickling between processes. A setting that cannot work is a
    `ConfigError`; every other exception is a fault of the program and keeps its traceback.
    """
