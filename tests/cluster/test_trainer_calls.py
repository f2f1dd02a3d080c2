"""Calls on trainer ranks: their order, and weights that are asked for again."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slimecli.cluster import ray_trainer, torchrun
from slimecli.cluster.actors import TrainerHost
from slimecli.errors import SlimeError
from slimecli.placement import Place
from tests.trainers import made


class Rank:
    """An actor's handle, which takes its time to send some calls."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, method):
        def remote(*args):
            self.asked.append(method)
            time.sleep(0.3 * (method == "save"))

        return type("Call", (), {"remote": staticmethod(remote)})


def test_ranks_get_calls_of_two_threads_in_one_order(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_trainer, "wait", lambda refs, *_: [("127.0.0.1", 1)] * len(refs))
    ranks = [Rank(), Rank()]
    group = ray_trainer.TrainerGroup(ranks, 1.0, [Place("", 0), Place("", 1)], one_host=True)
    for rank in ranks:
        rank.asked.clear()
    threads = [threading.Thread(target=call, args=(tmp_path,)) for call in (group.save, group.load)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert [r.asked for r in ranks] == [["save", "load"]] * 2
    group.close()
    assert ranks[1].asked[-1] == "close"


class Trainer:
    """Counts how often its weights counted as published."""

    def __init__(self):
        self.published = 0

    def weights(self):
        yield "w", torch.zeros(2)
        self.published += 1

    def step(self, batch):
        return None


def test_weights_that_are_gone_are_not_published_again(tmp_path):
    host, trainer = TrainerHost("", 1), Trainer()
    host._trainer = trainer
    batch = made.batch(made.recipe()).to_numpy()

    def stage(version):
        return host.stage("in_process", version, str(tmp_path), str(tmp_path))

    stage(3)
    assert stage(3).fingerprint and trainer.published == 2, "nothing has changed"
    host.step(batch)
    with pytest.raises(SlimeError, match="the trainer has gone on since version 3"):
        stage(3)
    assert trainer.published == 2
    stage(4)
    assert trainer.published == 3


def test_ranks_of_torchrun_do_one_thing_after_the_other():
    done, ranks = [], torchrun.Ranks.__new__(torchrun.Ranks)

    class Host:
        def save(self, folder):
            time.sleep(0.2)
            done.append("saved")

        def load(self, folder):
            raise SlimeError("it cannot", "")

    ranks._order, ranks._host, ranks._is_whole = threading.Lock(), Host(), True
    ranks._say = lambda method, *args: done.append(method)
    threads = [threading.Thread(target=ranks.call, args=("save", "")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == ["save", "saved"] * 2
    with ThreadPoolExecutor() as pool, pytest.raises(SlimeError, match="it cannot"):
        pool.submit(ranks.call, "load", "").result()
