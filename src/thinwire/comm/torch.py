"""Replicas as processes under `torch.distributed`.

Only point-to-point messages are used: every replica sends to every other in one round trip, while gloo's ring collectives
pay a round trip for each ring step and move about 1.3 MB in each.

gloo neither authenticates nor encrypts: use it on a private network or inside a tunnel, never on an open one.

How gloo (torch 2.13) behaves, measured, and what follows:

* `isend` and `irecv` may be called from several threads at once, and `wait` lets other Python threads run.
* A send ends only when the receiver has posted its side: post both directions before waiting for either.
* A message *longer* than its buffer ends the receiving process (`std::terminate`); a shorter one is taken without an
  error. A layer above gloo could prevent this only by one more round trip, so both sides must know sizes beforehand, and
  received messages must be checked. A message of unknown size is shorter than its buffer, which has the largest size.
* A `wait` that times out closes every connection of this replica's group permanently. Nothing else closes them while a thread
  waits: `abort`, `shutdown` and `destroy_process_group` leave both ends waiting. `close` uses such a time-out.
"""

from __future__ import annotations

import os
import re
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from math import inf
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # exported without saying so
from torch.distributed.distributed_c10d import _get_default_store

from thinwire.comm.address import CheckedAddresses
from thinwire.comm.group import CONTROL, CONTROL_TAGS, TIMEOUT, Messages, Sized, Transfer, limit, travelling
from thinwire.comm.pacing import connections, pace
from thinwire.comm.sockets import (
    interruptibly,
    kept_from_children,
    listen,
    listening,
    loopback,
    only_here,
    shut,
    shut_new,
)
from thinwire.errors import ConfigurationError, LinkError

_NEVER = CONTROL + CONTROL_TAGS  # a tag that no message has
_LEFT_ADVICE = "See there why, then start all replicas again from their last checkpoints."
_SEND, _RECEIVE = "send to", "receive from"
_QUIET_SECONDS, _REPEAT_SECONDS = 10.0, 60.0  # seconds of waiting for a rank until it is said, and said again


def warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


class _Message(NamedTuple):
    verb: str  # _SEND or _RECEIVE
    peer: int
    work: dist.Work | RuntimeError  # the error, if gloo refused it at once: `wait` raises it, as all errors of peers


class _TorchTransfer:
    queued_seconds = 0.0
    transfer_seconds = 0.0

    def __init__(self, group: TorchGroup, tag: int, purpose: str, messages: list[_Message]) -> None:
        self._group, self._tag, self._purpose, self._messages = group, tag, purpose, messages
        self.arrivals: dict[int, float] = {}

    def wait(self) -> None:
        while self._messages:
            verb, peer, _ = self._messages[0]
            if error := self._failure():
                what = f"{verb} {self._group.member} {peer} ({self._purpose}, tag {self._tag})"
                raise self._group._explained(what, error, peer) from error
            if verb == _RECEIVE:
                self.arrivals[peer] = time.monotonic()
        self._group._open.discard(self)

    def end(self) -> None:
        """Release gloo's side after all connections are closed: operations without a wait have failed."""
        self._messages = [message._replace(work=RuntimeError("closed")) for message in self._messages]

    def _failure(self) -> RuntimeError | None:
        """Wait for the first message, and take it from the list. An error is returned without its frames, because they
        would keep the message, and so all connections of the group, for as long as the error is kept.
        """
        messages = self._messages
        work = messages[0].work
        if isinstance(work, RuntimeError):
            return work
        try:
            within = timedelta(seconds=limit(self._group.timeout))
            interruptibly(lambda: work.wait(within))
        except RuntimeError as error:
            return error.with_traceback(None)
        del messages[0]
        return None


