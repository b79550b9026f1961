#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seeds of the fuzz targets link and services: scripts of commands, as those targets read them.

make_seeds.py [FOLDER]      default: the corpus beside this file

Messages are made with the generated Python code, which must be on PYTHONPATH (build/release/python). An existing seed
is replaced; other files, such as inputs that once found something, stay.
"""
import pathlib
import struct
import sys

from grpc_health.v1 import health_pb2
from grpc_reflection.v1 import reflection_pb2
from tensorlane.v1 import cluster_pb2, transfer_pb2 as pb

SELF = "/job:ps/task:0"
PEER = "/job:worker/task:1"
MAX_U64 = (1 << 64) - 1
QUOTA = 512  # TL_QUOTA


def pattern(count):
    return bytes((i * 7 + i // 256) % 256 for i in range(count))


def raw(message):
    data = message if isinstance(message, bytes) else message.SerializeToString(deterministic=True)
    return struct.pack("<H", len(data)) + data


def splitmix(count):
    """The numbers of fixed_random.c."""
    state = 0
    for _ in range(count):
        state = state + 0x9e3779b97f4a7c15 & MAX_U64
        number = (state ^ state >> 30) * 0xbf58476d1ce4e5b9 & MAX_U64
        number = (number ^ number >> 27) * 0x94d049bb133111eb & MAX_U64
        yield number ^ number >> 31


def collide(factor):
    """A number of a request that has the hash of number 1 on a link with this factor (link_serve_hash)."""
    inverse = pow(factor | 1, -1, 1 << 64)
    return next(d for d in (inverse * small & MAX_U64 for small in range(1, 1 << 20)) if d < 1 << 61) * 8 + 1


# ---------------------------------------------------------------------------------------------------------- messages --

def hello(**fields):
    values = {"protocol_version": 1, "name": PEER, "incarnation": 77, "software_version": "x", "expected_name": SELF}
    return pb.Frame(hello=pb.Hello(**{**values, **fields}))


def requests(*keys, first=1, **fields):
    return pb.Frame(requests=[pb.Request(number=first + i, key=key, **fields) for i, key in enumerate(keys)])


def chunk(number, data, size=None, offset=0, **fields):
    """A piece, with the meta-data when it is the first, or when a size is given."""
    if size is not None:
        fields["meta_data"] = pb.MetaData(dtype=pb.U8, dims=[size], size_bytes=size)
        fields.setdefault("publication", 5)
    return pb.Frame(chunks=[pb.Chunk(number=number, offset=offset, len_bytes=len(data), **fields)], data=data)


def failure(number, code, message="why", **fields):
    return pb.Frame(failures=[pb.Failure(number=number, status=pb.Status(code=code, message=message), **fields)])


def packed_texts(*keys, flags=1):
    """Requests in the packed form of docs/protocol.md: each number one more than the one before, each key as a text."""
    return pb.Frame(packed_requests=b"".join(bytes([flags, 2, len(key)]) + key.encode() for key in keys))


def varint(value):
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def packed_same(text, count, **fields):
    """Packed requests for one key: its text once, then its number."""
    return pb.Frame(packed_requests=b"\3\2" + bytes([len(text)]) + text.encode() + b"\0\2\0" * (count - 1), **fields)


def described(number, dtype, dims, size, data=b"", **fields):
    """A piece of any type and shape, which need not fit each other."""
    return pb.Frame(chunks=[pb.Chunk(number=number, len_bytes=len(data), publication=5, meta_data=pb.MetaData(
        dtype=dtype, dims=dims, size_bytes=size), **fields)], data=data)


def offers(transport):
    """The three messages that set up a data connection, with an address that no transport reads."""
    kinds = pb.ConnectionMessage
    yield kinds(transport=transport, kind=kinds.OFFER, attempt=2, pair_address=b"i" * 40)
    yield kinds(transport=transport, kind=kinds.ANSWER, attempt=2, pair_address=b"i" * 40)
    yield kinds(transport=transport, kind=kinds.REFUSAL, attempt=2, reason="no device")


# ------------------------------------------------------------------------------ the commands of link_fuzz.c, by name --

def frame(message):
    return b"\0" + raw(message)


TAKE, FETCH, CANCEL, ANSWER, DRAIN, CLOSE, HALF_CLOSE, BREAK, TIMERS, END, OPEN, TELL = (
    bytes([number]) for number in (3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
THEIRS, OURS = b"\0", b"\1"
UP = THEIRS + frame(hello()) + TAKE
UP_OURS = OURS + TAKE + frame(hello(expected_name=""))


def link_seeds():
    yield "accepted", UP
    yield "opened", UP_OURS
    yield "nothing", THEIRS
    yield "never_said_hello", THEIRS + TIMERS + END
    yield "hello_other_version", THEIRS + frame(hello(protocol_version=2)) + TAKE + END
    yield "hello_other_name", OURS + TAKE + frame(hello(name="/job:worker/task:2"))
    yield "hello_expects_other", THEIRS + frame(hello(expected_name="/job:ps/task:1"))
    yield "hello_refused_with_numbers", THEIRS + frame(
        hello(incarnation=0).SerializeToString() + pb.Frame(received=[1], cancels=[2]).SerializeToString())
    yield "hello_serves_all", THEIRS + frame(hello(serves_probes=True, serves_subscriptions=True, serves_parts=True,
                                                   fetches_puts=True, is_one_way=True)) + TAKE
    yield "hello_received", THEIRS + frame(hello(received=[1, 2, 3]))
    yield "hello_twice", UP + frame(hello())
    yield "hello_with_requests", THEIRS + frame(hello().SerializeToString() + requests("p1").SerializeToString())
    yield "frame_before_hello", THEIRS + frame(requests("p1"))
    yield "serve_published", UP + frame(requests("p0", "p1", "p2", wants_checksum=True)) + TAKE * 9
    yield "serve_inflight", UP + frame(requests("p2", "o1", "o2", "p2", "p1")) + TAKE * 16
    one_shot = UP + frame(requests("o1", "o2")) + TAKE * 5
    yield "serve_one_shot", one_shot + frame(pb.Frame(received=[1, 2]))
    yield "serve_one_shot_cancelled", one_shot + frame(pb.Frame(cancels=[1, 2]))
    yield "serve_one_shot_broken", one_shot + BREAK + b"\0"
    yield "serve_resume", UP + frame(requests("p2", publication=3, resume_offset=3000, wants_checksum=True)) + TAKE * 9
    yield "serve_resume_other_value", UP + frame(requests("p2", publication=9, resume_offset=3000)) + TAKE * 9
    yield "serve_resume_beyond", UP + frame(requests("p2", publication=3, resume_offset=5001)) + TAKE * 9
    yield "serve_refused", UP + frame(requests("f", "f")) + TAKE * 3
    yield "serve_waits", UP + frame(requests("w", "ä/w")) + ANSWER + b"\2" + ANSWER + b"\x80" + TAKE * 9
    yield "serve_cancelled", UP + frame(requests("w", "p2")) + TAKE + frame(pb.Frame(cancels=[2, 1])) + TAKE * 2
    yield "serve_too_many", UP + frame(requests(*["w"] * 40)) + TAKE * 4
    subscribed = requests("w", "p1", "o1", subscription=9)
    yield "serve_subscribed", UP + frame(subscribed) + ANSWER + b"\2" + TAKE * 9 + frame(pb.Frame(received=[1, 3]))
    yield "serve_subscribed_cancelled", UP + frame(subscribed) + TAKE + frame(pb.Frame(cancels=[1, 2, 3])) + TAKE * 2
    yield "serve_number_0", UP + frame(requests("w", first=0))
    yield "serve_number_twice", UP + frame(requests("w")) + frame(requests("w"))
    yield "serve_no_key", UP + frame(requests(""))
    packed_up = THEIRS + frame(hello(reads_packed=True, kept_keys=2)) + TAKE
    sent = pb.Frame(packed_requests=b"\x0b\x02\x02p0" + b"\x03\x02\x02o1" + b"\x08\x02\x00")
    yield "packed_serve", packed_up + frame(sent) + TAKE * 9 + frame(pb.Frame(packed_requests=b"\0\x08\2")) + TAKE * 3
    yield "packed_not_sent", packed_up + frame(sent) + frame(pb.Frame(packed_requests=b"\0\x08\4"))
    yield "packed_resume", packed_up + frame(pb.Frame(packed_requests=b"\x11\2\2p2\3\0\0\0\0\0\0\0\xb8\x17")) + TAKE * 9
    whole_packed = pb.Frame(packed_chunks=b"\x02\x02\xc8\x01\x0a\0\2\1\xc8\1\xc8\1", data=pattern(200))
    yield "packed_fetch", packed_up + FETCH + b"\0" + TAKE + frame(whole_packed)
    yield "packed_pieces", packed_up + FETCH + b"\0" + TAKE + frame(
        pb.Frame(packed_chunks=b"\x02\x02\x64\x0a\0\2\1\xc8\1\xc8\1" + b"\x01\x00\x64\x64", data=pattern(200)))
    yield "packed_fetch_again", packed_up + (FETCH + b"\0" + TAKE + frame(whole_packed)) + FETCH + b"\0" + TAKE
    fetch = UP + FETCH + b"\0" + TAKE
    whole = frame(chunk(1, pattern(200), 200))
    yield "fetch", fetch + whole
    yield "fetch_ours", UP_OURS + FETCH + b"\0" + TAKE + whole
    yield "fetch_chained", b"\2" + fetch[1:] + whole + TAKE + frame(chunk(2, pattern(8), 8)) + TAKE
    yield "fetch_one_shot", fetch + frame(chunk(1, pattern(200), 200, is_one_shot=True)) + TAKE
    half = frame(chunk(1, pattern(100), 200))
    yield "fetch_pieces", fetch + half + frame(chunk(1, pattern(200)[100:], offset=100))
    yield "fetch_gap", fetch + half + frame(chunk(1, pattern(200)[101:], offset=101)) + TAKE
    yield "fetch_broken_resumed", (fetch + half + BREAK + b"\0" + OPEN + b"\0" + frame(hello()) + TAKE * 2 +
                                   frame(chunk(1, pattern(200)[100:], 200, offset=100)))
    yield "fetch_broken_again", (fetch + half + BREAK + b"\0" + OPEN + b"\0" + frame(hello()) + TAKE * 2 +
                                 frame(chunk(1, pattern(300), 300, publication=6)))
    yield "fetch_no_checksum", UP + FETCH + b"\x10" + TAKE + whole + TAKE
    yield "fetch_empty_checksum", (UP + FETCH + b"\x10" + TAKE +
                                   frame(chunk(1, b"", 0, has_checksum=True, checksum=0x2d06800538d394c2)))
    # The composed ones have right checksums: flags, number 1, offset 0, 32 x 8 bytes, flags, size 32 x 8.
    yield "fetch_checksum", UP + FETCH + b"\x10" + TAKE + b"\1" + bytes([0x20, 1, 0, 32, 0x28, 32])
    yield "fetch_wrong_checksum", UP + FETCH + b"\x10" + TAKE + b"\1" + bytes([0x20, 1, 0, 32, 0x68, 32])
    yield "fetch_strings", UP + FETCH + b"\x10" + TAKE + b"\1" + bytes([0x20, 1, 0, 32, 0x29, 32])
    yield "fetch_dead", UP + FETCH + b"\0" + TAKE + b"\1" + bytes([0x20, 1, 0, 0, 0x0b, 0])
    yield "fetch_too_large", fetch + frame(chunk(1, pattern(8), 1 << 20)) + TAKE
    yield "fetch_more_than_announced", fetch + frame(chunk(1, pattern(300), 200)) + TAKE
    yield "fetch_no_meta_data", fetch + frame(chunk(1, pattern(8))) + TAKE
    yield "fetch_fails", fetch + frame(failure(1, 10)) + TAKE
    yield "fetch_unavailable", fetch + frame(failure(1, 14)) + TAKE
    yield "fetch_unavailable_final", fetch + frame(failure(1, 14, is_final=True)) + TAKE
    yield "fetch_cancelled", fetch + half + CANCEL + b"\0" + TAKE + frame(chunk(1, pattern(200)[100:], offset=100))
    yield "fetch_not_yet_asked", UP + b"\x85\0" + whole + TAKE
    yield "both_ways", (UP + FETCH + b"\0" + frame(requests("p2", "o2")) + TAKE + whole + TAKE * 7 +
                        frame(pb.Frame(received=[2])))
    yield "drained_accepted", one_shot + DRAIN + frame(requests("p1", first=9)) + TAKE + frame(
        pb.Frame(received=[1, 2])) + TAKE + HALF_CLOSE + END
    yield "drained_opened", UP_OURS + FETCH + b"\0" + TAKE + DRAIN + whole + TAKE + BREAK + b"\1"
    yield "goodbye", UP_OURS + frame(pb.Frame(goodbye=True)) + TAKE + BREAK + b"\1"
    yield "half_closed", UP + HALF_CLOSE + TAKE + END
    yield "half_closed_amid", UP + frame(requests("p2", "w")) + HALF_CLOSE + END + TAKE + END
    yield "closed", UP + frame(requests("p2")) + FETCH + b"\0" + CLOSE + whole + TAKE + END
    yield "closed_ours", UP_OURS + FETCH + b"\0" + CLOSE + END
    yield "report", UP + TELL + TAKE + FETCH + b"\0" + TAKE + whole
    offer = pb.ConnectionMessage(transport="verbs", kind=pb.ConnectionMessage.OFFER, attempt=2, pair_address=b"i" * 40)
    refusal = pb.ConnectionMessage(transport="verbs", kind=pb.ConnectionMessage.REFUSAL, attempt=1,
                                   reason="no device", is_final=True)
    yield "path_offered", UP + frame(pb.Frame(connections=[offer])) + TAKE
    yield "path_offered_with_request", UP_OURS + frame(pb.Frame(
        connections=[offer, refusal], requests=requests("p1").requests)) + TAKE * 3
    yield "path_offered_too_often", UP + frame(pb.Frame(connections=[offer] * 100)) + TAKE * 3
    yield "path_offered_while_closing", UP + CLOSE + frame(pb.Frame(connections=[offer])) + END
    yield "path_unknown_kind", UP + frame(pb.Frame(connections=[pb.ConnectionMessage(transport="verbs", kind=9)]))
    yield "path_no_transport", UP + frame(pb.Frame(connections=[pb.ConnectionMessage(kind=pb.ConnectionMessage.OFFER)]))
    yield "connection_long_address", UP + frame(pb.Frame(connections=[pb.ConnectionMessage(
        transport="verbs", kind=pb.ConnectionMessage.OFFER, pair_address=b"i" * 1025)]))
    window = THEIRS + frame(hello(window_bytes=1000)) + TAKE + frame(requests("p2", "p1", "p2")) + TAKE * 4
    taken = frame(pb.Frame(taken_bytes=700)) + TAKE * 2
    yield "window", window + taken * 2 + frame(pb.Frame(taken_bytes=1000)) + TAKE
    yield "window_of_nothing_sent", UP + frame(pb.Frame(taken_bytes=1))
    yield "window_shut", window + frame(pb.Frame(cancels=[1, 2, 3])) + TAKE + DRAIN + HALF_CLOSE + END
    yield "data_of_no_chunk", UP + frame(pb.Frame(data=b"data"))
    yield "chunk_beyond_data", UP + frame(pb.Frame(chunks=[pb.Chunk(number=1, len_bytes=9)], data=b"data"))
    yield "garbage", UP + frame(b"\xff" * 9)
    for name, fields in (("host", {"host": b"h" * 16, "host_name": "h", "cluster_digest": 9, "process_id": 9}),
                         ("host_too_short", {"host": b"h" * 15}), ("name_too_long", {"name": "n" * 300}),
                         ("received_0", {"received": [0]}), ("window_full", {"window_bytes": (1 << 64) - 1})):
        yield f"hello_{name}", THEIRS + frame(hello(**fields)) + TAKE
        yield f"hello_{name}_ours", OURS + TAKE + frame(hello(**{"expected_name": "", **fields}))
    yield "hello_not_utf8", THEIRS + frame(b"\x0a\x0a\x08\x01\x12\x06/job:\xff")
    yield "serve_long_keys", UP + frame(requests("k" * 64, "k" * 512, "k" * 63)) + TAKE * 3
    yield "serve_key_too_long", UP + frame(requests("k" * 513)) + TAKE
    yield "serve_key_not_utf8", UP + frame(b"\x12\x05\x08\x01\x12\x01\xff") + TAKE
    yield "serve_steps", UP + frame(requests("p0", "p1", step=9)) + frame(requests("p1", first=3, step=10)) + TAKE * 4
    yield "serve_failures", UP + frame(requests(*["f"] * 70)) + TAKE * 4
    yield "serve_chunks", UP + frame(requests(*["p0"] * 300)) + TAKE * 4
    yield "requests_too_many", UP + frame(pb.Frame(packed_requests=b"\1\2\1w" * 1025))
    yield "serve_priorities", UP + b"".join(frame(requests("p2", "o2", first=2 * i + 1, priority=i % 4))
                                            for i in range(5)) + TAKE * 20
    kept = [f"k{i:02}" for i in range(70)]
    packed_ours = OURS + TAKE + frame(hello(expected_name="", reads_packed=True, kept_keys=2))
    yield "packed_kept_keys", packed_up + frame(packed_texts(*kept, flags=3)) + TAKE * 2 + frame(
        pb.Frame(packed_requests=b"\0\x92\1\x88\1")) + TAKE
    yield "packed_kept_keys_ours", packed_ours + frame(packed_texts(*kept, flags=3)) + TAKE * 2
    yield "packed_kept_twice", packed_up + frame(packed_texts("p0", "p0", flags=3)) + TAKE
    yield "packed_read_in_parts", packed_up + frame(packed_texts(*["p0"] * 70)) + TAKE * 4
    yield "packed_long_key", packed_up + frame(packed_texts("k" * 100, "p0")) + TAKE
    for name, record in (("key_too_long", b"\1\2\x81\4" + b"k" * 513), ("no_key", b"\1\2\0"),
                         ("key_not_utf8", b"\1\2\1\xff"), ("key_with_zero", b"\1\2\3k\0k"),
                         ("key_number_kept", b"\2\2\0"), ("key_number_too_large", b"\0\2" + b"\xfe\xff" * 3 + b"\x7f"),
                         ("number_too_long", b"\1" + b"\xff" * 10 + b"\1"), ("number_cut", b"\1\xff"),
                         ("unknown_flags", b"\x80\2\2"), ("step", b"\5\2\2p0\6" + b"\5\2\2p0\5"),
                         ("step_cut", b"\5\2\2p0"), ("subscription", b"\x81\1\2\1w\6" + b"\x81\1\2\1w\0"),
                         ("subscription_0", b"\x81\1\2\1w\0"), ("subscription_cut", b"\x81\1\2\1w"),
                         ("resume_cut", b"\x11\2\2p2\3\0\0")):
        yield f"packed_{name}", packed_up + frame(pb.Frame(packed_requests=record)) + TAKE * 2
    asked = packed_up + FETCH + b"\0" + TAKE
    for name, record in (("described_cut", b"\2\2\x08\x0a\0\2\1"), ("rank_17", b"\2\2\1\x0a\0\2\x11" + b"\1" * 18),
                         ("rank_16", b"\2\2\1\x0a\0\2\x10" + b"\1" * 17), ("dtype_unknown", b"\2\2\1\x0a\0\x63\1\1\1"),
                         ("dtype_too_large", b"\2\2\1\x0a\0" + b"\xff" * 5 + b"\1\1\1\1"),
                         ("dead", b"\6\2\0\x0a\0\0\0\0"),
                         ("one_shot_not_described", b"\x08\2\1"), ("one_shot", b"\x0a\2\1\x0a\0\2\1\1\1"),
                         ("checksum_cut", b"\x12\2\1\x0a\0\2\1\1\1\0\0"), ("unknown_flags_of_chunk", b"\x20\2\1"),
                         ("offset_cut", b"\3\2\1"), ("size_too_large", b"\2\2\1\x0a\0\2\1" + b"\xff" * 9 + b"\1\1")):
        yield f"packed_fetch_{name}", asked + frame(pb.Frame(packed_chunks=record, data=b"\0")) + TAKE
    ranked = pb.MetaData(dtype=pb.U8, dims=[1] * 17, size_bytes=1)
    yield "fetch_rank_17", fetch + frame(pb.Frame(chunks=[pb.Chunk(number=1, len_bytes=1, publication=5,
                                                                   meta_data=ranked)], data=b"\0"))
    yield "fetch_step_0", UP + FETCH + b"\1" + TAKE + frame(chunk(1, pattern(8), 8, step=3)) + TAKE
    for name, lengths in (("right", (1, 2)), ("too_long", (1, 3)), ("too_short", (1, 1))):
        strings = pb.Chunk(number=1, len_bytes=19, publication=5, meta_data=pb.MetaData(
            dtype=pb.STRING, dims=[2], size_bytes=19))
        yield f"fetch_strings_{name}", fetch + frame(pb.Frame(
            chunks=[strings], data=struct.pack("<2Q", *lengths) + b"abc")) + TAKE
    yield "fetch_no_publication", fetch + frame(chunk(1, pattern(8), 8, publication=0)) + TAKE
    yield "fetch_begun_twice", fetch + half + half + TAKE
    yield "fetch_failed_amid", fetch + half + frame(failure(1, 10)) + TAKE
    yield "fetch_answered_twice", fetch + whole + whole + TAKE
    yield "fetch_answered_and_failed", fetch + whole + frame(failure(1, 10)) + TAKE
    yield "fetch_overlap", fetch + half + frame(chunk(1, pattern(100), offset=50)) + TAKE
    yield "fetch_no_status", fetch + frame(pb.Frame(failures=[pb.Failure(number=1)])) + TAKE
    yield "fetch_unknown_status", fetch + frame(failure(1, 99)) + TAKE
    yield "fetch_message_not_utf8", fetch + frame(b"\x2a\x09\x08\x01\x12\x05\x08\x0a\x12\x01\xff") + TAKE
    yield "fetch_many", UP + (FETCH + b"\0") * 8 + TAKE + b"".join(
        frame(chunk(i, pattern(200), 200)) for i in range(8, 0, -1)) + TAKE
    yield "fetch_after_close", fetch + half + CLOSE + END + OPEN + b"\1" + TAKE + frame(hello(expected_name="")) + TAKE
    for message in offers("verbs"):
        yield f"path_of_kind_{message.kind}", UP + frame(pb.Frame(connections=[message])) + TAKE
        yield f"path_of_kind_{message.kind}_ours", UP_OURS + frame(pb.Frame(connections=[message])) + TAKE
    yield "path_transport_not_utf8", UP + frame(b"\x42\x03\x0a\x01\xff")
    yield "path_reason_not_utf8", UP + frame(b"\x42\x09\x0a\x01v\x10\x03\x2a\x02\xff\xff")
    yield "group_in_frame", UP + frame(b"\x0b" * 70 + b"\x0c" * 70)
    yield "wrong_wire_types", UP + frame(b"\x0d\0\0\0\0") + frame(b"\x39\0\0\0\0\0\0\0\0")
    yield "unknown_fields", UP + frame(b"\xa0\1\1\xa2\1\1u\xa5\1\0\0\0\0\xa1\1" + b"\0" * 8) + TAKE


# ----------------------------------------------------------------------------------- the commands of services_fuzz.c --

EXCHANGE, RECEIVE, PUBLISH, WITHDRAW, LIST, IDENTIFY, PROBE, ECHO, CHECK, WATCH, REFLECT, REFLECT_ALPHA = range(12)


def call(method):
    return bytes([0, method])


def give(slot, message):
    return bytes([1, slot]) + raw(message)


def take(slot):
    return bytes([5, slot])


def half_close(slot):
    return bytes([6, slot])


def end(slot):
    return bytes([7, slot])


def drop(slot):
    return bytes([8, slot])


def ask(method, message, taken=3):
    """A whole call on slot 0 with one request."""
    return call(method) + give(0, message) + half_close(0) + take(0) * taken + end(0)


def publish_own(size, key, step=0):
    return bytes([10, size // 64, key, step])


def send_own(size, key, step=0):
    return bytes([11, size // 64, key, step])


def first(key, size, data=b"", **fields):
    return pb.PublishRequest(key=key, meta_data=pb.MetaData(dtype=pb.U8, dims=[size], size_bytes=size), data=data,
                             **fields)


def question(**fields):
    return reflection_pb2.ServerReflectionRequest(host="h", **fields)


TIME_PASSES, TIME_IS_UP = b"\x09", b"\x19"


def services_seeds():
    yield "nothing", b"\0"
    get = pb.ReceiveRequest(key="p1", wants_checksum=True)
    yield "receive", b"\0" + publish_own(640, 1) + ask(RECEIVE, get)
    yield "receive_pieces", b"\0" + publish_own(64 * 255, 1) + ask(RECEIVE, get, 9)
    yield "receive_empty", b"\0" + publish_own(0, 1) + ask(RECEIVE, get)
    yield "receive_waits", b"\0" + call(RECEIVE) + give(0, get) + half_close(0) + publish_own(640, 1) + take(0) * 3
    yield "receive_one_shot", b"\0" + send_own(640, 1, 2) + ask(RECEIVE, pb.ReceiveRequest(key="p1", step=2))
    yield "receive_one_shot_dropped", (b"\0" + send_own(640, 1) + call(RECEIVE) + give(0, get) + half_close(0) +
                                       drop(0) + ask(RECEIVE, get))
    yield "receive_dropped", b"\0" + call(RECEIVE) + give(0, get) + half_close(0) + drop(0)
    yield "receive_aborted", b"\0" + call(RECEIVE) + give(0, get) + half_close(0) + b"\x0d\x80" + end(0)
    yield "receive_too_many", b"\0" + b"".join(call(RECEIVE) + give(i, get) + half_close(i) for i in range(6))
    yield "receive_twice", b"\0" + call(RECEIVE) + give(0, get) + give(0, get) + end(0)
    yield "receive_nothing", b"\0" + call(RECEIVE) + half_close(0) + end(0)
    yield "receive_slow", b"\0" + publish_own(64 * 255, 1) + call(RECEIVE) + give(0, get) + half_close(0) + TIME_IS_UP
    yield "receive_closed_amid", b"\1" + publish_own(64 * 255, 1) + call(RECEIVE) + give(0, get) + half_close(0)
    yield "publish", b"\0" + ask(PUBLISH, first("k", 64, pattern(64))) + ask(LIST, pb.ListRequest())
    parts = call(PUBLISH) + give(0, first("k", 128, pattern(64))) + give(0, pb.PublishRequest(data=pattern(64)))
    yield "publish_parts", b"\0" + parts + half_close(0) + take(0) + end(0) + ask(RECEIVE, pb.ReceiveRequest(key="k"))
    yield "publish_empty_checksum", b"\0" + ask(PUBLISH, first("k", 0, has_checksum=True, checksum=0x2d06800538d394c2))
    yield "publish_wrong_checksum", b"\0" + ask(PUBLISH, first("k", 64, pattern(64), has_checksum=True, checksum=1))
    yield "publish_too_short", b"\0" + ask(PUBLISH, first("k", 64, pattern(63)))
    yield "publish_too_long", b"\0" + ask(PUBLISH, first("k", 64, pattern(65)))
    yield "publish_too_large", b"\0" + ask(PUBLISH, first("k", 65537))
    yield "publish_all_held", b"\0" + ask(PUBLISH, first("k", 65536)) + call(PUBLISH) + give(1, first("l", 65536))
    source = {"source_incarnation": 77, "source_number": 5}
    yield "publish_to_be_fetched", b"\0" + ask(PUBLISH, first("k", 64, **source)) + ask(LIST, pb.ListRequest())
    yield "publish_to_be_fetched_with_bytes", b"\0" + ask(PUBLISH, first("k", 64, pattern(64), **source))
    yield "publish_broken", b"\0" + parts + drop(0)
    yield "publish_slow", b"\0" + parts + TIME_IS_UP + end(0)
    yield "publish_closed_amid", b"\1" + parts
    yield "publish_first_twice", b"\0" + call(PUBLISH) + give(0, first("k", 64)) + give(0, first("k", 64)) + end(0)
    # Composed: flags (type, key, all the data, checksum), size / 64, key.
    for name, flags in (("bytes", 0x3c), ("strings", 0x2d), ("packed", 0x2e), ("dead", 0x0f)):
        yield f"publish_{name}", b"\0" + call(PUBLISH) + bytes([3, 0, flags, 0 if name == "dead" else 3, 0]) + \
            half_close(0) + take(0) + end(0) + ask(RECEIVE, pb.ReceiveRequest(key="p0", wants_checksum=True))
    yield "withdraw", b"\0" + publish_own(64, 0) + publish_own(64, 1) + ask(WITHDRAW, pb.WithdrawRequest(pattern="p*"))
    yield "withdraw_received", (b"\0" + publish_own(64 * 255, 1) + call(RECEIVE) + give(0, get) + half_close(0) +
                                call(WITHDRAW) + give(1, pb.WithdrawRequest(pattern="*")) + half_close(1) + take(0) * 9)
    yield "list", b"\0" + publish_own(64, 0) + publish_own(0, 7, 3) + ask(LIST, pb.ListRequest(pattern="*"))
    yield "identify", b"\0" + ask(IDENTIFY, cluster_pb2.IdentifyRequest())
    yield "check", b"\0" + ask(CHECK, health_pb2.HealthCheckRequest(service="tensorlane.v1.Transfer"))
    yield "check_unknown", b"\0" + ask(CHECK, health_pb2.HealthCheckRequest(service="x"))
    watch = call(WATCH) + give(0, health_pb2.HealthCheckRequest()) + half_close(0)
    yield "watch", b"\0" + watch + take(0) + drop(0)
    yield "watch_closed_amid", b"\1" + watch + take(0)
    asked = call(REFLECT) + b"".join(give(0, message) + take(0) for message in (
        question(list_services=""), question(file_by_filename="tensorlane/v1/transfer.proto"),
        question(file_containing_symbol="tensorlane.v1.Frame"), question(all_extension_numbers_of_type="x"),
        question()))
    yield "reflection", b"\0" + asked + half_close(0) + end(0)
    up = call(EXCHANGE) + give(0, hello()) + take(0)
    yield "exchange", b"\0" + publish_own(64 * 255, 0) + up + give(0, requests("p0", wants_checksum=True)) + take(0) * 9
    yield "exchange_one_shot", (b"\0" + send_own(640, 3) + up + give(0, requests("o1")) + take(0) * 2 +
                                give(0, pb.Frame(received=[1])))
    credits = give(0, requests("o1", "o1", subscription=4))
    yield "exchange_subscribed", (b"\0" + up + credits + send_own(640, 3) + take(0) * 2 +
                                  give(0, pb.Frame(received=[1])) + send_own(640, 3, 1) + take(0) * 2)
    yield "exchange_subscribed_twice", (b"\0" + up + credits + give(0, requests("o1", first=7, subscription=5)) +
                                        send_own(640, 3) + send_own(640, 3, 1) + take(0) * 4)
    yield "exchange_subscribed_published", (b"\0" + up + give(0, requests("p0", "p0", subscription=4)) +
                                            publish_own(64, 0) + publish_own(64, 0, 1) + take(0) * 4)
    yield "exchange_subscribed_dropped", b"\0" + up + credits + drop(0) + send_own(640, 3) + up + credits + take(0) * 2
    yield "exchange_one_shot_again", (b"\0" + send_own(640, 3) + up + give(0, requests("o1")) + take(0) * 2 + drop(0) +
                                      up + give(0, requests("o1")) + take(0) * 2 + give(0, pb.Frame(received=[1])))
    yield "exchange_received_in_hello", (b"\0" + send_own(640, 3) + up + give(0, requests("o1")) + take(0) * 2 +
                                         drop(0) + call(EXCHANGE) + give(0, hello(received=[1])) + take(0))
    yield "exchange_restarted", (b"\0" + send_own(640, 3) + up + give(0, requests("o1")) + take(0) * 2 +
                                 call(EXCHANGE) + give(1, hello(incarnation=78)) + take(1) + end(0) +
                                 give(1, requests("o1")) + take(1) * 2)
    yield "exchange_fetch", b"\0" + up + bytes([12, 0, 0, 0]) + take(0) + give(0, chunk(1, pattern(64), 64)) + take(0)
    yield "exchange_dialled", bytes([0, 12, 2, 0, 0]) + take(0) + give(0, hello(expected_name="")) + take(0) + give(
        0, failure(1, 10)) + drop(0)
    yield "exchange_both_open", (bytes([0, 12, 0, 0, 0]) + take(0) + call(EXCHANGE) + give(1, hello()) + take(1) +
                                 give(0, hello(expected_name="")) + take(0) * 2 + take(1) * 2)
    yield "exchange_closed_amid", b"\1" + up + give(0, requests("w")) + bytes([12, 0, 0, 0]) + take(0)
    yield "self_received", bytes([0, 12, 1, 0, 0]) + publish_own(64, 0)
    yield from services_seeds_of_names()
    yield from services_seeds_of_links()


def services_seeds_of_names():
    """What a name asks for: parts, values of probes, puts, patterns, symbols of reflection."""
    for name, dtype, dims, part in (("box_of_3", pb.U8, [4, 8, 16], "b1+2,2+3,4+5"),
                                    ("planes", pb.U8, [4, 8, 16], "b1+2,0+8,0+10"),
                                    ("rows_of_planes", pb.U8, [4, 8, 16], "b0+4,1+2,0+10"),
                                    ("half_bytes", pb.U4, [8, 128], "b0+8,1+2"),
                                    ("bytes_of_halves", pb.U4, [8, 128], "b0+8,2+4"),
                                    ("scalar", pb.F64, [], "b"), ("of_nothing", pb.F32, [0, 4], "b0+0,0+4")):
        message = first("k", 0)
        message.meta_data.dims[:], message.meta_data.dtype = dims, dtype
        size = {"scalar": 8, "of_nothing": 0}.get(name, 512)
        message.meta_data.size_bytes, message.data = size, pattern(size)
        key = f"tensorlane.part/{part}/k"
        yield f"part_{name}", b"\0" + ask(PUBLISH, message) + ask(RECEIVE, pb.ReceiveRequest(key=key))
    strings = pb.PublishRequest(key="k", meta_data=pb.MetaData(dtype=pb.STRING, dims=[2], size_bytes=19))
    for name, lengths in (("right", (1, 2)), ("too_long", (1, 3)), ("too_short", (1, 1)), ("huge", (1, (1 << 64) - 1))):
        strings.data = struct.pack("<2Q", *lengths) + b"abc"
        yield f"publish_strings_{name}", b"\0" + ask(PUBLISH, strings) + ask(RECEIVE, pb.ReceiveRequest(key="k"))
    yield "publish_annotations_not_utf8", b"\0" + ask(PUBLISH, first("k", 8, pattern(8)).SerializeToString() +
                                                      b"\x3a\x08\x0a\x06\x0a\x01\xff\x12\x01v")
    box = first("k", 512, pattern(512))
    box.meta_data.dims[:] = [8, 64]
    box = b"\0" + ask(PUBLISH, box)
    up = call(EXCHANGE) + give(0, hello(serves_parts=True)) + take(0)
    for name, part in (("box", "b2+3,8+10/k"), ("rows", "b2+3,0+40/k"), ("range", "r10+20/k"), ("whole", "r0+200/k"),
                       ("ranges", "r10+20,100+8,0+1/k"), ("nothing", "b0+0,0+40/k"), ("rank", "b0+8/k"),
                       ("beyond", "b0+9,0+40/k"), ("range_beyond", "r1f0+11/k"), ("too_long", "r0+200,0+1/k"),
                       ("overflow", "rffffffffffffffff+2/k"), ("number_too_long", "r00000000000000001+2/k"),
                       ("no_plus", "r1-2/k"), ("ends_in_comma", "r1+2,/k"), ("no_numbers", "r/k"),
                       ("no_letter", "/k"), ("other_letter", "x1+2/k"), ("no_key", "r1+2"), ("empty_key", "r1+2/"),
                       ("too_many_dims", "b" + ",".join(["0+1"] * 17) + "/k"), ("missing", "r0+1/missing")):
        key = f"tensorlane.part/{part}"
        yield f"part_{name}", box + up + give(0, requests(key, wants_checksum=True)) + take(0) * 3
        yield f"part_received_{name}", box + ask(RECEIVE, pb.ReceiveRequest(key=key, wants_checksum=True))
    part = "tensorlane.part/r0+40/o1"
    yield "part_sent", b"\0" + send_own(640, 3) + up + give(0, requests(part)) + take(0) * 2 + give(
        0, pb.Frame(received=[1]))
    beyond = requests("tensorlane.part/r0+fff/o1")
    yield "part_sent_wrong", b"\0" + send_own(640, 3) + up + give(0, beyond) + take(0) * 2
    yield "part_subscribed", b"\0" + up + give(0, requests(part, part, subscription=4)) + send_own(640, 3) + take(0) * 2
    yield "part_of_strings", b"\0" + call(PUBLISH) + bytes([3, 0, 0x2d, 3, 0]) + half_close(0) + take(0) + end(0) + ask(
        RECEIVE, pb.ReceiveRequest(key="tensorlane.part/r0+8/p0"))
    yield "part_waits", b"\0" + up + give(0, requests("tensorlane.part/r0+20/p0")) + publish_own(64, 0) + take(0) * 2
    yield "part_published", b"\0" + ask(PUBLISH, first(part, 8, pattern(8)))
    for size in (256, 65536, 7):
        probe = requests(f"tensorlane.probe/{size}", step=(1 << 64) - 1, wants_checksum=True)
        yield f"probe_{size}", b"\0" + up + give(0, probe) + take(0) * 20
    yield "probe_other_step", b"\0" + up + give(0, requests("tensorlane.probe/256", step=1)) + take(0)
    yield "probe_received", b"\0" + ask(RECEIVE, pb.ReceiveRequest(key="tensorlane.probe/256", step=(1 << 64) - 1))
    yield "put_not_under_way", b"\0" + up + give(0, requests("tensorlane.put", step=5)) + take(0)
    yield "put_published", b"\0" + ask(PUBLISH, first("tensorlane.put", 8, pattern(8)))
    source = {"source_incarnation": 77, "source_number": 5}
    putting = b"\0" + call(EXCHANGE) + give(0, hello(fetches_puts=True)) + take(0) + call(PUBLISH) + give(
        1, first("k", 64, **source)) + half_close(1) + take(1) + take(0)
    yield "put_fetched", putting + give(0, chunk(1, pattern(64), 64)) + take(1) + end(1)
    yield "put_fetched_data_plane", b"\2" + putting[1:] + TIME_IS_UP + take(1) + end(1)
    yield "put_fetch_broken", putting + drop(0) + TIME_IS_UP + take(1) + end(1)
    yield "put_client_gone", putting + drop(1) + take(0)
    yield "put_closed_amid", b"\1" + putting[1:]
    for number, pattern_text in enumerate(("p?", "[p]0", "[!a-o]*", "[^p]*", "[", "[]p]0", "[a-", "[z-a]*", "\\p0",
                                           "p\\", "**0", "*p*0*", "?" * 40, "[p-]0", "ä*", "[ä]*", "*w", "")):
        yield f"list_pattern_{number}", b"\0" + publish_own(64, 0) + publish_own(64, 7) + publish_own(0, 5) + ask(
            LIST, pb.ListRequest(pattern=pattern_text))
    yield "list_pattern_not_utf8", b"\0" + publish_own(64, 0) + ask(LIST, b"\x0a\x02\xff*")
    yield "list_pattern_too_long", b"\0" + ask(LIST, pb.ListRequest(pattern="*" * 513))
    digits = pb.WithdrawRequest(pattern="p[0-9]")
    yield "withdraw_sets", b"\0" + publish_own(64, 0) + publish_own(64, 1) + ask(WITHDRAW, digits)
    yield "withdraw_nothing", b"\0" + ask(WITHDRAW, pb.WithdrawRequest())
    yield "withdraw_missing", b"\0" + ask(WITHDRAW, pb.WithdrawRequest(pattern="missing"))
    notes = {"b": "2", "a": "1", "unit": "m"}
    noted = [first(f"k{i}", 8, pattern(8), annotations=pb.Annotations(items=notes if i < 2 else {"c": str(i)}))
             for i in range(4)]
    yield "list_annotations", b"\0" + b"".join(ask(PUBLISH, message) for message in noted) + ask(LIST, pb.ListRequest())
    for name, items in (("none", {}), ("empty_name", {"": "x"}), ("too_long", {"n" * 600: "v"}),
                        ("value", {"n": "v" * 2000}), ("many", {f"n{i}": "" for i in range(80)})):
        yield f"publish_annotations_{name}", b"\0" + ask(PUBLISH, first(
            "k", 8, pattern(8), annotations=pb.Annotations(items=items))) + ask(LIST, pb.ListRequest())
    for name, message in (("back", first("k", 8, pattern(8), step=1)),
                          ("back_allowed", first("k", 8, pattern(8), step=1, may_go_back=True)),
                          ("size_unlike_shape", first("k", 8, pattern(8), step=7)), ("own", first("p0", 8, pattern(8))),
                          ("huge", first("k", (1 << 64) - 1)), ("no_key", first("", 8, pattern(8))),
                          ("key_too_long", first("k" * 513, 8, pattern(8))),
                          ("reserved", first("tensorlane.x", 8, pattern(8)))):
        if name == "size_unlike_shape":
            message.meta_data.dims[:] = [9]
        yield f"publish_{name}", b"\0" + publish_own(64, 0) + ask(PUBLISH, first("k", 8, pattern(8), step=3)) + ask(
            PUBLISH, message) + ask(LIST, pb.ListRequest())
    for name, symbol in (("field", "tensorlane.v1.Frame.hello"),
                         ("nested_enum", "tensorlane.v1.ConnectionMessage.Kind"),
                         ("nested_value", "tensorlane.v1.ConnectionMessage.OFFER"), ("value", "tensorlane.v1.BF16"),
                         ("value_of_enum", "tensorlane.v1.DType.BF16"),
                         ("nested_message", "tensorlane.v1.Annotations.ItemsEntry"),
                         ("method", "tensorlane.v1.Transfer.Exchange"), ("service", "tensorlane.v1.Cluster"),
                         ("package", "tensorlane.v1"), ("part_of_package", "tensorlane"),
                         ("leading_dot", ".tensorlane.v1.Frame"), ("ending_dot", "tensorlane.v1.Frame."),
                         ("unknown", "tensorlane.v1.Frame.none"), ("unknown_method", "tensorlane.v1.Transfer.None"),
                         ("health", "grpc.health.v1.HealthCheckResponse.SERVING"),
                         ("oneof", "grpc.reflection.v1.ServerReflectionRequest.message_request")):
        yield f"reflection_{name}", b"\0" + call(REFLECT) + give(0, question(file_containing_symbol=symbol)) + take(0)
    for name in ("tensorlane/v1/cluster.proto", "grpc/health/v1/health.proto", "none.proto", ""):
        stem = name.partition("/")[0].partition(".")[0] or "empty"
        asked = give(0, question(file_by_filename=name))
        yield f"reflection_file_{stem}", b"\0" + call(REFLECT_ALPHA) + asked + take(0)
    yield "reflection_extension", b"\0" + call(REFLECT) + give(0, question(
        file_containing_extension=reflection_pb2.ExtensionRequest(containing_type="x", extension_number=1))) + take(0)


def services_seeds_of_links():
    """Calls and links that others bear on."""
    for name, message in (("nothing", cluster_pb2.EchoRequest()), ("answer", cluster_pb2.EchoRequest(answer_bytes=999)),
                          ("data", cluster_pb2.EchoRequest(data=pattern(99))),
                          ("too_large", cluster_pb2.EchoRequest(answer_bytes=65537))):
        yield f"echo_{name}", b"\0" + ask(ECHO, message)
    probe = call(PROBE) + give(0, cluster_pb2.ProbeRequest()) + half_close(0)
    yield "probe_peers", b"\0" + probe + TIME_IS_UP * 3 + take(0) + end(0)
    up = call(EXCHANGE) + give(0, hello(serves_probes=True)) + take(0)
    probing = up + call(PROBE) + give(1, cluster_pb2.ProbeRequest()) + half_close(1) + take(0) * 2
    for number in range(1, 5):
        answered = give(0, chunk(number, pattern(256), 256)) + take(0) * 2 + give(0, failure(number, 10))
        yield f"probe_answered_{number}", b"\0" + probing + answered + TIME_IS_UP + take(1)
    yield "probe_broken", b"\0" + probing + drop(0) + TIME_IS_UP * 2 + take(1)
    yield "probe_client_gone", b"\0" + probing + drop(1) + TIME_IS_UP
    yield "probe_data_plane", b"\2" + probing + TIME_IS_UP * 2 + take(1)
    for service in ("tensorlane.v1.Cluster", "grpc.health.v1.Health", ""):
        yield f"check_{service or 'all'}", b"\0" + ask(CHECK, health_pb2.HealthCheckRequest(service=service))
    unknown = health_pb2.HealthCheckRequest(service="x")
    yield "watch_unknown", b"\0" + call(WATCH) + give(0, unknown) + half_close(0) + take(0)
    yield "watches", b"\1" + b"".join(
        call(WATCH) + give(i, health_pb2.HealthCheckRequest()) + half_close(i) for i in range(8))
    large = publish_own(64 * 255, 0) + publish_own(64 * 255, 1) + publish_own(64 * 255, 2)
    held = b"".join(call(RECEIVE) + give(i, pb.ReceiveRequest(key=f"p{i % 3}")) + half_close(i) for i in range(8))
    yield "receive_held", b"\0" + large + held + take(0) * 2 + take(1) * 2 + take(2) + drop(0) + drop(1) + take(2) * 9
    yield "receive_held_timed_out", b"\0" + large + held + TIME_IS_UP * 2 + take(3)
    yield "receive_held_withdrawn", b"\0" + large + held + b"\x0d\x20" + drop(0) + take(1) * 9
    yield "receive_held_closed_amid", b"\1" + large + held
    for name, fields in (("self", {"name": SELF}), ("unknown", {"name": "/job:worker/task:9"}),
                         ("client", {"name": ""}), ("no_task", {"name": "worker"}),
                         ("other_job", {"name": "/job:chief/task:0"}),
                         ("one_way", {"is_one_way": True}), ("one_way_client", {"name": "", "is_one_way": True}),
                         ("all", {"serves_probes": True, "serves_subscriptions": True, "serves_parts": True,
                                  "fetches_puts": True, "reads_packed": True, "kept_keys": 9}),
                         ("digest", {"cluster_digest": 7, "host": b"h" * 16, "host_name": "h", "process_id": 7}),
                         ("incarnation_0", {"incarnation": 0}), ("received", {"received": list(range(1, 40))})):
        linked = call(EXCHANGE) + give(0, hello(**fields)) + take(0)
        waits = give(0, requests("w", "p0", wants_checksum=True))
        linked_and_waits = linked + waits + take(0) * 2
        yield f"link_{name}", b"\0" + publish_own(640, 0) + linked_and_waits + bytes([12, 0, 0, 0]) + take(0)
        yield f"link_{name}_again", b"\0" + linked + waits + call(EXCHANGE) + give(1, hello(**fields)) + take(1) + end(
            0) + drop(1) + TIME_IS_UP
    for task, incarnation in ((1, 77), (1, 78), (2, 77)):
        other = hello(name=f"/job:worker/task:{task}", incarnation=incarnation)
        yield f"rivals_{task}_{incarnation}", b"\0" + (up + call(EXCHANGE) + give(1, other) + take(1) + end(0)) * 3
    for transport in ("local", "verbs", "none"):
        for message in offers(transport):
            linked = call(EXCHANGE) + give(0, hello()) + take(0)
            offered = give(0, pb.Frame(connections=[message])) + take(0) * 2
            yield f"connection_{transport}_{message.kind}", b"\2" + linked + offered + TIME_IS_UP
    dialled = bytes([0, 12, 0, 0, 0]) + take(0)
    linked = dialled + give(0, hello(expected_name="")) + take(0)
    lost = drop(0) + TIME_PASSES + take(0)
    yield "dialled_again", dialled + (drop(0) + TIME_PASSES) * 9 + take(0) + TIME_IS_UP
    yield "dialled_refused", dialled + give(0, hello(name="/job:worker/task:2", expected_name=""))
    yield "dialled_resumed", (linked + give(0, chunk(1, pattern(64), 128)) + lost + give(0, hello(expected_name="")) +
                              take(0) + give(0, chunk(1, pattern(128)[64:], 128, offset=64)) + take(0))
    yield "dialled_one_shot", linked + give(0, chunk(1, pattern(64), 64, is_one_shot=True)) + lost + TIME_IS_UP
    twice = up + give(0, requests("o1", "o1")) + take(0) * 2 + drop(0) + TIME_IS_UP
    yield "sent_reserved", b"\0" + send_own(640, 3) + send_own(64, 3, 1) + twice + ask(
        RECEIVE, pb.ReceiveRequest(key="o1"))
    yield "requests_of_two_rounds", b"\0" + up + give(0, requests(*map(str, range(600)))) + take(0) + drop(0)
    steps = b"".join(give(0, requests("o1", first=step + 1, step=step)) for step in range(40))
    yield "steps_of_a_key", b"\0" + up + steps + send_own(64, 3, 3) + give(0, pb.Frame(cancels=[2, 40])) + take(0) * 3
    waits = up + give(0, requests("w", "o1", step=1)) + call(RECEIVE) + give(
        1, pb.ReceiveRequest(key="o2", step=2)) + half_close(1)
    yield "steps_ended", (b"\0" + waits + send_own(64, 4, 3) + bytes([13, 1, 13, 2, 13, 3]) + take(0) * 2 + take(1) +
                          end(1))
    yield "steps_aborted", (b"\0" + up + give(0, requests("w", step=1)) + send_own(64, 3, 1) + bytes(
        [13, 0x81, 13, 0xc2]) + give(0, requests("o1", first=5, step=1)) + take(0) * 2 + bytes([12, 0, 3, 1]))
    yield "subscribed_many", b"\0" + up + b"".join(
        give(0, requests(*["o1"] * 9, first=10 * i + 1, subscription=i + 1)) for i in range(6)) + b"".join(
            send_own(64, 3, step % 4) for step in range(12)) + take(0) * 9


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "corpus")
    import link_seeds as of_link  # these are made of the functions above
    import services_seeds as of_services
    for target, seeds in (("link", link_seeds()), ("link", of_link.link_seeds()),
                          ("services", services_seeds()), ("services", of_services.services_seeds())):
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, script in seeds:
            (folder / target / name).write_bytes(script)


if __name__ == "__main__":
    main()
