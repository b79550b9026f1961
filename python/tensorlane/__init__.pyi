# SPDX-License-Identifier: Apache-2.0
"""tensorlane moves named tensors between workers, straight from the memory of one tensor into that of another.

Words that all calls share:

- peer: the name of a worker ("ps:0" or "/job:ps/task:0", also this worker's own) or the number that add_peer returned.
- key: a str of 1 to 512 bytes of UTF-8 without NUL.
- step: an int from 0 to 2**64 - 1; of a published value it is the version.
- tensor: a Tensor, or any object with the buffer protocol (NumPy's arrays, bytes, array.array) or DLPack (torch). It is
  not copied, so its elements must lie in row-major order without gaps and must not change while it is sent or
  published.
- into: None (memory of the library), or a tensor that may be written, with the dtype and shape of what comes. Its
  contents are undefined when the call fails, and until a cancelled one has ended.
- timeout: seconds; None: the request time-out of the configuration; math.inf: no limit.
- part: a Box, or a list of (offset, length) in bytes, which come one behind the other as a tensor of U8 with one
  dimension. Only the bytes of the part travel. None: the whole tensor.
- checksum: all bytes are verified end to end.

Calls of the form NAME_wait block without Python's lock, and Ctrl-C ends them. The others that receive or send are
awaitable, in any event loop that has add_reader; a task that is cancelled cancels the operation. A value that was sent
once and arrives while its receive is given up is lost.

After fork a worker, and all that is open in it, belongs to the parent: each call in the child raises
FailedPrecondition.
"""
import builtins
import os
import typing
from collections.abc import Sequence

from typing_extensions import Buffer

from .errors import (Aborted, AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, Error, FailedPrecondition, Internal,
                     InvalidArgument, NotFound, OutOfRange, PermissionDenied, ResourceExhausted, Unauthenticated,
                     Unavailable, Unimplemented, Unknown)

__all__ = [
    "Aborted", "AlreadyExists", "BlockingSubscription", "Box", "Cancelled", "DataLoss", "DeadlineExceeded", "Error",
    "FailedPrecondition", "Health", "Internal", "InvalidArgument", "ListedTensor", "NotFound", "OutOfRange", "PeerInfo",
    "PermissionDenied", "Put", "ResourceExhausted", "Subscription", "Tensor", "Unauthenticated", "Unavailable",
    "Unimplemented", "Unknown", "Worker", "__version__", "copy", "empty", "wrap",
]

__version__: str

class _HasDlpack(typing.Protocol):
    def __dlpack__(self, **options: typing.Any) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# What calls take; only type checkers know these names.
_TensorLike = typing.Union["Tensor", Buffer, _HasDlpack]
_Peer = typing.Union[str, int]
_Key = typing.Union[str, tuple[str, int]]
_Part = typing.Union["Box", Sequence[tuple[int, int]]]

