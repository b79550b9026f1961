# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow peer: a variable of /job:ps/task:0 is fetched by /job:worker/task:0, over TensorFlow's gRPC server.

    tensorflow_peer.py serve PS_PORT WORKER_PORT      the parameter server; prints "ready"
    tensorflow_peer.py fetch PS_PORT WORKER_PORT [SIZES]
                                                      the worker; prints "ready TensorFlow VERSION", then answers
                                                      "fetch BYTES COUNT" with the seconds that COUNT fetches took, and
                                                      "fetch_each 0 COUNT" with those of COUNT fetches of as many
                                                      variables as the file SIZES has lines, each with its bytes

What is run is an identity operation on the worker, which ends when the value is there: nothing is handed to Python.
Both end when their standard input does.
"""
import os
import sys
import time

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="2", TF_ENABLE_ONEDNN_OPTS="0")
import tensorflow  # noqa: E402

tf = tensorflow.compat.v1


class Fetcher:
    def __init__(self, server):
        self.session = tf.Session(server.target)
        self.callables = {}

    def prepare(self, size_bytes):
        with tf.device("/job:ps/task:0"):
            variable = tf.get_variable(f"v{size_bytes}", initializer=tf.ones([size_bytes], tf.uint8), dtype=tf.uint8,
                                       use_resource=True)
            value = variable.read_value()
        with tf.device("/job:worker/task:0"):
            fetched = tf.identity(value).op
        self.session.run(variable.initializer)
        self.callables[size_bytes] = self.session.make_callable(fetched)

    def prepare_each(self, sizes):
        with tf.device("/job:ps/task:0"):
            variables = [tf.get_variable(f"each{i}", initializer=tf.ones([size], tf.uint8), dtype=tf.uint8,
                                         use_resource=True) for i, size in enumerate(sizes)]
            values = [variable.read_value() for variable in variables]
        with tf.device("/job:worker/task:0"):
            fetched = [tf.identity(value).op for value in values]
        self.session.run([variable.initializer for variable in variables])
        self.callables["each"] = self.session.make_callable(tf.group(*fetched))

    def fetch(self, what, count):
        """what: the bytes of a variable, or "each"."""
        if what not in self.callables:
            self.prepare(what)
        run = self.callables[what]
        start = time.monotonic()
        for _ in range(count):
            run()
        return time.monotonic() - start


def main():
    role, ps_port, worker_port, *files = sys.argv[1:]
    tf.disable_eager_execution()
    cluster = tf.train.ClusterSpec({"ps": [f"127.0.0.1:{ps_port}"], "worker": [f"127.0.0.1:{worker_port}"]})
    server = tf.distribute.Server(cluster, job_name="ps" if role == "serve" else "worker", task_index=0)
    if role == "serve":
        print("ready", flush=True)
        sys.stdin.read()
        os._exit(0)  # a server of TensorFlow cannot be stopped
    fetcher = Fetcher(server)
    if files:
        fetcher.prepare_each([int(line) for line in open(files[0], encoding="utf-8")])
    else:
        fetcher.prepare(4096)
    print("ready TensorFlow", tensorflow.__version__, flush=True)
    for line in sys.stdin:
        command, size_bytes, count = line.split()
        what = "each" if command == "fetch_each" else int(size_bytes)
        print(f"{fetcher.fetch(what, int(count)):.9f}", flush=True)
    os._exit(0)


main()
