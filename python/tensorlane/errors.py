# SPDX-License-Identifier: Apache-2.0
"""The exceptions of tensorlane: one class for each status, all derived from Error."""
import typing

if typing.TYPE_CHECKING:
    from . import Tensor


class Error(Exception):
    """Something failed. The text says what, which value is meant, and what to do.

    code: the number of the status, which is gRPC's; status: its name, "NOT_FOUND"
    peer: what the call was given as the peer, or None; key: the same (a tuple of keys of a call with many)
    results: what the members of a group have come to, of a call with many; otherwise None. An error that was pickled or
    copied lacks them, because tensors stay in their process.
    """

    code: int = 2
    status: str = "UNKNOWN"

    def __init__(self, message: str = "", peer: typing.Union[str, int, None] = None,
                 key: typing.Union[str, tuple, None] = None) -> None:
        super().__init__(message)
        self.peer = peer
        self.key = key
        self.results: typing.Optional[list[typing.Union["Tensor", Error]]] = None

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return type(self), self.args, {**self.__dict__, "results": None}


class Cancelled(Error):
    """The operation was cancelled, its step ended, its peer was removed, or the worker closed."""
    code, status = 1, "CANCELLED"


class Unknown(Error):
    """A peer has answered with a status that this version does not know."""
    code, status = 2, "UNKNOWN"


class InvalidArgument(Error, ValueError):
    """An argument or the configuration is wrong."""
    code, status = 3, "INVALID_ARGUMENT"


class DeadlineExceeded(Error, TimeoutError):
    """The time was up before the value came; the text names the state of the peer."""
    code, status = 4, "DEADLINE_EXCEEDED"


class NotFound(Error):
    """There is no such peer, task, key or file."""
    code, status = 5, "NOT_FOUND"


class AlreadyExists(Error):
    """Something else has this address, name, or key and step."""
    code, status = 6, "ALREADY_EXISTS"


class PermissionDenied(Error):
    """The peer does not allow it (`security.allow` of its configuration)."""
    code, status = 7, "PERMISSION_DENIED"


class ResourceExhausted(Error):
    """There is no memory, or a limit of the configuration is reached."""
    code, status = 8, "RESOURCE_EXHAUSTED"


class FailedPrecondition(Error):
    """Something is not in the state for this: the worker is closed or of another process, or a value does not fit."""
    code, status = 9, "FAILED_PRECONDITION"


class Aborted(Error):
    """The step was aborted."""
    code, status = 10, "ABORTED"


class OutOfRange(Error):
    """A size or an index is too large."""
    code, status = 11, "OUT_OF_RANGE"


class Unimplemented(Error, NotImplementedError):
    """This version, or the peer's, cannot do it."""
    code, status = 12, "UNIMPLEMENTED"


class Internal(Error):
    """The system, a card or a driver has failed."""
    code, status = 13, "INTERNAL"


class Unavailable(Error):
    """The peer cannot be reached."""
    code, status = 14, "UNAVAILABLE"


class DataLoss(Error):
    """The bytes are not those that were sent: the checksum does not match, or a file has changed."""
    code, status = 15, "DATA_LOSS"


class Unauthenticated(Error):
    """The peer could not prove which worker it is."""
    code, status = 16, "UNAUTHENTICATED"


_BY_CODE = {error.code: error for error in Error.__subclasses__()}


def _create(code, message, peer, key):
    return _BY_CODE.get(code, Unknown)(message, peer, key)
