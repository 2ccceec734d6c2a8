"""Which known questions are near a new one: vectors in Qdrant, in this process or in a server of one's own.

Questions of different partitions never meet. In this process a partition is a collection, since the local mode looks at every
point of one; a server gets one collection, with the partition as a keyword that it keeps an index of.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from qdrant_client import QdrantClient, models

log = logging.getLogger(__name__)

Vector = NDArray[np.float32]
NAMESPACE = uuid.UUID("5b0c6f3e-8f55-4a7e-9d0c-6a3a3b0d4f11")


class Known(NamedTuple):
    """A question that has an answer. key: of its exact cache entry."""

    key: str
    text: str
    vector: Vector


class VectorIndex:
    """Owns the client. All calls block, and belong into one thread."""

    def __init__(
        self,
        width: int,
        name: str,
        most: int,
        url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        """name: of a server's collection. most: entries of a partition that are kept in this process."""
        self._vectors = models.VectorParams(size=width, distance=models.Distance.COSINE)
        self._most = most
        self._name = name
        self._local = url is None
        self._keys: dict[str, dict[str, None]] = defaultdict(dict)
        """Of each partition, oldest first; those that this process added."""
        if url is None:
            self._client = QdrantClient(":memory:")
            return
        self._client = QdrantClient(url=url, api_key=api_key, timeout=int(timeout_s))
        if not self._client.collection_exists(name):
            self._client.create_collection(name, vectors_config=self._vectors)
            keyword = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=True)
            self._client.create_payload_index(name, "partition", keyword)

    def add(self, partition: str, key: str, text: str, vector: Vector) -> None:
        keys = self._keys[partition]
        if self._local and not keys:
            self._client.create_collection(_collection(partition), vectors_config=self._vectors)
        keys.pop(key, None)
        keys[key] = None
        payload = {"partition": partition, "key": key, "text": text}
        point = models.PointStruct(id=_id(partition, key), vector=vector.tolist(), payload=payload)
        self._client.upsert(self._place(partition), [point])
        if self._local and len(keys) > self._most:
            self.remove(partition, [next(iter(keys))])

    def nearest(self, partition: str, vector: Vector, count: int) -> list[Known]:
        """Nearest first."""
        if self._local and not self._keys.get(partition):
            return []
        only = None if self._local else models.Filter(must=[_is(partition)])
        found = self._client.query_points(
            self._place(partition), query=vector.tolist(), limit=count, query_filter=only, with_vectors=True
        )
        return [_known(point) for point in found.points]

    def remove(self, partition: str, keys: Iterable[str]) -> None:
        gone = list(keys)
        mine = self._keys.get(partition, {})
        for key in gone:
            mine.pop(key, None)
        if self._local and not mine:
            self._keys.pop(partition, None)
            self._client.delete_collection(_collection(partition))
        elif gone:
            points = models.PointIdsList(points=[_id(partition, key) for key in gone])
            self._client.delete(self._place(partition), points_selector=points)

    def keys(self) -> dict[str, list[str]]:
        """By partition, of what this process added."""
        return {partition: list(keys) for partition, keys in self._keys.items()}

    def close(self) -> None:
        self._client.close()

    def _place(self, partition: str) -> str:
        return _collection(partition) if self._local else self._name


def _collection(partition: str) -> str:
    return hashlib.sha256(partition.encode()).hexdigest()


def _id(partition: str, key: str) -> str:
    return str(uuid.uuid5(NAMESPACE, f"{partition} {key}"))


def _is(partition: str) -> models.FieldCondition:
    return models.FieldCondition(key="partition", match=models.MatchValue(value=partition))


def _known(point: Any) -> Known:
    vector = np.asarray(point.vector, np.float32)
    return Known(point.payload["key"], point.payload["text"], vector / (np.linalg.norm(vector) or 1.0))