@typing.final
class Tensor:
    """Memory with a dtype and a shape, and how it came. It outlives its worker. empty, wrap and copy make it, and calls
    that receive.

    It has the buffer protocol and DLPack: numpy.asarray(tensor), memoryview(tensor), torch.from_dlpack(tensor) share
    its memory. Only tensors in the memory of the host have a buffer, and only dtypes that the buffer protocol knows;
    BufferError says which is missing. numpy.asarray gives BF16 and F8 the dtypes of ml_dtypes where that is installed,
    and raises TypeError where it is not, or is of a version that lacks the dtype.
    """

    @property
    def dtype(self) -> str:
        """As safetensors spells it, "F32" or "BF16"; "STRING" for byte strings."""
    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, outermost first; at most 16."""
    @property
    def nbytes(self) -> int:
        """Bytes of all elements. Types smaller than a byte are packed."""
    @property
    def device(self) -> str:
        """ "cpu", or "cuda:0" with the number of the GPU."""
    @property
    def readonly(self) -> bool:
        """Whether the elements must not be written: it was read-only when it was wrapped, or came from this worker
        itself, or is mapped."""
    @property
    def is_dead(self) -> bool:
        """Whether it stands for "there is no value"; it has no elements then."""
    @property
    def step(self) -> int:
        """The step of the value; of a published one its version. 0 if it did not come from a peer."""
    @property
    def path(self) -> str:
        """How the bytes travelled: "zero-copy", "bounce", "inline", "mapped", "grpc", "serialized", "self",
        "gpu-direct", "gpu-proxy", "gpu-ipc", or "none" when none did. Later versions may add others."""
    @property
    def path_reason(self) -> str:
        """Why it was this path and not a faster one; "" when there is no reason."""
    @property
    def duration(self) -> float:
        """Seconds from the call to the completion."""
    @property
    def is_verified(self) -> bool:
        """Whether a checksum was wanted and matches."""
    def as_bytes(self) -> Tensor:
        """Returns the same memory as a tensor of U8 with the shape (nbytes,), with the step, path and duration of this
        one."""
    def strings(self) -> list[bytes]:
        """Returns the elements of a tensor of STRING, row-major. Raises InvalidArgument for any other dtype."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __array__(self, dtype: typing.Any = None, copy: typing.Optional[bool] = None) -> typing.Any:
        """Returns an array of NumPy, which numpy.asarray asks for where there is no buffer; its shape is that of the
        tensor. dtype: to convert to; None: as it is. copy: whether its memory must be its own; None: if need be.

        Raises TypeError: NumPy has no such dtype, or the tensor is dead or on a GPU. ValueError: copy is False, and it
        is of STRING or has another dtype.
        """
    def __dlpack__(self, *, stream: typing.Optional[int] = None, max_version: typing.Optional[tuple[int, int]] = None,
                   dl_device: typing.Optional[tuple[int, int]] = None, copy: typing.Optional[bool] = None) -> object:
        """Returns a capsule, with a version if the consumer knows versions. The capsule's deleter may run in any
        thread.

        The bytes of a tensor that was received are visible to everything that is launched afterwards, in any stream.
        Those of one that was wrapped follow the legacy stream of their GPU: for another stream the call waits until
        what that holds is done. stream: as DLPack numbers them; None: the legacy one; -1: it is not waited for.
        Raises ValueError: no stream. BufferError: it is dead or of STRING; it is read-only and the consumer knows no
        versions; it is on another device than dl_device and must not be copied.
        """
    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns (kind, index) as DLPack counts: (1, 0) is the host, (2, n) a GPU."""

def empty(shape: Sequence[int], dtype: str = "F32", *, shared: bool = False) -> Tensor:
    """Creates a tensor in the memory of the host, 64-byte aligned, contents undefined.

    shared: in pages of its own, zero at first, which receivers on this host may map once it is published; its elements
    must never change after that.
    Raises InvalidArgument: not a dtype, or STRING. OutOfRange: the shape is too large. ResourceExhausted: no memory.
    """

def wrap(tensor: _TensorLike, /) -> Tensor:
    """Returns a tensor in the memory of an object, which is not copied. Wrapping once costs less than in each call.

    Raises InvalidArgument (a ValueError), BufferError or ValueError of the object: elements of no dtype, gaps or
    another order than row-major, more than 16 dimensions. TypeError: it is no tensor.
    """

def copy(tensor: _TensorLike, to: typing.Optional[_TensorLike] = None) -> Tensor:
    """Copies all elements into a tensor with the same dtype and shape on any device, or into a new one; returns that.

    Raises InvalidArgument: dtype or shape differ, they share memory, or STRING without `to`. Unimplemented: STRING into
    another tensor.
    """

class PeerInfo(typing.NamedTuple):
    """A peer as this worker sees it."""
    id: int
    name: str
    address: str
    state: str
    """ "idle": nothing was asked of it yet; "connecting"; "up"; "down": the last attempt failed, and it is tried
    again."""
    incarnation: int
    """The number of the process that answered last; 0: none yet."""
    restart_count: int
    transport: str
    """ "local", "verbs" or "grpc"; "" when it is not up."""
    reason: str
    """Why it is down, otherwise ""."""

class ListedTensor(typing.NamedTuple):
    """A tensor that a worker has published."""
    key: str
    step: int
    """Its version."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of all elements, or of the serialized form of STRING."""
    annotations: dict[str, str]
    """Texts that the file had which it comes from, such as {"format": "pt"}."""
    is_dead: bool

