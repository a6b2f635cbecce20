"""A prefix of an S3 bucket as the store, through s3fs."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, cast

import s3fs
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from model_runtime.config import StoreConfig
from model_runtime.errors import ConfigError, StoreError, StoreUnavailableError
from model_runtime.s3_errors import ConditionFailedError, s3_error
from model_runtime.store import Store, check_key, visible

T = TypeVar("T")

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
# Its own generator: a trainer's checkpoint holds Python's, which must not depend on how often a store failed.
_jitter = random.Random()

# Bytes that an operation may move per second of extra time beyond operation_timeout_s, so that the limit
# of a small object does not cut off a large one.
_SLOWEST_BYTES_PER_S = 4 * 2**20

# s3fs uploads in one PUT below twice this; a multipart upload would lose atomicity of the condition on
# some stores and leave orphan parts behind a killed writer.
_SINGLE_PUT_BYTES = 2**32
_LARGEST_PUT_BYTES = 5 * 2**30  # S3's own limit for one PUT


class S3Store(Store):
    """A prefix of a bucket, through s3fs. The bucket must exist; it is never created here.

    One retry policy, ours: botocore's and s3fs's own loops are set to a single attempt, because nested
    they multiply to minutes. Requests are single GETs and PUTs, so nothing torn or partial can be seen.
    """

    def __init__(self, config: StoreConfig) -> None:
        bucket, _, prefix = config.url.removeprefix("s3://").partition("/")
        if "@" in bucket or ":" in bucket:
            raise ConfigError("store.url: credentials and ports don't belong in the URL; use the environment")
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._config = config
        self._lock = threading.Lock()
        self._connected: tuple[int, s3fs.S3FileSystem] | None = None
        super().__init__(f"s3://{bucket}/{self._prefix}".rstrip("/"), single_writer=config.single_writer)

    def put(self, key: str, data: bytes) -> None:
        check_key(key)

        async def call(fs: s3fs.S3FileSystem, _: asyncio.Timeout) -> None:
            await fs._pipe_file(self._object(key), data, chunksize=_SINGLE_PUT_BYTES)

        self._run("put", key, call, num_bytes=len(data))

    def _create(self, key: str, data: bytes) -> bool:
        if len(data) >= _LARGEST_PUT_BYTES:
            raise StoreError(f"create {self.uri(key)}: {len(data)} bytes; S3 takes at most 5 GiB at once")

        async def call(fs: s3fs.S3FileSystem, _: asyncio.Timeout) -> bool:
            try:
                await fs._pipe_file(self._object(key), data, chunksize=_SINGLE_PUT_BYTES, mode="create")
            except Exception as error:
                translated = s3_error("create", self.uri(key), error)
                if not isinstance(translated, ConditionFailedError):
                    raise
                # Some stores answer "conflict" while a writer that may still fail is at work.
                if not await self._is_there(fs, key):
                    raise StoreUnavailableError(f"{translated}; no object is there, trying again") from error
                return False
            return True

        return self._run("create", key, call, num_bytes=len(data))

    def get(self, key: str) -> bytes:
        check_key(key)

        async def call(fs: s3fs.S3FileSystem, timeout: asyncio.Timeout) -> bytes:
            answer = await fs._call_s3("get_object", Bucket=self._bucket, Key=self._prefix + key)
            extra_s = int(answer["ContentLength"]) / _SLOWEST_BYTES_PER_S
            timeout.reschedule((timeout.when() or 0) + extra_s)
            async with answer["Body"] as body:
                return await body.read()  # aiohttp raises when the body is shorter than announced

        return self._run("get", key, call)

    def exists(self, key: str) -> bool:
        check_key(key)
        return self._run("exists", key, lambda fs, _: self._is_there(fs, key))

    async def _is_there(self, fs: s3fs.S3FileSystem, key: str) -> bool:
        try:
            await fs._call_s3("head_object", Bucket=self._bucket, Key=self._prefix + key)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        async def call(fs: s3fs.S3FileSystem, _: asyncio.Timeout) -> dict[str, int]:
            pages = self._pages(fs, prefix)
            entries = [entry async for page in pages for entry in page.get("Contents", ())]
            return {entry["Key"].removeprefix(self._prefix): int(entry["Size"]) for entry in entries}

        # Other tools mark folders with empty objects whose key ends in a slash.
        found = self._run("list", prefix, call)
        return {k: n for k, n in found.items() if not k.endswith("/") and visible(k.rsplit("/", 1)[-1])}

    def children(self, prefix: str) -> list[str]:
        async def call(fs: s3fs.S3FileSystem, _: asyncio.Timeout) -> list[str]:
            found: list[str] = []
            async for page in self._pages(fs, prefix, Delimiter="/"):
                found += [entry["Prefix"].rstrip("/") for entry in page.get("CommonPrefixes", ())]
                found += [
                    entry["Key"] for entry in page.get("Contents", ()) if not entry["Key"].endswith("/")
                ]
            return found

        names = {key.rsplit("/", 1)[-1] for key in self._run("list", prefix, call)}
        return sorted(filter(visible, names))

    async def _pages(
        self, fs: s3fs.S3FileSystem, prefix: str, **options: str
    ) -> AsyncIterator[dict[str, Any]]:
        folder = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        query = {"Bucket": self._bucket, "Prefix": self._prefix + folder, **options}
        while True:
            page = await fs._call_s3("list_objects_v2", **query)
            yield page
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        check_key(key)

        async def call(fs: s3fs.S3FileSystem, _: asyncio.Timeout) -> None:
            # S3 answers success for a missing key; s3fs passes other stores' 404 on.
            with suppress(FileNotFoundError):
                await fs._call_s3("delete_object", Bucket=self._bucket, Key=self._prefix + key)

        self._run("delete", key, call)

    def check(self) -> None:
        self.children("")  # says clearly when the bucket is missing, before anything is written
        super().check()

    def _object(self, key: str) -> str:
        return f"{self._bucket}/{self._prefix}{key}"

    def _run(
        self,
        operation: str,
        key: str,
        call: Callable[[s3fs.S3FileSystem, asyncio.Timeout], Awaitable[T]],
        *,
        num_bytes: int = 0,
    ) -> T:
        """Run the call on s3fs's event loop, with the attempts and within the time the config allows."""
        fs = self._filesystem()
        limit_s = self._config.operation_timeout_s + num_bytes / _SLOWEST_BYTES_PER_S
        work = self._attempts(fs, operation, self.uri(key), call, limit_s=limit_s)
        return _on_loop(cast(asyncio.AbstractEventLoop, fs.loop), work)

    async def _attempts(
        self,
        fs: s3fs.S3FileSystem,
        operation: str,
        uri: str,
        call: Callable[[s3fs.S3FileSystem, asyncio.Timeout], Awaitable[T]],
        *,
        limit_s: float,
    ) -> T:
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._config.max_attempts),
            wait=_pause_s,
            retry=retry_if_exception_type(StoreUnavailableError),
            reraise=True,
        )
        last: Exception | None = None

        async def attempt(timeout: asyncio.Timeout) -> T:
            nonlocal last
            try:
                return await call(fs, timeout)
            except Exception as error:
                last = s3_error(operation, uri, error)
                if last is error:
                    raise
                raise last from error

        try:
            async with asyncio.timeout(limit_s) as timeout:
                return await retrying(attempt, timeout)
        except TimeoutError:
            hint = f"; last failure: {last}" if last else ""
            raise StoreUnavailableError(f"{operation} {uri}: not done within {limit_s:g} s{hint}") from last

    def _filesystem(self) -> s3fs.S3FileSystem:
        """This process's s3fs instance: s3fs is not fork-safe, so each process makes its own."""
        with self._lock:
            if self._connected is None or self._connected[0] != os.getpid():
                self._connected = (os.getpid(), self._connect())
            return self._connected[1]

    def _connect(self) -> s3fs.S3FileSystem:
        fs = s3fs.S3FileSystem(
            # Cached listings hide other processes' writes even from reads, and instances are shared.
            use_listings_cache=False,
            skip_instance_cache=True,
            config_kwargs={
                "connect_timeout": self._config.connect_timeout_s,
                "read_timeout": self._config.read_timeout_s,
                "retries": {"total_max_attempts": 1, "mode": "standard"},
                "max_pool_connections": 32,
            },
        )
        fs.retries = 1
        return fs


def _pause_s(state: RetryCallState) -> float:
    """Before the next attempt: twice the last pause, and a little more, so that many don't return at once."""
    doubled_s = _FIRST_PAUSE_S * 2 ** (state.attempt_number - 1)
    return min(_LONGEST_PAUSE_S, doubled_s + _jitter.uniform(0, _FIRST_PAUSE_S))


def _on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # an interrupted caller leaves no request running
        raise
