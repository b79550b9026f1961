# SPDX-License-Identifier: Apache-2.0
"""The PyTorch peer: send and recv of torch.distributed with the gloo backend.

    gloo_peer.py send FILE      prints "ready"; sends what the receiver asks for
    gloo_peer.py recv FILE      prints "ready PyTorch VERSION", then answers "recv BYTES COUNT" with the seconds that
                                receiving COUNT tensors into one destination took; one more goes
                                ahead of them, so that the sender is at work when the time starts

Both find each other through the file, which must not exist. The sender sends one tensor after the other without being
asked for each. Both end when the receiver's standard input does.
"""
import os
import sys
import time

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch  # noqa: E402
import torch.distributed  # noqa: E402

SENDER, RECEIVER = 0, 1


def run_sender():
    print("ready", flush=True)
    order = torch.zeros(2, dtype=torch.int64)
    tensors = {}
    while True:
        torch.distributed.recv(order, RECEIVER)
        size_bytes, count = order.tolist()
        if count == 0:
            return
        if size_bytes not in tensors:
            tensors[size_bytes] = torch.randint(256, (size_bytes,), dtype=torch.uint8)
        for _ in range(count):
            torch.distributed.send(tensors[size_bytes], RECEIVER)


def run_receiver():
    print("ready PyTorch", torch.__version__, flush=True)
    for line in sys.stdin:
        _, size_bytes, count = line.split()
        destination = torch.ones(int(size_bytes), dtype=torch.uint8)
        torch.distributed.send(torch.tensor([int(size_bytes), int(count) + 1]), SENDER)
        torch.distributed.recv(destination, SENDER)
        start = time.monotonic()
        for _ in range(int(count)):
            torch.distributed.recv(destination, SENDER)
        print(f"{time.monotonic() - start:.9f}", flush=True)
    torch.distributed.send(torch.tensor([0, 0]), SENDER)


def main():
    role, path = sys.argv[1:]
    torch.distributed.init_process_group("gloo", init_method=f"file://{os.path.abspath(path)}", world_size=2,
                                         rank=SENDER if role == "send" else RECEIVER)
    run_sender() if role == "send" else run_receiver()
    os._exit(0)


main()
