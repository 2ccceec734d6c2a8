"""Tensor parallelism: the ranks of one replica hold a share of each weight and of the KV heads, and compute each step together.

Rank 0 schedules and samples. What the others need of a step, its rows, goes to them as one small broadcast; the collectives
inside the model are transformers' own (its plan says which products are split by columns and which by rows: Shoeybi et al. 2019,
arXiv 1909.08053, section 3). Nothing here knows what a rank is: a thread, a process, or an actor on another machine.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from gearshift.platform.engine.core import EngineLost
from gearshift.platform.engine.rows import Rows
from gearshift.platform.errors import ConfigError

SMALL = 4096
"""Numbers of the first broadcast of a step; what is longer takes a second one."""
FOREVER = timedelta(days=3650)
"""A rank waits for the next step, however long nobody asks. A peer that ends is seen by its connection, not by a timeout."""
JOIN = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Place:
    """Of one rank. meeting: a file on a common disk, or host:port of rank 0. interface: the network to listen on, by its
    address."""

    rank: int
    size: int
    meeting: str
    interface: str = "127.0.0.1"

    def rank_of(self, rank: int) -> Place:
        return Place(rank, self.size, self.meeting, self.interface)


def join(place: Place, device: torch.device) -> None:
    """Meets the other ranks; returns when all are there. Raises `EngineLost` when one does not come."""
    os.environ |= {  # transformers reads these
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.rank if device.type == "cuda" and torch.cuda.device_count() > 1 else 0),
        "GLOO_SOCKET_IFNAME": interface_of(place.interface),
    }
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store: Store
    if Path(place.meeting).is_absolute():
        store = FileStore(place.meeting, place.size)
    else:
        host, _, port = place.meeting.rpartition(":")
        store = TCPStore(host, int(port), place.size, is_master=place.rank == 0, timeout=JOIN)
    try:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=JOIN)
        dist.barrier()
    except (RuntimeError, dist.DistError) as error:
        raise EngineLost(f"The {place.size} ranks of the replica did not come together.") from error
    dist.distributed_c10d._set_pg_timeout(FOREVER)


def interface_of(address: str) -> str:
    """The name of the network interface that has the address. Raises `ConfigError`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise ConfigError(f"No network interface of this machine has the address {address}.")


class Logits(Protocol):
    def logits(self, rows: Rows) -> Tensor: ...


class Leading:
    """Rank 0's model: has the others compute each step too. Whatever fails in a step leaves the ranks apart, so it is the end
    of them all."""

    def __init__(self, model: Logits) -> None:
        self._model = model

    def logits(self, rows: Rows) -> Tensor:
        """[N, vocab] of the sampled rows. Raises `EngineLost`."""
        try:
            send(rows)
            return self._model.logits(rows)
        except Exception as error:
            raise EngineLost("The ranks of this replica have come apart.") from error

    def close(self) -> None:
        """Lets the others go, if they are still there."""
        try:
            send(None)
        except Exception:
            return


def follow(model: Logits) -> None:
    """What all ranks but 0 do, until rank 0 lets them go. Raises when it is gone."""
    with torch.inference_mode():
        while (rows := receive()) is not None:
            model.logits(rows)


def send(rows: Rows | None) -> None:
    """To all other ranks; None is the end."""
    packed = np.zeros(0, np.int64) if rows is None else pack(rows)
    first = torch.zeros(SMALL, dtype=torch.int64)
    first[0] = len(packed)
    head = torch.from_numpy(packed[: SMALL - 1])
    first[1 : 1 + len(head)] = head
    dist.broadcast(first, src=0)
    if len(packed) >= SMALL:
        dist.broadcast(torch.from_numpy(packed[SMALL - 1 :].copy()), src=0)


def receive() -> Rows | None:
    first = torch.empty(SMALL, dtype=torch.int64)
    dist.broadcast(first, src=0)
    count = int(first[0])
    if not count:
        return None
    parts = [first[1 : 1 + min(count, SMALL - 1)]]
    if count >= SMALL:
        rest = torch.empty(count - SMALL + 1, dtype=torch.int64)
        dist.broadcast(rest, src=0)
        parts.append(rest)
    return unpack(torch.cat(parts).numpy())


def pack(rows: Rows) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Two numbers for the shape of each array, then all of them."""
    shapes = [size for part in rows for size in (part.shape if part.ndim == 2 else (part.shape[0], 0))]
    return np.concatenate([np.array(shapes, np.int64), *(part.reshape(-1) for part in rows)])


def unpack(packed: np.ndarray[Any, np.dtype[np.int64]]) -> Rows:
    at, parts = 2 * len(Rows._fields), []
    for number, name in enumerate(Rows._fields):
        height, width = (int(size) for size in packed[2 * number : 2 * number + 2])
        flat = packed[at : at + height * (width if name == "tables" else 1)]
        parts.append(flat.reshape(height, width) if name == "tables" else flat)
        at += len(flat)
    return Rows(*parts)


def share_of(config: Any, size: int) -> Any:
    """The model config as one rank sees it: its share of the heads. Raises `ConfigError` where they can't be shared."""
    from gearshift.platform.engine.kv.cache import kv_shape

    heads, (kv_heads, dim) = config.num_attention_heads, kv_shape(config)
    possible = [n for n in range(1, kv_heads + 1) if not (kv_heads % n or heads % n or config.intermediate_size % n)]
    if size not in possible:
        raise ConfigError(
            f"tensor_parallel: {size} does not divide this model's {heads} heads, {kv_heads} key-value heads and "
            f"{config.intermediate_size} inner sizes; possible are {', '.join(map(str, possible))}"
        )
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(f"tensor_parallel: {config.model_type} has no plan for it in transformers; remove it")
    mine = copy.deepcopy(config)
    mine.num_attention_heads, mine.num_key_value_heads, mine.head_dim = heads // size, kv_heads // size, dim
    return mine
