"""What a user did wrong, as opposed to what we did wrong (those are asserts)."""


class CannotTell(Exception):
    """The compiler did not answer. Exit status 1."""


class CannotFetch(Exception):
    """What is on a server could not be fetched: no network, or it does not answer as it should. Exit status 1."""


class CannotWrite(Exception):
    """A folder that was written before cannot be written any more. Exit status 1."""


class NonFiniteLoss(Exception):
    """N3: a loss became infinite or NaN. Exit status 1."""


class UserError(Exception):
    """A mistake in what the user gave us: says what was wrong, where, and what would be right. Exit status 2."""
