# SPDX-License-Identifier: Apache-2.0
"""What ./dev bench --groups measures: workloads, ways to receive them, transports, and the ratios that are wanted."""
import dataclasses

from commits import ROOT

MEASURES = {"seconds": "time, us", "cpu": "processor time, us", "messages": "messages"}
# Ways to receive: single receives with the library of another commit, with this tree's, and in groups.
VARIANTS = {"before": "single", "single": "single", "group": "many"}
PROGRESS = ("thread", "caller")
ADDRESS = "127.0.0.1"
TRANSPORTS = {"grpc": {"protocol": "grpc"}, "local": {"protocol": "grpc+local"}}
# In the virtual machine.
GUEST_ADDRESS = "10.10.0.1"
# Soft-RoCE in an emulated machine answers late while its processors are busy. That is no reason to send anything twice,
# which costs windows their connection, nor to take the peer for dead.
PATIENCE = {"timeout": 18, "peer_timeout": "20s"}
GUEST_TRANSPORTS = {"verbs": {"protocol": "grpc+verbs", "verbs": {"keys": "region", **PATIENCE}},
                    "verbs, windows": {"protocol": "grpc+verbs", "verbs": {"keys": "window", **PATIENCE}}}
WORKER_COUNT = 5  # of Wide & Deep


@dataclasses.dataclass(frozen=True)
class Row:
    """command: of tl_groups, without its count. targets: measure -> transport -> how many times less groups shall take
    than single receives with the library before. in_guest: measured in the virtual machine also when nobody asks for
    this row, which takes minutes there."""
    title: str
    set: str
    command: str
    variants: tuple = tuple(VARIANTS)
    measures: tuple = tuple(MEASURES)
    targets: dict = dataclasses.field(default_factory=dict, hash=False)
    in_guest: bool = False


def for_data_planes(grpc, others):
    return {"grpc": grpc, "local": others, **dict.fromkeys(GUEST_TRANSPORTS, others)}


SMALL_TARGETS = {"seconds": {**for_data_planes(2.0, 2.0), "verbs, windows": 3.0}, "cpu": {"grpc": 2.0, "local": 2.0},
                 "messages": for_data_planes(1.0, 20.0)}
LARGE_TARGETS = {"seconds": {**for_data_planes(1.25, 1.05), "local": 1.5}, "messages": for_data_planes(1.0, 4.0)}
GRPC_TARGETS = {"messages": {"grpc": 1.0}}


def model_rows(title, targets):
    for source in ("published", "sent"):
        for memory, where in (("library", "library memory"), ("views", "views of one buffer")):
            yield Row(f"{title} {source}, {where}", "fetch", f"{title} {source} {memory}", targets=targets,
                      in_guest=True)


ROWS = (
    *model_rows("ctr", LARGE_TARGETS),
    *model_rows("ctr-small", SMALL_TARGETS),
    Row("wide-deep", "wide-deep", "wide-deep - -",
        targets={"seconds": {"grpc": 1.3, "local": 1.3}, **GRPC_TARGETS}),
    Row("1,000 x 4 KiB at once", "fetch", "4096 published views", targets=GRPC_TARGETS),
    Row("one of 1,000 x 4 KiB absent", "fetch", "absent published views"),
    Row("256 B, groups of 1,000", "fetch", "256 published views", targets=GRPC_TARGETS, in_guest=True),
    Row("all of 2,000 published keys", "keys-2000", "keys-2000 published views", ("single", "group")),
    Row("all of 100,000 published keys", "keys-100000", "keys-100000 published views", ("single", "group")),
    # Tokens, which make the owner publish, would count in messages and processor time.
    Row("8 B at a time, group: subscribed", "subscription", "8 - -", measures=("seconds",),
        targets={"seconds": {"local": 1 / 0.65}}, in_guest=True),
    Row("4 KiB at a time, group: subscribed", "subscription", "4096 - -", measures=("seconds",),
        targets={"seconds": {"grpc": 1 / 0.65}}),
)
BY_TITLE = {row.title: row for row in ROWS}


def has_groups():
    """Whether the public interface of this tree has groups."""
    return "tl_recv_many(" in (ROOT / "include" / "tensorlane" / "worker.h").read_text()


def measurable():
    """The rows, in the ways that the library of this tree has."""
    for row in ROWS:
        is_whole = has_groups() or row.set == "subscription"
        yield row if is_whole else dataclasses.replace(
            row, variants=tuple(variant for variant in row.variants if variant != "group"))


# A row's time beside another one's, both of this tree, and the smallest ratio that is wanted of other / row.
BESIDE = (
    ("one of 1,000 x 4 KiB absent", "1,000 x 4 KiB at once", 1 / 1.1),
    ("all of 100,000 published keys", "all of 2,000 published keys", 1 / 1.5),
)
# Local is nowhere slower than gRPC.
LOCAL_TARGET = 1.0
