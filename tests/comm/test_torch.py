"""What only real processes show of the torch carrier: deaths, timeouts, shards, and setup."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from group_laws import Exchange, free_port, run_processes
from hypothesis import given
from hypothesis import strategies as st
from listening import addresses

from thinwire.comm import TorchGroup, start_torch
from thinwire.comm.address import parse
from thinwire.comm.sockets import listening
from thinwire.comm.torch import connect
from thinwire.errors import ConfigurationError, LinkError

ESTABLISHED = 1  # linux/tcp_states.h


def receive(group, peer, tag=1):
    group.post(tag, {}, {peer: torch.zeros(50, dtype=torch.uint8)}).wait()


def death(rank, size):
    """Replica 1 dies in two ways, in two groups of three one after the other, while the others wait for it."""
    group = TorchGroup.from_world(size)
    Exchange(group, 0, 0, 1000).check()
    if rank == 1:
        os._exit(3)
    if rank == 2:
        time.sleep(0.2)  # most likely replica 0 waits when replica 3 is killed
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for dead in (1, 2):
        with pytest.raises(LinkError) as caught:
            receive(group, dead)
        said.append(str(caught.value))
    with pytest.raises(LinkError) as caught:  # a send to a dead peer fails in `wait`, not in `post`
        group.post(2, {1: torch.zeros(5, dtype=torch.uint8)}, {}).wait()
    if rank == 0:  # the surviving replicas continue with each other
        group.post(3, {3: torch.zeros(5, dtype=torch.uint8)}, {}).wait()
    else:
        receive_from_zero = torch.zeros(5, dtype=torch.uint8)
        group.post(3, {}, {0: receive_from_zero}).wait()
    return [*said, str(caught.value)]


def test_a_dead_replica_is_named_at_once(tmp_path):
    said = run_processes(death, 4, tmp_path, timeout=600.0)
    assert said[1] is None and said[2] is None
    for exited, killed, refused in (said[0], said[3]):
        assert exited.startswith("could not receive from replica 1 (packet, tag 1): it has left or crashed")
        assert killed.startswith("could not receive from replica 2")
        assert refused.startswith("could not send to replica 1")


def refuses(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60.0).close()
    except ConnectionResetError:
        return False
    except ConnectionRefusedError:
        return True
    return False


def death_before_its_children(rank, size):
    """Replica 0, which has the store, is killed; a fork of it and a program that it has started live on."""
    group = TorchGroup.from_world(size, timeout=600.0)
    told = torch.zeros(8, dtype=torch.int64)
    if rank == 0:
        reading, writing = os.pipe()
        fork = os.fork()
        if not fork:
            os.write(writing, b"here")
            signal.pause()
        os.read(reading, 4)
        program = subprocess.Popen(["sleep", "3600"], close_fds=False)
        ports = [port for _, port in listening().values()]
        told[: 2 + len(ports)] = torch.tensor([fork, program.pid, *ports])
        group.post(1, {1: told.view(torch.uint8)}, {}).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    group.post(1, {}, {0: told.view(torch.uint8)}).wait()
    fork, program, *ports = filter(None, told.tolist())
    try:
        with pytest.raises(LinkError) as caught:
            receive(group, 0, 2)
        assert "it has left or crashed" in str(caught.value)
        for port in ports:
            while not refuses(port):  # the kernel may close the last sockets of a dead process a little later
                time.sleep(0.01)
    finally:
        for child in (fork, program):
            os.kill(child, signal.SIGKILL)  # raises if it has ended
    return [str(caught.value), len(ports)]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel lists no sockets")
def test_a_death_is_noticed_and_its_ports_are_free_though_its_children_live(tmp_path):
    """Children such as the workers of a data loader."""
    said, ports = run_processes(death_before_its_children, 2, tmp_path)[1]
    assert said.startswith("could not receive from replica 0 (packet, tag 2): it has left or crashed") and ports


def silence(rank, size):
    """Replica 1 is alive and sends nothing. Replica 0 times out, which ends both groups."""
    group = TorchGroup.from_world(size, timeout=600.0)
    if rank == 0:
        group.timeout = 2.0
    said = []
    for tag in (1, 2):
        with pytest.raises(LinkError) as caught:
            receive(group, 1 - rank, tag + 10 * rank)
        said.append(str(caught.value))
    return said


def test_a_silent_replica_causes_a_timeout(tmp_path):
    zero, one = run_processes(silence, 2, tmp_path)
    assert zero[0].startswith("could not receive from replica 1 (packet, tag 1) within 2 s: the link is cut")
    assert "replica 1" in zero[1]
    assert all(text.startswith("could not receive from replica 0") for text in one)


def shards(rank, size):
    """Runs six ranks as three replicas of two shards."""
    group = TorchGroup.from_world(3)
    assert (group.rank, group.size, group.shard, group.shards) == (rank // 2, 3, rank % 2, 2)
    site = group.site
    assert site is not None and (site.rank, site.size, site.site) == (rank % 2, 2, None)
    for members, tag in ((group, 1), (site, 1)):  # both groups use one tag, and must not mix messages
        Exchange(members, tag, 1, 1000).check()
    mine = torch.tensor([rank], dtype=torch.uint8)
    twins = {peer: torch.zeros(1, dtype=torch.uint8) for peer in range(3) if peer != group.rank}
    group.post(2, {peer: mine for peer in twins}, twins).wait()
    neighbour = torch.zeros(1, dtype=torch.uint8)
    site.post(2, {1 - site.rank: mine}, {1 - site.rank: neighbour}).wait()
    with pytest.raises(ConfigurationError, match="a divisor of the world"):
        TorchGroup.from_world(4)
    if site.rank == 0:  # the other one leaves
        with pytest.raises(LinkError, match=f"^could not receive from replica {group.rank}'s shard 1 "):
            receive(site, 1)
    group.close()
    with pytest.raises(LinkError, match=f"^the group of replica {group.rank}'s shard {site.rank} is closed"):
        site.post(3, {}, {})
    return {"twins": {peer: int(buffer) for peer, buffer in twins.items()}, "neighbour": int(neighbour)}


def test_shards_exchange_with_equal_shards_and_their_site(tmp_path):
    for rank, heard in enumerate(run_processes(shards, 6, tmp_path)):
        replica, shard = divmod(rank, 2)
        assert heard["twins"] == {str(peer): 2 * peer + shard for peer in range(3) if peer != replica}
        assert heard["neighbour"] == 2 * replica + (1 - shard)


def own_listeners(rank, size):
    """Returns where this rank listens, and how many of three connections to each port it accepted; the group still works after them."""
    group = TorchGroup.from_world(size)
    knocks = []
    for place in set(listening().values()):
        for _ in range(3):
            knocks.append(socket.socket())
            knocks[-1].setblocking(False)
            with suppress(BlockingIOError):
                knocks[-1].connect(place)
    Exchange(group, 0, 0, 1000).check()
    states = [knock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for knock in knocks]
    return {"listens": addresses(os.getpid()), "answered": sum(state == ESTABLISHED for state in states)}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists what a process listens at, and shuts a port")
def test_after_setup_gloo_listens_nowhere_and_the_store_only_where_asked(tmp_path):
    """Only rank 0's store stays open, at the address that was given."""
    for rank, said in enumerate(run_processes(own_listeners, 2, tmp_path)):
        assert set(said["listens"]) == {"127.0.0.1"}, said
        assert said["answered"] == (3 if rank == 0 else 0), said


