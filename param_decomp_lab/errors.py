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


class Unread(Exception):
    """A value of the configuration that something asks for could not be read, which another error says."""


class Errors:
    """Gathers errors of independent checks, each in a `with` block of its own, to raise them as one.

    ``lines``: the messages of the UserErrors that ended a block.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._unread: Unread | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, UserError):
            self.lines.append(str(error))
        elif isinstance(error, Unread):
            self._unread = error
        return isinstance(error, UserError | Unread)

    def raise_all(self) -> None:
        """Raises one UserError with all that were gathered; `Unread` if there was nothing else."""
        if self.lines:
            raise UserError("\n".join(dict.fromkeys(self.lines)))
        if self._unread is not None:
            raise self._unread
