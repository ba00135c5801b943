"""The one exception that a person is meant to read."""


class UserError(Exception):
    """Something that the person who started the work can mend.

    The message is one line: what is wrong, where, and how to mend it. The command line prints it
    without a traceback and exits with code 2; a flow fails with it as its state's message.
    `passes` says that it may pass by itself, as where a server is away: a flow tries again a few times.
    """

    passes = False
