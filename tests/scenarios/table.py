# SPDX-License-Identifier: Apache-2.0
"""The table of scenarios: over which transports each one runs, and the reason where it does not."""
import collections
import unittest

import choice
import defects
import exchange
import memory
import peers

YES = ""
Row = collections.namedtuple("Row", "scenario grpc local verbs gdr")

TABLE = (
    Row(exchange.Pull, YES, YES, YES, YES),
    Row(exchange.Exchange, YES, YES, YES, YES),
    Row(exchange.DrivenExchange, YES, YES, YES, YES),
    Row(exchange.NarrowExchange, "it has none of this", YES, "unit tests have it; these settings are those of local",
        "unit tests have it; these settings are those of local"),
    Row(exchange.Cycles, YES, YES, YES, YES),
    Row(defects.Defects, YES, YES, YES, YES),
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
        "worker_memory.py has it over a slow wire"),
    Row(memory.Killed, YES, YES, "worker_hosts.py has it with whole hosts, over a slow wire",
        "worker_hosts.py has it with whole hosts"),
    Row(choice.Readers, "nothing is read", "nothing is read", "nothing is read", YES),
    Row(choice.Mixed, "all workers are such ones", YES, YES, YES),
    Row(choice.Lacking, "every worker has gRPC", YES, YES, "as over verbs: the same cards are lacking"),
)
MODULES = (exchange, defects, peers, memory, choice)


def check():
    """Checks that every scenario is in the table once."""
    found = [value for module in MODULES for value in vars(module).values()
             if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__
             and unittest.defaultTestLoader.getTestCaseNames(value)]
    listed = [row.scenario for row in TABLE]
    assert len(set(listed)) == len(listed) and set(listed) == set(found), set(listed) ^ set(found)


def over(transport):
    """Returns the scenarios of a transport, as test cases that have it."""
    check()
    return [type(row.scenario.__name__, (row.scenario,), {"transport": transport, "__doc__": row.scenario.__doc__})
            for row in TABLE if getattr(row, transport.name) == YES]