LEGAL = (2).to_bytes(8, "little") + b"vm" + (136).to_bytes(8, "little") + b"\x02\x00\x81%\x7f\x00\x00\x01" + bytes(136)
RUBBISH = {
    "empty": b"",
    "short": b"\x01",
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "a count": (1 << 60).to_bytes(8, "little") + bytes(100),
    "long": bytes(1 << 20),
    "for more members": LEGAL + bytes(16),
    "a name of 2^64 - 8": (2**64 - 8).to_bytes(8, "little") + LEGAL[8:],
    "another family": LEGAL[:18] + b"\x01" + LEGAL[19:],
}


@pytest.mark.parametrize("what", RUBBISH)
def test_a_malformed_peer_address_is_refused(what):
    """gloo itself would end this process, or allocate without bound."""
    store = dist.HashStore()
    store.set("0/1", RUBBISH[what])
    with pytest.raises(LinkError, match="instead of the address at which gloo"):
        connect(store, 0, 2, "127.0.0.1", 600.0)


def test_a_peer_that_never_connects_causes_a_timeout():
    """The call into gloo returns, and leaves no waiting thread. Of two addresses the higher one connects: 127.0.0.2."""
    store = dist.HashStore()
    store.set("0/1", LEGAL[:25] + b"\x02" + LEGAL[26:] + bytes(8))
    before = set(threading.enumerate())
    with pytest.raises(LinkError, match="Connect timeout"):
        connect(store, 0, 2, "127.0.0.1", 0.5)
    assert set(threading.enumerate()) == before


