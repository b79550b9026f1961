# SPDX-License-Identifier: Apache-2.0
"""Seeds of the fuzz target services that reach what those of make_seeds.py do not: budgets that run out, tables that
grow, calls of a kind at once, records that are cut, and states that take several messages in order."""
from make_seeds import (CHECK, EXCHANGE, LIST, MAX_U64, PUBLISH, QUOTA, RECEIVE, REFLECT, TIME_IS_UP, TIME_PASSES,
                        WITHDRAW, ask, call, chunk, collide, described, drop, end, failure, first, give, half_close,
                        health_pb2, hello, offers, packed_same, packed_texts, pattern, pb, publish_own, question,
                        requests, send_own, splitmix, take, varint)

KEYS = ["p0", "p1", "p2", "o1", "o2", "f", "w"]
O1, O2 = 3, 4
OTHER = "/job:worker/task:0"
LARGE = 3 * 240 * 64  # less than three quarters of limits.held, which one client may have
SLOW_CLOCK = b"\x0c"


def link(slot=0, **fields):
    """A link that a peer opens on a slot that is free."""
    return call(EXCHANGE) + give(slot, hello(**fields)) + take(slot)


def receive_own(key=0, flags=0):
    return bytes([12, flags, key, 0])


def end_step(step):
    return bytes([13, step])


def abort_step(step):
    return bytes([13, 0x80 | step])


def withdraw_own(key):
    return bytes([13, 0x20 | key])


def cancel(*numbers):
    return pb.Frame(cancels=numbers)


def reserve_many(count):
    """So many values of step 0 that are reserved for the peer on slot 0, one after the other in the same places."""
    for number in range(0, count, 7):
        keys = range(min(7, count - number))
        yield b"".join(send_own(0, key) for key in keys)
        if number == 0:
            yield give(0, packed_texts(*KEYS, flags=3)) + take(0)
        else:
            # The difference of the first number, and key 0 to 6, each one more than the one before.
            records = b"".join(b"\0\2\2" if key else b"\0" + varint(2 * (number + 1)) + b"\0" for key in keys)
            yield give(0, pb.Frame(packed_requests=records)) + take(0)
        yield end_step(0)


def publish_large(key):
    """A value of LARGE bytes, pushed in pieces that the target composes."""
    return call(PUBLISH) + give(0, first(key, LARGE)) + bytes([3, 0, 0x18, 240]) * 3 + half_close(0) + take(0) + end(0)


def received(slot, key):
    return call(RECEIVE) + give(slot, pb.ReceiveRequest(key=key)) + half_close(slot)


def one_shots(number, count):
    """Dead one-shot values for requests that follow each other, packed."""
    first_one = b"\x0e" + varint(2 * number) + b"\0\x0a\0\0\0\0"
    return pb.Frame(packed_chunks=first_one + b"\x0e\2\0\0\0\0\0\0" * (count - 1))


# Publications are numbered from the seventh on, and the thirteenth is the factor of the first link.
RANDOM = list(splitmix(16))


def services_seeds():
    yield from seeds_of_subscriptions()
    yield from seeds_of_steps()
    yield from seeds_of_walks()
    yield from seeds_of_peers()
    yield from seeds_of_calls()
    yield from seeds_of_parts()
    yield from seeds_of_frames()
    yield from seeds_of_fetches()
    yield from seeds_of_exact_quotas()
    yield from seeds_of_answers()
    yield from seeds_of_half_bytes()
    yield from seeds_of_repeated_shapes()


