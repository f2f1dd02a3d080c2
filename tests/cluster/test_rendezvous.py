"""Trainer ranks that are all on one machine meet at loopback: nothing of theirs can be reached from elsewhere."""

import ipaddress
import sys
import time
from pathlib import Path

from slimecli import env
from slimecli.cluster.actors import TrainerHost
from tests.trainers.processes import run_ranks


def listening():
    """Addresses at which this process listens."""
    own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in (line.split() for line in Path(table).read_text().splitlines()[1:]):
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                words = bytes.fromhex(row[1].partition(":")[0])  # 32-bit words, each in the machine's order
                swapped = b"".join(
                    words[i : i + 4][:: -1 if sys.byteorder == "little" else 1] for i in range(0, len(words), 4)
                )
                found.append(str(ipaddress.ip_address(swapped)))
    return found


def meet(note, one_host):
    import torch

    rank = env.distributed_rank()[0]
    before = len(listening())
    host = TrainerHost("", 1)
    if rank == 0:
        where, port = host.address(one_host)
        note.with_suffix(".new").write_text(f"{where} {port}")
        note.with_suffix(".new").rename(note)
    while not note.exists():
        time.sleep(0.01)
    where, port = note.read_text().split()
    host.join(rank, 2, where, int(port), rank)
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total)
    return total.item(), listening()[before:], where


def test_ranks_of_one_machine_listen_at_loopback_alone(tmp_path):
    first, second = run_ranks(2, meet, tmp_path / "note", True, join=False)
    assert first[0] == second[0] == 3.0
    assert first[2] == "127.0.0.1" and first[1], "rank 0 keeps the store"
    assert all(ipaddress.ip_address(a).is_loopback for a in first[1] + second[1]), (first, second)


def test_ranks_of_several_machines_meet_at_an_address_of_the_cluster(tmp_path, monkeypatch):
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    first, _ = run_ranks(2, meet, tmp_path / "note", False, join=False)
    assert first[0] == 3.0 and first[2] == "127.0.0.2"
    assert "127.0.0.2" in first[1] and "0.0.0.0" not in first[1] and "::" not in first[1], first[1]


def alone():
    before, host = len(listening()), TrainerHost("", 1)
    where, port = host.address(True)
    assert len(listening()) == before + 1
    host.join(0, 1, where, port, 0)
    return len(listening()) - before


def test_a_single_rank_listens_no_longer_than_it_is_asked_for():
    assert run_ranks(1, alone, join=False) == [0]
