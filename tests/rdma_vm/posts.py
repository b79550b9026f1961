# SPDX-License-Identifier: Apache-2.0
"""What the workers of this process post to their cards; see posts.c. To be imported before workers.

    posts.begin()
    ...
    for post in posts.writes(posts.take()):

An address or a key is a number.
"""
import collections
import ctypes
import os
import pathlib

BUILD = pathlib.Path(os.environ.get("TENSORLANE_BUILD") or pathlib.Path(__file__).parents[2] / "build/release")
LIBRARY = ctypes.CDLL(str(BUILD / "tests/rdma_vm/libposts.so"), ctypes.RTLD_GLOBAL)
LIBRARY.posts_redirect.argtypes = LIBRARY.posts_redirect_source.argtypes = (ctypes.c_uint64, ctypes.c_uint64,
                                                                            ctypes.c_uint32)
LIBRARY.posts_take.restype, LIBRARY.posts_take.argtypes = ctypes.c_long, (ctypes.c_void_p, ctypes.c_size_t)
LIBRARY.posts_is_redirected.restype = LIBRARY.posts_is_falsified.restype = ctypes.c_bool
LIBRARY.posts_falsify.argtypes = (ctypes.c_uint8, ctypes.c_uint8, ctypes.c_char_p)
CAPACITY = 65536
# The numbers of rdma-core.
WRITE, WRITE_WITH_IMMEDIATE, SEND, READ, BIND = 0, 1, 2, 4, 8
# The types of messages, and where they have the length of their key or text (docs/protocol.md); 0: right in front of
# it.
REQUEST, ERROR_STATUS = (3, 0), (7, 12)

Post = collections.namedtuple("Post", "opcode queue_pair local remote bytes key region_key")


class Record(ctypes.Structure):
    _fields_ = [("opcode", ctypes.c_uint32), ("queue_pair", ctypes.c_uint32), ("local", ctypes.c_uint64),
                ("remote", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("key", ctypes.c_uint32),
                ("region_key", ctypes.c_uint32)]


def begin():
    """Forgets what was posted before."""
    LIBRARY.posts_begin()


def take():
    """Returns all that was posted since begin or the last take, in order."""
    records = (Record * CAPACITY)()
    count = LIBRARY.posts_take(records, CAPACITY)
    assert count >= 0, "more was posted than can be noted"
    return [Post(*(getattr(record, name) for name in Post._fields)) for record in records[:count]]


def writes(found, source=None):
    """Returns the writes of bytes, or those that read from the tensor, in the order of what they read."""
    begin_, end = (source.address, source.address + source.size_bytes) if source else (0, 1 << 64)
    return sorted((post for post in found if post.opcode in (WRITE, WRITE_WITH_IMMEDIATE) and post.bytes > 0
                   and begin_ <= post.local < end), key=lambda post: post.local)


def reads(found, destination=None):
    """Returns the reads, or those into the tensor, in the order of where their bytes go."""
    begin_, end = (destination.address, destination.address + destination.size_bytes) if destination else (0, 1 << 64)
    return sorted((post for post in found if post.opcode == READ and begin_ <= post.local < end),
                  key=lambda post: post.local)


def redirect(source, address, key):
    """Redirects the next write that reads the beginning of the tensor to the address, with the key."""
    LIBRARY.posts_redirect(source.address, address, key & 0xffffffff)


def redirect_source(source, address, key):
    """Makes the next SOURCE that shows the tensor name the address and the key instead."""
    LIBRARY.posts_redirect_source(source.address, address, key & 0xffffffff)


def is_redirected():
    """Returns whether that write or SOURCE has been posted."""
    return LIBRARY.posts_is_redirected()


def falsify(message, text):
    """Falsifies the next such message that contains the text: its length becomes greater than everything there is."""
    LIBRARY.posts_falsify(*message, text.encode())


def is_falsified():
    """Returns whether that message has been posted."""
    return LIBRARY.posts_is_falsified()