def seeds_of_subscriptions():
    up = b"\0" + link()
    s4, s5 = {"subscription": 4}, {"subscription": 5}
    others = link(1, name=OTHER, incarnation=5)
    yield "subscribed_refused_to_other", up + others + give(0, requests("o1", **s5)) + give(
        1, requests("o1", **s4)) + send_own(64, O1) + take(0) + give(0, cancel(1)) + take(1)
    yield "subscribed_from_step", up + send_own(64, O1) + send_own(64, O1, 1) + send_own(64, O1, 2) + give(
        0, requests("o1", step=1, **s4)) + give(0, requests("o1", first=2, step=2, **s4)) + take(0) * 2
    yield "subscribed_waits_from_step", up + give(0, requests("o1", step=2, **s4)) + send_own(64, O1) + send_own(
        64, O1, 3) + take(0)
    yield "subscribed_published_too_old", up + publish_own(64, 0, 1) + give(
        0, requests("p0", step=3, **s4)) + publish_own(64, 0, 2) + publish_own(64, 0, 3) + take(0)
    yield "subscribed_offered_before_refused", up + send_own(64, O1, 2) + give(0, requests("o1", **s5)) + take(
        0) + give(0, cancel(1)) + send_own(64, O1, 3) + send_own(64, O1, 1) + give(
            0, requests(*["o1"] * 3, first=7, **s4)) + take(0) * 3
    yield "subscribed_published_to_two", up + others + give(0, requests("p0", "p0", **s4)) + give(
        1, requests("p0", **s4)) + publish_own(64, 0) + take(0) + take(1)
    yield "reserved_asked_with_other_step", up + send_own(64, O1) + give(0, requests("o1")) + take(0) * 2 + drop(
        0) + link() + give(0, requests("o1", step=1)) + take(0)
    two = send_own(64, O1) + send_own(64, O2)
    yield "restarted_while_others_wait", up + others + two + give(0, requests("o1", "o2")) + take(0) * 2 + give(
        1, requests("o1", "o2")) + link(2, incarnation=78) + take(1) * 2
    yield "indexed_steps", up + b"".join(send_own(64, O1, step) for step in range(4)) + give(
        0, requests("o1", first=9, step=9)) + give(0, packed_texts("o1", "o1", flags=1)) + take(0) * 2 + give(
            0, cancel(9)) + end_step(0) + end_step(1)


def seeds_of_steps():
    """More than a quota of values."""
    up = b"\0" + link()
    many, few = up + b"".join(reserve_many(520)), b"".join(reserve_many(511))
    yield "step_ended_and_aborted_with_many", many + end_step(0) + abort_step(0)
    yield "restarted_with_many_reserved", many + link(1, incarnation=78)
    subscribed = give(0, requests("missing", first=999, subscription=4))
    yield "restarted_with_many_and_subscription", up + few + subscribed + link(1, incarnation=78)
    yield "many_reservations_expire", many + drop(0) + TIME_IS_UP * 2
    received = b"".join(receive_own(0) for _ in range(1100))
    yield "many_received_when_closed", b"\1" + link() + received + take(0)


def seeds_of_walks():
    published = b"".join(publish_own(0, key) for key in range(8))
    pushes = [ask(PUBLISH, first(f"k{i}", 0), 1) for i in range(25)]
    pushed = b"".join(pushes)
    listing = call(LIST) + give(0, pb.ListRequest()) + half_close(0)
    withdrawing = call(WITHDRAW) + give(0, pb.WithdrawRequest(pattern="*")) + half_close(0)
    yield "list_withdrawn_amid", SLOW_CLOCK + pushed + published + listing + withdraw_own(7) + take(0) * 3
    few = SLOW_CLOCK + b"".join(pushes[:23]) + published
    yield "withdraw_published_again_amid", few + withdrawing + publish_own(0, 0) + take(0) * 3
    yield "withdraw_withdrawn_and_sent_amid", few + send_own(0, 6) + withdrawing + withdraw_own(6) + take(0) * 3
    yield "withdraw_twice_at_once", few + b"".join(
        call(WITHDRAW) + give(i, pb.WithdrawRequest(pattern="*")) for i in range(2)) + half_close(0) + half_close(
            1) + take(0) * 5 + take(1) * 3
    yield "list_client_gone_amid", SLOW_CLOCK + pushed + published + listing + drop(0)


def seeds_of_peers():
    one_way = link(name="", is_one_way=True)
    yield "client_evicted", b"\0" + one_way + link(1) + take(0) + end(0)
    host = {"host": b"h" * 16, "host_name": "h", "process_id": 7}
    # The digest of the cluster in the target's CONFIG, which a worker logs when a peer has another.
    yield "link_same_cluster", b"\0" + link(cluster_digest=463359488999589207)
    yield "rivals_with_hosts", b"\0" + b"".join(
        link(1 - i % 2 if i else 0, incarnation=77 + i % 2, **host) + end(i % 2) for i in range(6))
    dialled = receive_own(0) + take(0) + call(EXCHANGE) + give(1, hello()) + take(1) + give(
        0, hello(expected_name="")) + take(0) * 2 + take(1)
    offer, _, refusal = offers("local")
    yield "connection_offered_on_drained_link", b"\2" + dialled + give(1, pb.Frame(connections=[offer]))
    refusal.attempt = 0
    yield "connection_all_refused", b"\2" + link() + give(0, pb.Frame(connections=[refusal]))


