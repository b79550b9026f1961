# SPDX-License-Identifier: Apache-2.0
"""The table of scenarios: over which transports each one runs, and whether with tensors on GPUs too; where it does
not, the reason."""
import collections
import unittest

import choice
import defects
import exchange
import groups
import memory
import parts
import peers
import puts
import subscriptions
import waiting
from devices import GPU, HOST

YES = ""
Row = collections.namedtuple("Row", "scenario grpc local verbs gdr gpus",
                             defaults=["what happens in it does not depend on where tensors lie"])
# The transports over which a scenario runs with tensors on GPUs, where those in the virtual machine add nothing.
ON_ANY_MACHINE = ("grpc", "local")
# The names of scenarios end so; where the owner's and the receiver's tensors lie.
PLACES = (("", HOST, HOST), ("FromGpu", GPU, HOST), ("ToGpu", HOST, GPU), ("BetweenGpus", GPU, GPU))

TABLE = (
    Row(exchange.Pull, YES, YES, YES, YES, YES),
    Row(exchange.Exchange, YES, YES, YES, YES, YES),
    Row(exchange.DrivenExchange, YES, YES, YES, YES, ON_ANY_MACHINE),
    Row(exchange.NarrowExchange, "it has none of this", YES, "unit tests have it; these settings are those of local",
        "unit tests have it; these settings are those of local", YES),
    Row(exchange.Cycles, YES, YES, YES, YES),
    Row(defects.Defects, YES, YES, YES, YES, YES),
    Row(defects.DefectsOfStrings, YES, YES, YES, YES, "strings always lie on the host"),
    Row(peers.Prefer, YES, YES, YES, YES),
    Row(peers.Require, "gRPC is what require forbids", YES, YES, YES),
    Row(peers.Cut, YES, YES, "worker_wire.py cuts the wire itself, in several ways",
        "worker_wire.py cuts the wire itself"),
    Row(peers.CutRequire, "gRPC is what require forbids", YES, "worker_wire.py cuts the wire itself, in several ways",
        "worker_wire.py cuts the wire itself"),
    Row(peers.CutLinks, YES, YES, YES, "as over verbs: the links are the same"),
    Row(peers.Scarce, "there is nothing else to fall back on", YES, "a card's connection needs no descriptor",
        "a card's connection needs no descriptor"),
    Row(peers.Frozen, "keep-alive alone finds a frozen peer, after half a minute; Prefer has it sooner", YES, YES, YES),
    Row(peers.Idle, YES, YES, YES, "as over verbs: nothing is received"),
    Row(memory.Cancelled, YES, YES, "worker_memory.py has it over a slow wire, and looks at what is posted",
        "worker_memory.py has it over a slow wire", YES),
    Row(memory.Killed, YES, YES, "worker_hosts.py has it with whole hosts, over a slow wire",
        "worker_hosts.py has it with whole hosts", YES),
    Row(waiting.Waiting, YES, YES, YES, YES, "unit tests have it; where the destination lies makes no difference"),
    Row(waiting.WaitingPrefer, "as with require: there is nothing to prefer", YES, YES, YES,
        "unit tests have it; where the destination lies makes no difference"),
    Row(groups.Groups, YES, YES, YES, YES, YES),
    Row(groups.GroupsRestart, YES, YES, YES, YES),
    Row(subscriptions.Subscriptions, YES, YES, YES, YES),
    Row(parts.Parts, YES, YES, YES, YES, ON_ANY_MACHINE),
    Row(puts.Puts, YES, YES, YES, YES, "what is put lies on the host"),
    Row(choice.Readers, "nothing is read", "nothing is read", "nothing is read", YES),
    Row(choice.Mixed, "all workers are such ones", YES, YES, YES),
    Row(choice.Lacking, "every worker has gRPC", YES, YES, "as over verbs: the same cards are lacking"),
)
MODULES = (exchange, defects, peers, memory, choice, waiting, groups, parts, puts, subscriptions)


def check():
    """Checks that every scenario is in the table once."""
    found = [value for module in MODULES for value in vars(module).values()
             if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__
             and unittest.defaultTestLoader.getTestCaseNames(value)]
    listed = [row.scenario for row in TABLE]
    assert len(set(listed)) == len(listed) and set(listed) == set(found), set(listed) ^ set(found)


def runs_on_gpus(row, transport):
    if transport.name == "tls":
        return False  # the bytes are those of grpc on their way through gRPC
    return row.gpus == YES or (row.gpus == ON_ANY_MACHINE and transport.name in ON_ANY_MACHINE)


def over(transport):
    """Returns the scenarios of a transport, as test cases that have it."""
    check()
    return [type(row.scenario.__name__ + end, (row.scenario,), {"transport": transport, "owner": owner,
                                                                "receiver": receiver, "__doc__": row.scenario.__doc__})
            for row in TABLE if getattr(row, transport.column) == YES
            for end, owner, receiver in (PLACES if runs_on_gpus(row, transport) else PLACES[:1])]
