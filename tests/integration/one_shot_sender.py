# SPDX-License-Identifier: Apache-2.0
"""one_shot_sender.py LIBRARY CONFIG KEY STEP TEXT: opens /job:ps/task:0 with libtensorlane, sends one tensor of U8
whose elements are the text, prints "sent" once its receiver has acknowledged it, and closes the worker."""
import ctypes
import sys

U8 = 2
TIMEOUT_NS = 60 * 10**9


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("message", ctypes.c_char * 1024)]


class WorkerOptions(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t), ("config_path", ctypes.c_char_p), ("config_json", ctypes.c_char_p),
                ("job", ctypes.c_char_p), ("task", ctypes.c_uint32), ("is_client", ctypes.c_bool),
                ("progress", ctypes.c_int)]


def main():
    library, config, key, step, text = sys.argv[1:]
    tensorlane = ctypes.CDLL(library)
    tensorlane.tl_tensor_data.restype = ctypes.c_void_p
    error, worker, tensor = Error(), ctypes.c_void_p(), ctypes.c_void_p()

    def must(status):
        if status:
            sys.exit(f"status {status}: {error.message.decode()}")

    options = WorkerOptions(size_bytes=ctypes.sizeof(WorkerOptions), config_path=config.encode(), job=b"ps")
    must(tensorlane.tl_worker_open(ctypes.byref(options), ctypes.byref(worker), ctypes.byref(error)))
    dims = (ctypes.c_uint64 * 1)(len(text))
    must(tensorlane.tl_tensor_create(U8, 1, dims, ctypes.byref(tensor), ctypes.byref(error)))
    ctypes.memmove(tensorlane.tl_tensor_data(tensor), text.encode(), len(text))
    print("sending", flush=True)
    must(tensorlane.tl_send_wait(worker, key.encode(), ctypes.c_uint64(int(step)), tensor, ctypes.c_int64(TIMEOUT_NS),
                                 ctypes.byref(error)))
    print("sent", flush=True)
    tensorlane.tl_tensor_put(tensor)
    tensorlane.tl_worker_close(worker, ctypes.c_int64(-1))


if __name__ == "__main__":
    main()
