# SPDX-License-Identifier: Apache-2.0
"""A secondary tier for vLLM's offloading, at the owner of tensorlane.kv. Alpha, as vLLM's interface is.

    "secondary_tiers": [{"type": "Tier", "module_path": "tensorlane.vllm", "address": "10.0.0.1:4700"}]

docs/kv.md is the page.
"""
import collections
import logging
import threading
import time
import typing
from collections.abc import Iterable

from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from . import kv

__all__ = ["Tier"]

# vLLM shows what its own loggers say.
_logger = logging.getLogger("vllm.tensorlane")


class _Lookups(AsyncLookupManager):
    def __init__(self, tier, tier_type):
        self._tier = tier
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys, req_context):
        return self._tier.client.exists(self._tier._names(keys))


class Tier(SecondaryTierManager):
    """vLLM's scheduler submits jobs, and asks which have ended; the client's own thread does them.

    address, timeout, host: as kv.Client. prefix: tells caches of different models, layouts and ranks apart, which are
    not in vLLM's keys. The others are what vLLM gives: primary_kv_view is host memory in which chunks of
    block_size_bytes lie one behind the other. What cannot be stored or loaded is a job without success, not an error;
    calls raise only what kv.Client.submit raises.
    """
    medium = Medium.CPU

    def __init__(self, offloading_spec: typing.Any, primary_kv_view: memoryview, tier_type: str, address: str,
                 timeout: float = 5, host: typing.Optional[str] = None, prefix: str = "vllm",
                 backpressure_detector: typing.Any = None) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.client = kv.Client(address, timeout, host, _logger)
        self._prefix = prefix
        self._chunks = memoryview(primary_kv_view).cast("B")
        self._lookups = _Lookups(self, tier_type)
        self._running = {}
        self._finished = collections.deque()

    def _names(self, keys):
        return [f"{self._prefix}/{bytes(key).hex()}" for key in keys]

    def _memory(self, job):
        size = self.block_size_bytes
        return [self._chunks[int(chunk) * size:(int(chunk) + 1) * size] for chunk in job.chunk_ids]

    def lookup(self, key: bytes, req_context: typing.Any) -> LookupResult:
        """Returns HIT or MISS, or RETRY as long as the owner has not answered."""
        found = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: typing.Any) -> None:
        """Begins to store the chunks of a job, whose memory vLLM leaves as it is until the job has finished."""
        self._submit(job_metadata, self.client.set_async)

    def submit_load(self, job_metadata: typing.Any) -> None:
        """Begins to load the chunks of a job."""
        self._submit(job_metadata, self.client.get_async)

    def _submit(self, job, call):
        future = self.client.submit(call, self._names(job.keys), self._memory(job))
        self._running[job.job_id] = is_finished = threading.Event()
        future.add_done_callback(
            lambda future: self._finish(job, future, is_finished, time.monotonic() - job.submit_time))

    def _finish(self, job, future, is_finished, seconds):
        done = [False] * len(job.keys) if future.cancelled() or future.exception() else future.result()
        came = [key for key, is_done in zip(job.keys, done) if is_done]
        result = JobResult(job.job_id, len(came) == len(job.keys), came if job.is_promotion else None, seconds,
                           len(came) * self.block_size_bytes)
        self._finished.append((job, result))
        is_finished.set()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that have ended since the last call, with the keys that came and the seconds they took."""
        results = []
        while self._finished:
            job, result = self._finished.popleft()
            self._running.pop(job.job_id, None)
            if job.is_promotion and not result.success:
                self._lookups.mark_miss([key for key in job.keys if key not in result.successful_keys])
            results.append(result)
        return results

    def has_pending_work(self) -> bool:
        """Returns whether jobs run, or have ended and get_finished_jobs has not returned them yet."""
        return bool(self._running)

    def on_new_request(self, req_context: typing.Any) -> RequestOffloadingContext:
        """There is nothing to prepare for a request."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: typing.Any) -> None:
        """Forgets what was looked up for a request."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: typing.Any) -> None:
        """Asks the owner for all keys that were looked up in this step."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Returns when all jobs have ended. Each has a deadline, and nothing is written to its memory after that."""
        for is_finished in list(self._running.values()):
            is_finished.wait()

    def shutdown(self) -> None:
        """Ends jobs that run, without success, and closes the client."""
        self._lookups.shutdown()
        self.client.close()
        self._chunks.release()