def seeds_of_calls():
    full = publish_large("k") + publish_own(16320, 1) + publish_own(6272, 2) + publish_own(64, 0)
    held = b"".join(received(slot, key) for slot, key in enumerate(("k", "k", "p1", "p1", "p2", "p0", "p1")))
    # What waits for 64 bytes finds a larger value when it is retried, and what is behind it waits on.
    yield "receive_hold_retried", b"\0" + full + held + publish_own(16320, 0) + drop(4) + drop(0) + take(5) * 5
    yield "list_open_sets", b"\0" + publish_own(0, 0) + ask(LIST, pb.ListRequest(pattern="[["))
    yield "publish_annotations_later", b"\0" + call(PUBLISH) + give(0, first("k", 8)) + give(
        0, pb.PublishRequest(annotations=pb.Annotations(items={"a": "b"}))) + end(0)
    crowded = first("k", 8).SerializeToString() + b"\x3a\x82\x10" + b"\x0a\0" * 1025
    yield "publish_annotations_too_many", b"\0" + call(PUBLISH) + give(0, crowded) + end(0)
    shapes = ((pb.F64, [1 << 62], 8), (pb.U8, [1 << 62, 2], 1), (pb.U8, [1 << 60], 1 << 60),
              (pb.STRING, [1 << 62, 4], 8), (pb.STRING, [1 << 61], 8), (pb.STRING, [1], 1 << 63), (pb.STRING, [2], 15))
    yield "publish_shapes_beyond", b"\0" + b"".join(
        ask(PUBLISH, pb.PublishRequest(key="k", meta_data=pb.MetaData(dtype=dtype, dims=dims, size_bytes=size)), 0)
        for dtype, dims, size in shapes)
    long = "n" * 513
    yield "texts_too_long", b"\0" + ask(CHECK, health_pb2.HealthCheckRequest(service=long), 0) + ask(
        LIST, pb.ListRequest(pattern="*" * 1025), 0) + call(REFLECT) + give(0, question(
            file_containing_symbol=long)) + end(0) + call(REFLECT) + give(0, b"\x0a\x81\4" + long.encode()) + end(0)
    asked = [question(file_containing_symbol=f"tensorlane.v1.{name}") for name in ("XType", "ConnectionMessage.Xind")]
    asked += [question(all_extension_numbers_of_type=f"tensorlane.v1.{name}") for name in (
        "Annotations.ItemsEntry", "ConnectionMessage.Kind", "DType")]
    yield "reflection_near_misses", b"\0" + call(REFLECT) + b"".join(give(0, message) + take(0) for message in asked)


def seeds_of_parts():
    linked = link(serves_parts=True)
    for name, dtype, dims, size, part in (("dead", pb.INVALID, [], 0, "r0+1"),
                                          ("bytes_of_strings", pb.STRING, [1], 8, "b0+1"),
                                          ("within_bytes", pb.U4, [4, 3], 6, "b0+2,0+2"),
                                          ("start_overflows", pb.U8, [8], 8, "bffffffffffffffff+2")):
        message = pb.PublishRequest(key="k", data=bytes(size), meta_data=pb.MetaData(
            dtype=dtype, dims=dims, size_bytes=size, is_dead=dtype == pb.INVALID))
        yield f"part_{name}", b"\0" + ask(PUBLISH, message, 1) + linked + give(
            0, requests(f"tensorlane.part/{part}/k")) + take(0)
    scattered = requests("tensorlane.part/r0+800,1000+800/p0")
    yield "part_no_space", b"\0" + publish_large("k") + publish_own(16320, 0) + linked + give(0, scattered) + take(0)
    yield "part_ranges_of_nothing", b"\0" + publish_own(64, 0) + linked + give(
        0, requests("tensorlane.part/r0+0,1+0/p0")) + take(0)