class TorchGroup:
    """One replica's view of a group whose replicas are processes, or sets of processes.

    With `shards` > 1, shard s of each replica exchanges with shard s of the others. `site` joins the shards of this replica; in it,
    `rank` is the shard. After a timeout the group cannot be used any more: leave it and resume from a checkpoint.

    Args:
        process_group: of torch.distributed, one rank per replica; usually `from_world` makes it.
        timeout: seconds that a `wait` lasts at most; within a `Replica`, seconds without a sign of life (docs/own-loop.md).
        shard, shards: the rank of this process within its replica; ranks per replica.
        site: the group of this replica's shards.

    Raises:
        ConfigurationError: the process group is one of NCCL, which has no tags.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun gives more ranks
    >>> group = TorchGroup.from_world(replicas=1, timeout=60.0)
    >>> group.rank, group.size
    (0, 1)
    >>> group.close()
    >>> dist.destroy_process_group()
    """

    member = "replica"  # what a rank of this group is, in messages

    def __init__(
        self, process_group: dist.ProcessGroup, timeout: float, shard: int = 0, shards: int = 1,
        site: TorchGroup | None = None,
    ) -> None:  # fmt: skip
        if process_group.name() == "nccl":
            raise ConfigurationError(
                "a process group of NCCL was given; packets travel over gloo, the shards of a replica may use NCCL: TorchGroup.from_world(...)."
            )
        self.rank, self.size = process_group.rank(), process_group.size()
        self.timeout, self.shard, self.shards, self.site = timeout, shard, shards, site
        self._process_group: dist.ProcessGroup | None = process_group  # None when closed
        self._closed = False
        # Transfers without a `wait` yet: a receive that is dropped while its message is in transit would leave
        # gloo with a freed buffer.
        self._open: set[_TorchTransfer] = set()

    @property
    def world_ranks(self) -> list[int]:
        """The ranks of the members in the world of torch.distributed; empty after `close`."""
        return [] if self._process_group is None else dist.get_process_group_ranks(self._process_group)

    @classmethod
    @kept_from_children()
    def from_world(
        cls, replicas: int, timeout: float = TIMEOUT, uplink: float | None = None, say: Callable[[str], object] = warn
    ) -> TorchGroup:
        """The group of this process in a world of `replicas` times shards ranks, after `init_process_group`.

        World rank r is shard r % shards of replica r // shards. Every rank of the world must call this at the same
        point. gloo carries packets over the CPU, whatever the default group uses.

        `uplink` is the rate in bits per second at which this process can send to the other replicas. The connections of
        gloo are then paced to share it, and lose no packet to a full queue (`comm/pacing.py`). It works on Linux only;
        elsewhere it changes nothing. Without it, TCP alone decides.

        `say` is told which ranks it waits for, as in `start_torch`.

        Raises `ConfigurationError` and `LinkError`.
        """
        if not dist.is_initialized():
            raise ConfigurationError("torch.distributed is not initialised; call `start_torch` first.")
        world, rank = dist.get_world_size(), dist.get_rank()
        if replicas < 1 or world % replicas or not timeout > 0:
            raise ConfigurationError(
                f"replicas={replicas}, timeout={timeout} were given for a world of {world} ranks; "
                "a divisor of the world and a positive time are needed."
            )
        if uplink is not None and not 0 < uplink < inf:
            raise ConfigurationError(f"uplink={uplink} was given; a positive rate in bits per second is needed.")
        shards = world // replicas
        replica, shard = divmod(rank, shards)

        def subgroup(ranks: list[int]) -> dist.ProcessGroup:
            within = timedelta(seconds=timeout)
            made: dist.ProcessGroup = interruptibly(lambda: dist.new_group(ranks, timeout=within, backend="gloo"))
            return made

        before, heard_before = connections(), set(listening())
        try:
            store: Store = _get_default_store()
            place = f"group-{store.add(f'thinwire/groups-of-{rank}', 1)}"  # a world may make several
            where, patience = "TorchGroup.from_world", _Patience(say)
            interruptibly(lambda: _meet(store, place, rank, world, where, timeout, patience))
            # all ranks make all groups in the same order, and keep their own
            twins = [subgroup(list(range(s, world, shards))) for s in range(shards)]
            if uplink is not None:
                pace(connections() - before, uplink)
            sites = [subgroup(list(range(m * shards, (m + 1) * shards))) for m in range(replicas if shards > 1 else 0)]
        except RuntimeError as error:
            raise LinkError(
                f"rank {rank} of {world} could not join its group: {_first_line(error)}. "
                "Every rank must be running and reachable from every other."
            ) from error
        shut_new(heard_before, connections() - before, replicas - 1 + (shards - 1))
        site = cls(sites[replica], timeout) if shards > 1 else None
        if site is not None:
            site.member = f"replica {replica}'s shard"
        return cls(twins[shard], timeout, shard, shards, site)

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> Transfer:
        """See `Group.post`."""
        send, recv = travelling(self, tag, send), travelling(self, tag, recv)
        carrier = self._process_group
        if self._closed or carrier is None:
            raise self._closed_error()
        messages: list[_Message] = []
        # Receives first: a message whose receiver is ready leaves at once.
        for verb, start, tensors in ((_RECEIVE, carrier.recv, recv), (_SEND, carrier.send, send)):
            for peer, tensor in tensors.items():
                work: dist.Work | RuntimeError
                try:
                    work = start([tensor], peer, tag)
                except RuntimeError as error:
                    work = error.with_traceback(None)
                messages.append(_Message(verb, peer, work))
        transfer = _TorchTransfer(self, tag, purpose, messages)
        self._open.add(transfer)
        return transfer

    def close(self) -> None:
        """See `Group.close`. This ends gloo's sockets and threads. Those of a default group and its subgroups, to which torch keeps a
        reference, end with `destroy_process_group`.
        """
        carrier = self._process_group
        if self._closed or carrier is None:
            return
        self._closed = True
        if self.site is not None:
            self.site.close()
        for peer in range(self.size):
            if peer != self.rank:
                nothing = torch.empty(1, dtype=torch.uint8)
                with suppress(RuntimeError):  # the time-out closes all connections (see the top of this file)
                    carrier.recv([nothing], peer, _NEVER).wait(timedelta(milliseconds=1))
        for transfer in list(self._open):
            transfer.end()
        self._open.clear()
        self._process_group = None

    def _explained(self, what: str, error: RuntimeError, peer: int) -> LinkError:
        told = self._closed_error() if self._closed else LinkError(self._reason(what, error))
        told.peer, told.advice = peer, _LEFT_ADVICE
        return told

    def _reason(self, what: str, error: RuntimeError) -> str:
        if "Timed out" in str(error):
            return (
                f"could not {what} within {self.timeout:g} s: the link is cut, or the peer is late. "
                "This group cannot be used any more: leave, check that replica, and start all again from their last "
                "checkpoints, with a longer timeout if it was only late."
            )
        if "Application timeout" in str(error):
            return f"could not {what}: an earlier time-out ended this group. Start all replicas again from their last checkpoints."
        return f"could not {what}: it has left or crashed ({_first_line(error)}). {_LEFT_ADVICE}"

    def _closed_error(self) -> LinkError:
        return LinkError(f"the group of {self.member} {self.rank} is closed. Post and wait before closing it.")


