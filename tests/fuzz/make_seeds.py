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


def pattern(count):
    return bytes((i * 7 + i // 256) % 256 for i in range(count))


def raw(message):
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return struct.pack("<H", len(data)) + data


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


# ----------------------------------------------------------------------------------- the commands of services_fuzz.c --

EXCHANGE, RECEIVE, PUBLISH, WITHDRAW, LIST, IDENTIFY, CHECK, WATCH, REFLECT = range(9)


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


TIME_IS_UP = b"\x09"


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


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "corpus")
    for target, seeds in (("link", link_seeds()), ("services", services_seeds())):
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, script in seeds:
            (folder / target / name).write_bytes(script)


if __name__ == "__main__":
    main()