def seeds_of_frames():
    packed = {"reads_packed": True, "kept_keys": 2}
    yield "packed_chunks_cut", b"\0" + b"".join(
        link(**packed) + give(0, pb.Frame(packed_chunks=record)) + drop(0)
        for record in (b"\2\2\1", b"\2\2\1\x0a", b"\x80"))
    # Flags, number, length, offset, publication, step, dtype, rank, one dim, size and a checksum.
    chunks = b"\x13\2\1\1\2\2\1\1\1\1" + bytes(8)
    # Flags, number, length of the key and the key, step, subscription, publication and offset.
    asked = b"\x95\1\2\1f\2\2" + bytes(8) + b"\1"
    for name, field, record in (("chunks", "packed_chunks", chunks), ("requests", "packed_requests", asked)):
        for kind, end_of in (("within", b""), ("in_long_number", b"\x80")):
            yield f"packed_{name}_cut_{kind}", b"\0" + b"".join(
                link(**packed) + give(0, pb.Frame(**{field: record[:count] + end_of})) + drop(0)
                for count in range(1, len(record)))
    yield "requests_then_chunks", b"\0" + link(**packed) + give(0, packed_same("p0", 300, packed_chunks=b"\0\2\0"))
    yield "requests_plain_too_many", b"\0" + link() + give(0, b"\x12\0" * 1025) + end(0)
    yield "answers_busy", (b"\0" + publish_own(0, 0) + link(**packed) + give(0, requests("p0", "w", first=2000)) +
                           give(0, packed_same("p0", 1024)) + take(0) * 6 + drop(0))
    crowd = b"".join(link(slot, name="", incarnation=100 + slot) for slot in range(4))
    yield "values_beyond_worker", (b"\0" + publish_large("k") + publish_own(6400, 0) + publish_own(5632, 2) + crowd +
                                   b"".join(give(slot, requests("k")) for slot in range(3)) +
                                   give(3, requests("p0", "p2")) + take(0) + take(3) * 4)
    skipped = bytes([4, 0, 0x60, 0] + [200, 0, 255, 0, 0] * 2)
    yield "window_reported", b"\0" + link() + skipped * 516 + take(0)
    yield "connections_waiting", b"\0" + link() + give(
        0, pb.Frame(connections=list(offers("verbs"))[:1] * 20)) + take(0)
    yield "arena_full", b"\0" + call(EXCHANGE) + give(0, b"\x0a\6\x32\4\1\1\1\1" * 560) + end(0)
    resumed = [pb.Request(number=n, key="p0", publication=number + 1 & MAX_U64, resume_offset=64, wants_checksum=True)
               for n, number in enumerate(RANDOM, 1)]
    beyond = [pb.Request(number=100 + n, key="p0", publication=number + 1 & MAX_U64, resume_offset=1000)
              for n, number in enumerate(RANDOM, 1)]
    yield "resumed_checksum", b"\0" + publish_own(640, 0) + link() + give(
        0, pb.Frame(requests=resumed)) + take(0) * 2 + give(0, pb.Frame(requests=beyond)) + take(0) * 2
    colliding = [pb.Request(number=number, key="p0") for number in (1, *map(collide, RANDOM))]
    yield "requests_of_one_hash", b"\0" + publish_own(640, 0) + link() + give(0, pb.Frame(requests=colliding)) + take(0)


def seeds_of_fetches():
    fetch = b"\0" + link() + receive_own() + take(0)
    yield "fetch_past_caches", fetch + give(0, chunk(1, pattern(200), 1 << 23)) + give(
        0, chunk(1, pattern(100), offset=200))
    yield "fetch_too_large", fetch + give(0, chunk(1, pattern(8), 1 << 60)) + take(0)
    yield "fetch_failed_at_length", fetch + give(0, failure(1, 10, "why " * 500)) + receive_own() + take(0) + give(
        0, failure(2, 10, "x" + "ä" * 900))
    for name, flags in (("right", 0x28), ("wrong", 0x68)):
        yield f"fetch_checksum_{name}", b"\0" + link() + receive_own(flags=2) + take(0) + bytes(
            [4, 0, 0x20, 0, 1, 0, 32, flags, 32]) + take(0)
    linked = b"\0" + receive_own() + take(0) + give(0, hello(expected_name="")) + take(0)
    again = drop(0) + TIME_PASSES + take(0) + give(0, hello(expected_name="")) + take(0)
    half = pattern(64)
    begun = linked + give(0, described(1, pb.U8, [2, 64], 128, half)) + again
    for name, dtype, dims, size, offset in (("offset", pb.U8, [2, 64], 128, 32), ("dtype", pb.I8, [2, 64], 128, 64),
                                            ("size", pb.U8, [2, 65], 130, 64), ("rank", pb.U8, [128], 128, 64),
                                            ("dims", pb.U8, [64, 2], 128, 64), ("whole", pb.U8, [128], 128, 0)):
        yield f"fetch_resumed_other_{name}", begun + give(0, described(1, dtype, dims, size, half, offset=offset))
    asking = b"\0" + receive_own() + take(0) + give(0, hello(expected_name="", reads_packed=True, kept_keys=2))
    yield "one_shots_confirmed", (asking + receive_own() * 59 + take(0) * 2 + give(0, one_shots(1, 40)) + take(0) +
                                  receive_own() * 10 + take(0) * 2 + give(0, one_shots(41, 30)) + take(0))
    yield "goodbye_before_acknowledged", linked[:-2] + give(0, chunk(1, half, 64, is_one_shot=True)) + give(
        0, pb.Frame(goodbye=True)) + take(0) * 3