_CONNECT_TIMEOUTS = 5  # gloo waits for this number of its timeouts until a peer connects (measured)


@kept_from_children()
def connect(store: Store, rank: int, size: int, host: str, seconds: float) -> dist.ProcessGroup:
    """gloo among `size` processes that find each other in `store`, listening at `host` until all are connected.

    Bytes that others wrote there are checked before gloo reads them. Waits at most `seconds` for each member. Raises `LinkError`.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=seconds / _CONNECT_TIMEOUTS)
    try:  # connect at once, whatever torch's setting, because later connections are refused
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    except TypeError:  # an older torch, without this setting
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    addresses = CheckedAddresses(store, size)
    try:
        gloo = interruptibly(lambda: dist.ProcessGroupGloo(addresses, rank, size, options))
        made: dist.ProcessGroup = gloo  # type: ignore[assignment]
    except RuntimeError as error:  # torch's DistError and similar errors, which have many lines
        raise LinkError(str(error).strip().split("\n")[0]) from error
    for file, address in listening().items():
        if address == addresses.own:
            shut(file)
    return made


@kept_from_children()
def start_torch(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    timeout_seconds: float = TIMEOUT,
    backend: str = "gloo",
    prefix: str | None = None,
    say: Callable[[str], object] = warn,
) -> None:
    """Join `world_size` processes into a torch.distributed world; rank 0 keeps the rendezvous store at `master_port`.

    The store listens at `master_addr` alone, if that is an address of this machine. With one such as 127.0.0.1 all ranks are on this
    machine, and gloo listens there, too, as does every later group of this process. Between machines, gloo listens at the address that this
    machine's name resolves to. If the others cannot reach that address, name the interface in GLOO_SOCKET_IFNAME, which gloo itself reads.
    End with `torch.distributed.destroy_process_group()`.

    Args:
        rank, world_size: rank of this process and number of processes; ranks begin at 0.
        master_addr, master_port: address and port number of rank 0's store.
        timeout_seconds: seconds within which all ranks must join.
        backend: as for `torch.distributed.init_process_group`.
        prefix: the prefix of our names in a store of another process, such as torchrun's agent; None: rank 0 has the store.
        say: called with a line that names the ranks which have not come, after ten seconds of waiting and then each minute. By default it is
            a warning.

    Raises:
        ConfigurationError: this process has joined a world before.
        LinkError: the port is taken, the host does not answer, or not all ranks joined in time.
    """
    if dist.is_initialized():
        raise ConfigurationError(
            "this process is in a torch.distributed world already: make a new group in it, by TorchGroup.from_world(...), or call "
            "torch.distributed.destroy_process_group() first, on all ranks."
        )
    timeout = timedelta(seconds=timeout_seconds)
    where = f"{master_addr}:{master_port}"
    try:
        keeps = None if prefix else world_size
        end, patience = time.monotonic() + timeout_seconds, _Patience(say)
        store = interruptibly(lambda: _tcp_store(rank, keeps, master_addr, master_port, timeout, patience))
        prefixed = PrefixStore(prefix, store) if prefix else store
        interruptibly(lambda: _meet(prefixed, "world", rank, world_size, where, end - time.monotonic(), patience))
        before, heard_before = connections(), set(listening())
        interruptibly(
            lambda: dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
        )
        shut_new(heard_before, connections() - before, world_size - 1)
    except (RuntimeError, OSError) as error:  # also torch's DistError
        reason = _first_line(error)
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise LinkError(
                f"{where} is in use on this machine. End the process that uses it, or choose another port."
            ) from error
        if rank == 0:
            advice = f"Start all {world_size} ranks, and check that they reach {where}."
        else:
            advice = f"Check that rank 0 runs there, that {where} can be reached from here, and that all ranks started."
        raise LinkError(
            f"rank {rank} of {world_size} could not join at {where} within {timeout_seconds:g} s ({reason}). {advice}"
        ) from error


class _Patience:
    """Says whom this process waits for, when that has taken long enough, and at last that it is over."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say, self._began, self._due, self._names = say, time.monotonic(), _QUIET_SECONDS, ""

    def waits_for(self, names: str) -> None:
        waited = time.monotonic() - self._began
        if waited >= self._due or (self._names and names != self._names):
            self._names, self._due = names, waited + _REPEAT_SECONDS
            self._say(f"waiting for {names}")

    def over(self, what: str) -> None:
        if self._names:
            self._say(what)