class Box(typing.NamedTuple):
    """A part of a tensor: a box of its elements. It arrives as a tensor of the sizes of the box, or in a box of `into`.

    Each sequence has one entry for each dimension, outermost first.
    """
    start: Sequence[int]
    """Where the box begins in the tensor of the peer."""
    size: Sequence[int]
    """Its sizes. Elements smaller than a byte must begin and end with a byte."""
    into_start: typing.Optional[Sequence[int]] = None
    """Where the box begins in `into`, which has the rank of the tensor; what lies outside of the box stays as it is.
    None: `into` has the shape of the box."""

class Put(typing.NamedTuple):
    """How what was put travelled."""
    path: str
    """As Tensor.path."""
    path_reason: str
    """Why it was this path and not a faster one; "" when there is no reason."""
    nbytes: int
    """Bytes that moved."""
    duration: float
    """Seconds from the call to the completion."""

class Health(typing.NamedTuple):
    """What Worker.health says."""
    is_healthy: bool
    reasons: tuple[str, ...]
    """One sentence for each peer that is down."""

class Subscription:
    """Every value of a key of a peer, in the order in which the peer gave them: `async for value in subscription`.

    Each value lends one of the subscription's buffers, which is used again when nothing refers to the value any more,
    its arrays included. A value that cannot be received raises its error, and the next one may be asked for; the end of
    the subscription raises its error once, and then StopAsyncIteration. It belongs to the event loop that it was made
    in, and to one task: RuntimeError is raised where another one waits for a value.
    """
    def __aiter__(self) -> Subscription: ...
    async def __anext__(self) -> Tensor: ...
    async def __aenter__(self) -> Subscription: ...
    async def __aexit__(self, *error: object) -> None: ...
    def close(self) -> None:
        """Ends it; so does dropping the last reference."""

class BlockingSubscription:
    """As Subscription, blocking: `for value in subscription`. Any thread may ask for the next value.

    Raises DeadlineExceeded where no value comes in time, after which the next one may be asked for.
    """
    def __iter__(self) -> BlockingSubscription: ...
    def __next__(self) -> Tensor: ...
    def __enter__(self) -> BlockingSubscription: ...
    def __exit__(self, *error: object) -> None: ...
    def close(self) -> None:
        """Ends it; so does dropping the last reference. What waits for a value in another thread ends as well."""