def seeds_of_exact_quotas():
    """The values of a step are as many as the quota allows, so that the receiver that waits has its end later."""
    many = b"\0" + link() + b"".join(reserve_many(QUOTA)) + give(0, requests("missing", first=999))
    yield "step_ended_with_quota_and_waiter", many + end_step(0)
    yield "step_aborted_with_quota_and_waiter", many + abort_step(0)
    yield "failures_beyond_quota", b"\0" + link() + give(0, pb.Frame(failures=[pb.Failure()] * (QUOTA + 1)))


def seeds_of_answers():
    # A thousand answers that wait keep a link busy, unless a failure is among them or they are large.
    packed = link(reads_packed=True, kept_keys=2)
    for name, size, others in (("failure", 0, give(0, requests("tensorlane.part/x/p0", first=3000))),
                               ("many_bytes", 640, b"")):
        yield f"answers_busy_with_{name}", b"\0" + publish_own(size, 0) + packed + give(
            0, requests("p0", "w", first=2000)) + others + give(0, packed_same("p0", 1024))
    # The value that is given back is on its way to the second request when that is cancelled too.
    frame = pb.Frame(cancels=[1, 2], requests=requests("w", first=3).requests)
    yield "cancelled_and_other_asked", b"\0" + link() + send_own(64, 3) + give(0, requests("o1", "o1")) + give(0, frame)
    # The checksum of what the peer has already is made of more bytes than are hashed for one frame.
    resumed = [pb.Request(number=n, key="k", publication=RANDOM[6] + 1 & MAX_U64, resume_offset=LARGE,
                          wants_checksum=True) for n in range(1, 95)]
    yield "resumed_hashes_over_budget", b"\0" + publish_large("k") + link() + give(
        0, pb.Frame(requests=resumed)) + take(0) * 2
    yield "fetch_failed_within_wide_character", b"\0" + link() + receive_own() + take(0) + give(
        0, failure(1, 10, "\U0001f600" * 256))


def seeds_of_half_bytes():
    for name, dims, size, part in (("row", [4, 3], 6, "b2+1,0+2"), ("rows", [2, 3, 3], 9, "b0+2,0+2,0+2"),
                                   ("whole", [3], 2, "b0+3")):
        message = pb.PublishRequest(key="k", data=bytes(size), meta_data=pb.MetaData(
            dtype=pb.U4, dims=dims, size_bytes=size))
        yield f"part_half_bytes_{name}", b"\0" + ask(PUBLISH, message, 1) + ask(
            RECEIVE, pb.ReceiveRequest(key=f"tensorlane.part/{part}/k"))


def seeds_of_repeated_shapes():
    """Shapes that a later piece repeats, and characters of four bytes."""
    fetch = b"\0" + link() + receive_own() + take(0)
    for name, dims, size, begun in (("scalar", [], 1, 0), ("matrix", [2, 4], 8, 4)):
        meta_data = pb.MetaData(dtype=pb.U8, dims=dims, size_bytes=size)
        pieces = ((0, begun), (begun, size - begun))
        yield f"fetch_repeats_shape_of_{name}", fetch + b"".join(give(0, pb.Frame(chunks=[pb.Chunk(
            number=1, offset=offset, len_bytes=count, publication=5, meta_data=meta_data)], data=pattern(size)[
                offset:offset + count])) for offset, count in pieces)
    yield "list_pattern_wide_character", b"\0" + ask(LIST, pb.ListRequest(pattern="\U0001f600"))
