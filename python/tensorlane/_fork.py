# SPDX-License-Identifier: Apache-2.0
"""Event loops in a forked child, where nothing completes: what waits in one fails as soon as the child runs the loop.

What os.register_at_fork has once stays for ever. It refers to nothing of the package, which may go.
"""
import os
import weakref

inboxes = weakref.WeakSet()


def _drain_all():
    for inbox in list(inboxes):
        if not inbox.loop.is_closed():
            inbox.loop.call_soon(inbox.drain)


os.register_at_fork(after_in_child=_drain_all)
