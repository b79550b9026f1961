#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What the logs of several workers say while they start, restart and end."""
import signal

import cli_support
from cli_support import wait_until

NAMES = ("/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1")


class Log(cli_support.Case):
    def start_all(self):
        """Starts the workers one after the other, so that each is missed before it is there. They are in self.workers,
        by name."""
        self.served = self.cluster(ps=1, worker=2, extra={"connect": "eager"})
        self.workers = {}
        for name in NAMES:
            if self.workers:
                self.workers[NAMES[0]].await_line(f'msg="peer cannot be reached" peer={name}')
            self.start(name)
        for name in NAMES:
            for other in set(NAMES) - {name}:
                self.workers[name].await_line(f'msg="data connection up" peer={other} ')

    def start(self, name):
        job, task = name.removeprefix("/job:").split("/task:")
        self.workers[name] = self.served.start(job, int(task))

    def warnings(self):
        return [line for worker in self.workers.values() for line in worker.lines
                if "level=warn" in line or "level=error" in line]

    def test_a_start_and_an_orderly_end_give_no_warning(self):
        self.start_all()
        absent = self.workers[NAMES[0]].find(f'msg="peer cannot be reached" peer={NAMES[2]}')
        address = self.served.address("worker", 1)
        self.assertIn(f'reason="{address} refused the connection; is the worker started?"', absent)
        # The other workers try to reach the first one that ends.
        self.assertEqual(self.workers[NAMES[0]].stop(), 0)
        for name in NAMES[1:]:
            self.workers[name].await_line(f'msg="peer has closed its connection" peer={NAMES[0]}')
            self.workers[name].await_line(f'msg="peer cannot be reached" peer={NAMES[0]}')
        for name in NAMES[1:]:
            self.assertEqual(self.workers[name].stop(), 0)
        self.assertEqual([], self.warnings())

    def test_a_data_path_that_comes_back_is_logged_on_both_sides(self):
        self.start_all()
        self.workers[NAMES[1]].stop(signal.SIGKILL)
        for name in (NAMES[0], NAMES[2]):
            lost = self.workers[name].await_line(f'msg="peer lost" peer={NAMES[1]}')
            self.assertIn("level=warn", lost)
        self.start(NAMES[1])
        restarted, up = (f'msg="{what}" peer={NAMES[1]} ' for what in ("peer has restarted", "data connection up"))
        for name in (NAMES[0], NAMES[2]):
            self.workers[NAMES[1]].await_line(f'msg="data connection up" peer={name} ')
            # Two workers that have opened links to each other log a data connection over each of them, so that the
            # number of lines is open.
            worker = self.workers[name]
            wait_until(lambda: up in worker.output.partition(restarted)[2], f"{up}after {restarted}in {name}",
                       lambda: worker.output)
        texts = "\n".join(worker.output for worker in self.workers.values())
        for text in ("last error", "UNKNOWN", "Socket closed", "remote host"):
            self.assertNotIn(text, texts)


if __name__ == "__main__":
    cli_support.main()