class Worker:
    """One member of a cluster, in this process, with the tensors that it sends, receives and publishes.

    Close it, or use `with` or `async with`: a worker that is dropped is closed with a ResourceWarning. Any thread may
    use it.
    """

    def __init__(self, config: typing.Union[str, os.PathLike[str], dict[str, typing.Any], None] = None, *,
                 job: typing.Optional[str] = None, task: int = 0, client: bool = False,
                 address: typing.Optional[str] = None,
                 progress: typing.Literal["thread", "caller"] = "thread") -> None:
        """Opens the worker, which takes up to some seconds where cards are tried.

        config: the path of the cluster's JSON file, or its contents as a dict; None: the variable TF_CONFIG, or with
        address no settings. job, task: which task this process is. client: it is none, and only receives.
        address: the worker belongs to no cluster and is dialled at "host:port"; port 0 is any that is free. Peers come
        by add_peer.
        progress: "thread": a thread of the library moves the data. "caller": the threads that wait do, in calls of the
        form NAME_wait, which is faster for small tensors one after another; there is no awaiting then, and peers are
        answered late while none waits.
        Opening installs a handler for SIGBUS, which a mapped file raises when it has become shorter: what is missing
        reads as zeros, and any other SIGBUS goes to the handler that was there before.
        Raises OverflowError: task is negative or above 2**32-1. InvalidArgument: the configuration is wrong, with line
        and column. NotFound: no such task, or a file is missing. AlreadyExists: another process has the address.
        ResourceExhausted: no memory or descriptors. FailedPrecondition: this process was forked from one that had
        opened a worker.
        """
    def close(self, timeout: typing.Optional[float] = None) -> None:
        """Refuses new requests, lets running transfers finish for the timeout (None: timeouts.drain of the
        configuration), and ends what is open with Cancelled. Calls that wait in other threads end first. Closing again
        does nothing. Ctrl-C does not end it, nor opening; KeyboardInterrupt is raised after it."""
    @property
    def closed(self) -> bool:
        """Whether it was closed, or is being closed."""
    @property
    def name(self) -> str:
        """ "/job:ps/task:0"; "" for a client."""
    @property
    def address(self) -> str:
        """ "host:port", which peers dial; "" for a client."""
    @property
    def incarnation(self) -> int:
        """The random number that was drawn when it was opened."""
    def __enter__(self) -> Worker: ...
    def __exit__(self, *error: object) -> None: ...
    async def __aenter__(self) -> Worker: ...
    async def __aexit__(self, *error: object) -> None: ...

    def publish(self, key: str, tensor: _TensorLike, step: int = 0) -> None:
        """Keeps a tensor for any number of receivers, in place of what was published under the key.

        Its memory must not change until it is replaced or withdrawn and its last transfer has ended; a reference to the
        object is held until then, so that the caller may drop its own. step: its version.
        Raises InvalidArgument: the key. ResourceExhausted: no memory.
        """
    def withdraw(self, key: str, /) -> None:
        """Ends a publication; transfers that run finish. Raises NotFound: nothing is published under the key."""

    async def send(self, key: str, tensor: _TensorLike, step: int = 0, *,
                   timeout: typing.Optional[float] = None) -> None:
        """Offers a tensor to one receiver of (key, step), which may ask before or after; done when that has all of it.

        Its memory must not change until then; a reference to the object is held as long.

        Raises AlreadyExists: (key, step) is offered already. DeadlineExceeded: no receiver came. Cancelled: the step
        ended or the worker closed. ResourceExhausted: the worker holds as much as it may. The status of an aborted
        step.
        """
    def send_wait(self, key: str, tensor: _TensorLike, step: int = 0, *,
                  timeout: typing.Optional[float] = None) -> None:
        """As send, blocking."""

    async def recv(self, peer: _Peer, key: str, step: int = 0, *, into: typing.Optional[_TensorLike] = None,
                   timeout: typing.Optional[float] = None, checksum: bool = False, mapped: bool = False,
                   part: typing.Optional[_Part] = None) -> Tensor:
        """Receives what the peer sends as (key, step), or has published as key with a version of at least step.

        Returns a Tensor with the dtype and shape that it has at the peer, or those of the part. It is the caller's:
        its memory stays as long as the Tensor or an array that was made of it does, also when the worker has closed.
        With into its memory is that of into, which is in use until then.
        mapped: the program only reads the tensor, which may then be a file or pages of the peer's, mapped read-only;
        not together with into. The result says by its path whether it is.
        Raises DeadlineExceeded: it did not come; the text names the state of the peer. NotFound: no such peer.
        FailedPrecondition: it does not fit `into`, or it has no such part: strings, or a box that begins or ends within
        a byte. OutOfRange: the part is not within the tensor. Unimplemented: the peer is of an older version and knows
        no parts, or the part is not in one piece and lies on a GPU. InvalidArgument: the key, or the part.
        InvalidArgument, BufferError or ValueError of the object: `into` is read-only, or wrap refuses it. DataLoss: the
        checksum does not match, or the peer's file changed. ResourceExhausted: too many wait at the peer, or no memory.
        Cancelled: the worker closed, or the peer was removed. PermissionDenied: the peer does not allow it. The status
        of an aborted step.
        """
    def recv_wait(self, peer: _Peer, key: str, step: int = 0, *, into: typing.Optional[_TensorLike] = None,
                  timeout: typing.Optional[float] = None, checksum: bool = False, mapped: bool = False,
                  part: typing.Optional[_Part] = None) -> Tensor:
        """As recv, blocking."""

    async def recv_many(self, peer: _Peer, keys: Sequence[_Key], step: int = 0, *,
                        into: typing.Optional[Sequence[typing.Optional[_TensorLike]]] = None,
                        timeout: typing.Optional[float] = None, min_count: int = 0,
                        group_timeout: typing.Optional[float] = None, checksum: bool = False,
                        parts: typing.Optional[Sequence[typing.Optional[_Part]]] = None
                        ) -> builtins.list[typing.Union[Tensor, Error]]:
        """Receives many tensors from one peer at a fraction of the cost of single receives.

        keys: of each its key, or (key, step). into: for each its destination or None. parts: the same for parts.
        min_count: it is enough when so many have come, and the others are cancelled; 0: all. group_timeout: after so
        many seconds it is over, whatever has come; None: no limit.
        Returns a Tensor for each key, in the order of the keys, or the Error of one that was not needed. Raises the
        error of the member that failed first when fewer than min_count have come; its `results` has what each has come
        to.
        """
    def recv_many_wait(self, peer: _Peer, keys: Sequence[_Key], step: int = 0, *,
                       into: typing.Optional[Sequence[typing.Optional[_TensorLike]]] = None,
                       timeout: typing.Optional[float] = None, min_count: int = 0,
                       group_timeout: typing.Optional[float] = None, checksum: bool = False,
                       parts: typing.Optional[Sequence[typing.Optional[_Part]]] = None
                       ) -> builtins.list[typing.Union[Tensor, Error]]:
        """As recv_many, blocking."""

    def subscribe(self, peer: _Peer, key: str, from_step: int = 0, *, count: int = 2,
                  into: typing.Optional[Sequence[_TensorLike]] = None, checksum: bool = False) -> Subscription:
        """Receives every value of a key from from_step on, of published ones the newest, without asking for each.

        count: how many may be under way or still referred to; into: these buffers, all alike, and count is their
        number. It is called within an event loop. Raises NotFound: no such peer. InvalidArgument: the key, or count is
        0.
        """

    def subscribe_wait(self, peer: _Peer, key: str, from_step: int = 0, *, count: int = 2,
                       into: typing.Optional[Sequence[_TensorLike]] = None, timeout: typing.Optional[float] = None,
                       checksum: bool = False) -> BlockingSubscription:
        """As subscribe, for programs without an event loop: each next value is waited for, at most for the timeout
        (None: no limit; 0: it is there or not)."""

    async def put(self, peer: _Peer, key: str, tensor: _TensorLike, step: int = 0, *, may_go_back: bool = False,
                  timeout: typing.Optional[float] = None) -> Put:
        """Publishes a tensor at a peer, in place of what is published there under the key; done when the peer has it.
        Returns how it travelled.

        The peer keeps it in its own memory until it is replaced or withdrawn; it lives on when this worker has closed.
        may_go_back: also in place of a later step. At the worker itself it is publish: the memory is referred to.
        Raises FailedPrecondition: a later step is published there. ResourceExhausted: beyond what this worker may have
        there (limits.held), or no memory. PermissionDenied: the peer does not allow it. DeadlineExceeded: naming the
        state of the peer. Unimplemented: the tensor is on a GPU. InvalidArgument: the key. NotFound: no such peer.
        Cancelled: the worker closed, or the peer was removed; the peer may have accepted it all the same.
        """
    def put_wait(self, peer: _Peer, key: str, tensor: _TensorLike, step: int = 0, *, may_go_back: bool = False,
                 timeout: typing.Optional[float] = None) -> Put:
        """As put, blocking."""
    async def list(self, peer: _Peer, pattern: str = "*", *,
                   timeout: typing.Optional[float] = None) -> builtins.list[ListedTensor]:
        """Lists what a peer has published under keys that match a pattern, sorted by key.

        pattern: `*` stands for any text, `?` for one character, `[a-z]` for one of a set, and a backslash takes the
        next character as it is; at most 512 bytes.
        Raises InvalidArgument: the pattern. NotFound: no such peer. PermissionDenied: the peer does not allow it.
        DeadlineExceeded, Cancelled: as put. ResourceExhausted: more than 1,000,000 tensors or 256 MiB of names.
        """
    def list_wait(self, peer: _Peer, pattern: str = "*", *,
                  timeout: typing.Optional[float] = None) -> builtins.list[ListedTensor]:
        """As list, blocking."""
    async def stat(self, peer: _Peer, key: str, *, timeout: typing.Optional[float] = None) -> ListedTensor:
        """Describes what a peer has published under a key.

        Raises NotFound: nothing is published under it, or no such peer. Otherwise as list.
        """
    def stat_wait(self, peer: _Peer, key: str, *, timeout: typing.Optional[float] = None) -> ListedTensor:
        """As stat, blocking."""
    async def remove(self, peer: _Peer, pattern: str, *, timeout: typing.Optional[float] = None) -> int:
        """Ends what a peer has published under all keys that match the pattern, and returns how many there were.

        Transfers that run finish. Raises Unavailable: the connection broke, and it is not known whether the peer has
        done it. Otherwise as list.
        """
    def remove_wait(self, peer: _Peer, pattern: str, *, timeout: typing.Optional[float] = None) -> int:
        """As remove, blocking."""

    def publish_state_dict(self, state: typing.Any, step: int = 0, *, prefix: str = "model",
                           copies: bool = False) -> None:
        """Publishes all tensors of a model with one step, in place of those that were published under the prefix.

        state: a module of torch, or a mapping of names to tensors. Names that share all of their memory, such as tied
        weights, are published once. copies: published are copies, so that the model may go on changing; otherwise it
        must not change until it is published again or withdrawn.
        Raises what publish and wrap raise, and TypeError: a name is no str. All names, which go into keys after the
        prefix, are checked before anything is published; what was published before another error stays until it is
        published again or withdrawn. Unimplemented: a DTensor. AlreadyExists: a key is that of a state dict under
        another prefix, such as the tensor "ema" under "model" and the state dict under "model/ema".
        """
    def withdraw_state_dict(self, prefix: str = "model") -> None:
        """Ends the publication of all tensors under the prefix. Raises NotFound: there is none."""
    async def pull_state_dict(self, peer: _Peer, step: int = 0, *, into: typing.Any = None, prefix: str = "model",
                              timeout: typing.Optional[float] = None,
                              progress: typing.Optional[typing.Callable[[int, int], object]] = None
                              ) -> tuple[dict[str, Tensor], int]:
        """Receives all tensors of a model, of one step that is at least `step`. Returns them by name, and their step.

        into: a module of torch or a mapping, whose tensors are written; names, dtypes and shapes are checked before. Of
        a DTensor only the part that this process has travels (placements Shard and Replicate), and is returned.
        When the peer publishes a later step meanwhile, that is received instead, at the latest when the time-out of a
        tensor that has gone is over; after an error the contents are undefined. timeout: of each of the calls that it
        consists of. progress: is called with the bytes that have come and all bytes, after each 64 MiB; without into
        once, at the end.
        Raises InvalidArgument: the names differ. FailedPrecondition: a dtype or shape differs, names of `into` share
        memory that do not at the peer, or no state dict is published there. Unimplemented: a DTensor with another
        placement. What recv raises.
        """
    def pull_state_dict_wait(self, peer: _Peer, step: int = 0, *, into: typing.Any = None, prefix: str = "model",
                             timeout: typing.Optional[float] = None,
                             progress: typing.Optional[typing.Callable[[int, int], object]] = None
                             ) -> tuple[dict[str, Tensor], int]:
        """As pull_state_dict, blocking."""

    def add_peer(self, address: str, name: typing.Optional[str] = None, incarnation: int = 0) -> int:
        """Adds a worker that no configuration names, by its address, and returns its number. Nothing is connected yet.

        name: another worker that answers there is refused; None: any. incarnation: the same for the process; 0: any.
        Raises InvalidArgument: the address or name is none. AlreadyExists: the name is that of a peer elsewhere.
        """
    def remove_peer(self, peer: _Peer, /) -> None:
        """Removes a peer that was added; what waits for it ends with Cancelled. Raises NotFound: no such peer.
        FailedPrecondition: it is a task of the configuration, or this worker."""
    def peers(self) -> builtins.list[PeerInfo]:
        """Describes all peers, this worker among them."""
    def wait_for_peers(self, peers: typing.Optional[Sequence[_Peer]] = None, min_count: int = 0,
                       timeout: typing.Optional[float] = None) -> None:
        """Connects to the peers (None: all) and waits until min_count (0: all) are up at the same time; blocking.

        timeout: None: no limit. Raises DeadlineExceeded: naming one that is not up and why. NotFound: no such peer.
        InvalidArgument: min_count is above the number of peers. Unavailable: another process answers where one of a
        certain incarnation is meant.
        """
    def health(self) -> Health:
        """Says whether the worker is open and no peer is down. `tensorlane health` looks at a whole cluster."""
    def counters(self) -> dict[str, int]:
        """Returns what was counted since the worker opened: tensors, bytes, frames, retries, what is held and published
        now, open operations, protocol errors (struct tl_worker_stats in worker.h has each)."""
    def abort_step(self, step: int, message: str, code: int = 10) -> None:
        """Fails all that waits here for a step, and all that asks for it until end_step, with a status and a message.
        code: that of an Error class, such as Aborted.code. Raises InvalidArgument: it is none, or the message is too
        long."""
    def end_step(self, step: int, /) -> int:
        """Ends a step: sends that were not received and receives that wait end with Cancelled. Returns how many tensors
        were dropped."""
