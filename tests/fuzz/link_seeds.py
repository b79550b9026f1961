# SPDX-License-Identifier: Apache-2.0
"""Seeds of the fuzz target link that reach what those of make_seeds.py do not: quotas that run out, messages beyond
what is allowed, and orders of messages."""
from make_seeds import (ANSWER, BREAK, CLOSE, END, FETCH, QUOTA, TAKE, THEIRS, TIMERS, UP, chunk, collide, described,
                        failure, frame, hello, packed_same, pattern, pb, requests, splitmix, varint)

FULL = [9] * QUOTA  # cancels of nothing that use up the quota


def held(command):
    """The command without the round of the loop behind it."""
    return bytes([command[0] | 0x80]) + command[1:]


def packed_more(first, count):
    """Packed requests for the key that has the number 0."""
    return pb.Frame(packed_requests=b"\0" + varint(2 * first) + b"\0" + b"\0\2\0" * (count - 1))


def link_seeds():
    yield from seeds_of_quotas()
    yield from seeds_of_serves()
    yield from seeds_of_fetches()


def seeds_of_quotas():
    full = pb.Frame(cancels=FULL)
    yield "quota_before_asking_again", UP + frame(requests("p2", "p2")) + TAKE * 3 + held(frame(full)) + TAKE * 6
    yield "quota_before_break", UP + FETCH + b"\0" + TAKE + held(frame(full)) + BREAK + b"\0"
    waits = pb.Frame(cancels=FULL, packed_requests=b"\1\2\1w")
    yield "quota_frame_held_and_broken", UP + held(frame(waits)) + BREAK + b"\0"
    yield "quota_frame_held_and_closed", UP + held(frame(waits)) + CLOSE + END
    yield "quota_plain_requests", UP + frame(pb.Frame(cancels=FULL[1:], requests=requests("w", "w").requests)) + TAKE
    unknown = [pb.Failure()] * QUOTA
    yield "quota_failures", UP + FETCH + b"\0" + TAKE + frame(pb.Frame(
        cancels=FULL[:9], failures=unknown + [pb.Failure(number=1)])) + TAKE
    yield "requests_plain_too_many", UP + frame(b"\x12\0" * 1025) + END
    yield "serves_broken_in_rounds", (THEIRS + frame(hello()) + frame(packed_same("f", 1024)) + TIMERS +
                                      frame(packed_more(1025, 1)) + BREAK + b"\0")


def seeds_of_serves():
    one_shots = frame(requests(*["o2"] * 14))
    yield "serve_beyond_worker", UP + one_shots + frame(requests("p1", first=20, priority=3)) + TAKE * 2
    yield "serve_asked_again_waits", (UP + frame(requests("p2", "w")) + ANSWER + b"\2" + frame(pb.Frame(cancels=[1])) +
                                      TAKE)
    ends = requests(*["p2"] * 17, publication=3, resume_offset=4999)
    yield "serve_many_slices", UP + frame(ends) + TAKE
    numbers = [1, *map(collide, splitmix(16))]  # a link takes number 1, or a later one in the first input of a process
    yield "serve_one_hash", UP + frame(pb.Frame(requests=[pb.Request(number=n, key="w") for n in numbers])) + frame(
        pb.Frame(cancels=numbers))


def seeds_of_fetches():
    shapes = ((pb.F64, [1 << 62], 8), (pb.STRING, [1 << 62, 4], 8), (pb.STRING, [1 << 61], 8),
              (pb.STRING, [1], 1 << 63), (pb.U8, [1 << 60], 1 << 60))
    yield "fetch_shapes_beyond", UP + (FETCH + b"\0") * len(shapes) + TAKE + b"".join(
        frame(described(number, *shape)) for number, shape in enumerate(shapes, 1)) + TAKE
    fetch = UP + FETCH + b"\0" + TAKE
    yield "fetch_begun_other_dims", fetch + frame(described(1, pb.U8, [2, 64], 128, pattern(64))) + frame(
        described(1, pb.U8, [64, 2], 128, pattern(128)))
    yield "fetch_failed_at_length", fetch + frame(failure(1, 10, "ä" * 513))
    yield "fetch_long_runs", fetch + frame(chunk(1, pattern(4200), 4200))
    yield "hello_arena_full", THEIRS + frame(b"\x0a\6\x32\4\1\1\1\1" * 540) + END
    skipped = bytes([1, 0x60, 0] + [200, 0, 255, 0, 0] * 2)
    yield "window_reported", UP + skipped * 515 + TAKE
