# SPDX-License-Identifier: Apache-2.0
"""What waits in a forked child, where nothing completes. In an event loop it fails as soon as the child runs the loop.
Futures of calls that a thread of the parent makes fail at once.

What os.register_at_fork has once stays for ever. It refers to nothing of the package, which may go.
"""
import os
import threading
import weakref

inboxes = weakref.WeakSet()
calls = weakref.WeakKeyDictionary()  # future of the module concurrent -> the error that it has in a child


def _drain_all():
    for inbox in list(inboxes):
        if not inbox.loop.is_closed():
            inbox.loop.call_soon(inbox.drain)


def _fail_calls():
    for future, error in list(calls.items()):
        # Another thread of the parent may have had its lock.
        future._condition = threading.Condition()
        if not future.done():
            future.set_exception(error)


os.register_at_fork(after_in_child=_drain_all)
os.register_at_fork(after_in_child=_fail_calls)