def _meet(
    store: Store, place: str, rank: int, size: int, where: str, seconds: float, patience: _Patience
) -> None:  # fmt: skip
    """Wait until all ranks have come to the same `place` in the store. torch would wait for them outside Python, and name none.

    Raises `RuntimeError`.
    """
    store.set(f"thinwire/{place}/{rank}", "")
    end, pause, missing = time.monotonic() + seconds, 0.01, [other for other in range(size) if other != rank]
    while missing and not store.check([f"thinwire/{place}/{other}" for other in missing]):
        missing = [other for other in missing if not store.check([f"thinwire/{place}/{other}"])]
        names = (
            f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}{', …' * (len(missing) > 8)} of {size}"
        )
        if time.monotonic() >= end:
            raise RuntimeError(f"{names} did not come")
        patience.waits_for(f"{names} at {where}")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    patience.over(f"all {size} ranks are at {where}")


def _tcp_store(
    rank: int, world_size: int | None, host: str, port: int, timeout: timedelta, patience: _Patience
) -> TCPStore:  # fmt: skip
    """The store of all ranks. Without `world_size` another process keeps it, otherwise rank 0 does. Raises `OSError`."""
    if only_here(host) and (interface := loopback()):
        os.putenv("GLOO_SOCKET_IFNAME", interface)  # gloo has no other setting for it
    listener = listen(host, port) if rank == 0 and world_size is not None else None
    keeps_it, file = rank == 0 and world_size is not None, listener.detach() if listener else None
    end = time.monotonic() + timeout.total_seconds()
    while not keeps_it:  # torch dials outside Python, and tells nobody that it waits
        try:
            socket.create_connection((host, port), max(0.1, min(5.0, end - time.monotonic()))).close()
            break
        except OSError as error:
            if time.monotonic() >= end:
                raise
            keeper = f"rank 0 of {world_size}" if world_size is not None else "torchrun's agent"
            patience.waits_for(f"{keeper} at {host}:{port} ({error})")
            time.sleep(0.2)
    return TCPStore(
        host, port, world_size, is_master=keeps_it, timeout=timeout, wait_for_workers=False, master_listen_fd=file
    )


def _first_line(error: BaseException) -> str:
    """The first line of an error, without the position in gloo's source before it and the advice after it."""
    line = str(error).strip().split("\n")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically caused")[0]
