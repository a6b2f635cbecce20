"""A store in this process's memory, with the real one's semantics and none of its waits."""

from __future__ import annotations

from model_runtime.errors import ObjectNotFoundError
from model_runtime.store import Store


class MemoryStore(Store):
    """For tests that write many small objects."""

    def __init__(self) -> None:
        super().__init__("memory://", single_writer=False)
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def _create(self, key: str, data: bytes) -> bool:
        return self.objects.setdefault(key, data) is data

    def get(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise ObjectNotFoundError(f"get {self.uri(key)}: no such object") from None

    def exists(self, key: str) -> bool:
        return key in self.objects

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(f"{prefix}/"))

    def sizes(self, prefix: str) -> dict[str, int]:
        return {key: len(self.objects[key]) for key in self.list(prefix)}

    def children(self, prefix: str) -> list[str]:
        return sorted({key.removeprefix(f"{prefix}/").split("/")[0] for key in self.list(prefix)})

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)