@given(st.binary(max_size=300), st.integers(0, 170), st.integers(1, 9))
def test_arbitrary_bytes_are_an_address_or_refused(rubbish, begin, size):
    for blob in (rubbish, LEGAL[:begin] + rubbish + LEGAL[begin + len(rubbish) :]):
        with suppress(LinkError):
            assert len(parse(blob, size)) == 2 and len(blob) < 16 + 255 + 136 + 8 * size + 1


def test_a_process_group_of_nccl_is_refused():
    """Its messages have no tags: the receives of two replicas would wait for sends behind them."""
    with pytest.raises(ConfigurationError, match="packets travel over gloo"):
        TorchGroup(SimpleNamespace(name=lambda: "nccl"), timeout=1.0)


def test_a_torch_group_needs_an_initialised_process_group():
    assert not dist.is_initialized()
    with pytest.raises(ConfigurationError, match="start_torch"):
        TorchGroup.from_world(2)


def test_a_port_in_use_is_reported():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(LinkError, match="is in use on this machine"):
            start_torch(0, 2, "127.0.0.1", holder.getsockname()[1], 1.0)


@pytest.mark.leaves(files="pipe:", why="torch 2.13 does not close that of a TCPStore which could not connect")
@pytest.mark.parametrize("rank", [0, 1])
def test_absent_ranks_are_named(rank):
    with pytest.raises(
        LinkError, match=f"rank {rank} of 2 could not join at 127.0.0.1:.* within 1 s .*rank {1 - rank}"
    ):
        start_torch(rank, 2, "127.0.0.1", free_port(), 1.0)
    assert not dist.is_initialized()


MEETING = """
import os, signal, sys, threading, time, traceback
from thinwire.comm import TorchGroup, start_torch

def interrupt(where):
    main = threading.main_thread().ident
    while not any(frame.name == where for frame in traceback.extract_stack(sys._current_frames()[main])):
        time.sleep(0.01)
    time.sleep(0.5)  # most likely it waits outside Python by now; it ends in either case
    os.kill(os.getpid(), int(sys.argv[3]))

rank, waits = int(sys.argv[1]), sys.argv[4]
if rank == 0:
    threading.Thread(target=interrupt, args=(waits,), daemon=True).start()
start_torch(rank, 2, "127.0.0.1", int(sys.argv[2]), 600.0)
if rank:
    print("joined", flush=True)
    sys.stdin.read()
    os._exit(0)
TorchGroup.from_world(2, 600.0)
"""


@pytest.mark.parametrize("waits", ["start_torch", "from_world"])
def test_ctrl_c_ends_a_process_that_waits_for_others_to_meet(waits: str) -> None:
    """The other one has not begun, or stands still before it makes its group."""
    port, others = str(free_port()), []
    command = [sys.executable, "-c", MEETING]
    first = subprocess.Popen([*command, "0", port, str(int(signal.SIGINT)), waits], stderr=subprocess.PIPE, text=True)
    if waits == "from_world":
        others.append(subprocess.Popen([*command, "1", port, "0", ""], stdin=subprocess.PIPE))
    said = first.communicate()[1]
    for other in others:
        other.communicate()
    assert first.returncode == -signal.SIGINT and "KeyboardInterrupt" in said, said
