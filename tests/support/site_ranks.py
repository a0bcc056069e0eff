"""Ranks of a site as threads of this process, in torch's own process group for tests."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils._python_dispatch import TorchDispatchMode


def run_ranks(ranks: int, call: Callable[[int, DeviceMesh], Any]) -> list[Any]:
    """Runs `call(rank, mesh)` on each of `ranks` ranks and returns the results by rank. The first error of any rank is raised."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store, world = dist.HashStore(), dist.distributed_c10d._world
    hook = sys.excepthook  # torch replaces it by one that names ranks
    found, failed = [None] * ranks, list[BaseException]()

    def one(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            found[rank] = call(rank, init_device_mesh("cpu", (ranks,)))
        except BaseException as error:
            failed.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)  # wakes the other ranks
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
            assert not thread.is_alive(), f"a rank still waits after 600 s; {failed}"
    finally:
        assert world is dist.distributed_c10d._world
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = hook
    if failed:
        raise failed[0]
    return found


class Collectives(TorchDispatchMode):
    """Records the names of functional collectives that this thread calls inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # then torch dispatches the operations on its parts to this mode
        space, _, name = func._schema.name.partition("::")
        if space == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.called.append(name)
        return func(*args, **(kwargs or {}))
