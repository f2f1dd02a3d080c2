"""Conversations that cannot be written: nothing is doubled, nothing half there, and serving outlives it."""

import asyncio
import contextlib
import resource
import shutil

import pytest

from slimecli.agents.chat import Ask, Chat
from slimecli.agents.conversation import Sessions
from slimecli.errors import SlimeError
from slimecli.serving.front import reap
from slimecli.serving.store import LiveStore, Log, read_from, recording
from tests.agents.scripted import scripted
from tests.serving.test_store import record, source

ASK = Ask(messages=[{"role": "user", "content": "x"}], session="s")


@contextlib.contextmanager
def files_up_to(size):
    """No file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("durable", [True, False])
def test_a_line_is_there_whole_or_not_at_all(tmp_path, durable):
    log = Log(tmp_path, "turns", durable=durable)
    log.append({"n": 1})
    path = tmp_path / "turns_000001.jsonl"
    before = path.read_bytes()
    with files_up_to(len(before) + 4), pytest.raises(SlimeError, match="ulimit"):
        log.append({"n": 2})
    assert path.read_bytes() == before
    log.append({"n": 3})
    log.close()
    assert [r["n"] for r, _ in read_from(path, 0)] == [1, 3]


def test_an_answer_that_could_not_be_kept_was_not_given(tmp_path):
    """Its client is told of a failure and asks again: what it never read must not share the reward."""
    _, text = scripted(tmp_path, "unheard", "heard")
    with recording(tmp_path / "live") as store:
        sessions = Sessions(text, on_turn=store.turn, on_end=store.end)
        chat = Chat(text, sessions)
        with files_up_to(0), pytest.raises(SlimeError, match="ulimit"):
            asyncio.run(chat.answer(chat.prepare(ASK)))
        assert not list(sessions)
        asyncio.run(chat.answer(chat.prepare(ASK)))
        (sample,) = sessions.end("s", reward=1.0)
    assert "heard" in sample.response and "unheard" not in sample.response


def refuse_ends(store, monkeypatch):
    """The disk is full whenever the end of a session is to be marked among the turns."""
    append = store._turns.append

    def full(line):
        if "ended" in line:
            raise SlimeError("disk full")
        append(line)

    monkeypatch.setattr(store._turns, "append", full)


def test_a_session_whose_end_could_not_be_marked_has_ended_once(tmp_path, monkeypatch, capsys):
    live = tmp_path / "live"
    store = LiveStore(live)
    refuse_ends(store, monkeypatch)
    record(tmp_path, 0, store=store)
    assert "the end of session s0 is not marked" in capsys.readouterr().err
    store.close()
    reader = source(live, n=1)
    reader.poll()
    assert reader.available == 1
    with recording(live) as again:
        assert not again.recover()


def test_an_end_that_could_not_be_marked_is_marked_with_the_next_answer(tmp_path, monkeypatch):
    """The sessions of long ago are not looked through for it."""
    live = tmp_path / "live"
    store = LiveStore(live, segment_bytes=10)
    refuse_ends(store, monkeypatch)
    record(tmp_path, 0, store=store)
    monkeypatch.undo()
    for number in range(1, 5):
        record(tmp_path, number, store=store)
    store.close()
    with recording(live) as again:
        assert not again.recover()


def test_idle_sessions_wait_until_they_can_be_written(tmp_path, capsys):
    _, text = scripted(tmp_path, "hello")
    tries = []

    def end(session, samples, why):
        tries.append(session.id)
        if len(tries) < 3:
            raise SlimeError("disk full")

    sessions = Sessions(text, on_end=end)
    chat = Chat(text, sessions)
    asyncio.run(chat.answer(chat.prepare(ASK)))

    async def wait():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reap(sessions, 0.05), 1.0)

    asyncio.run(wait())
    assert tries == ["s"] * 3 and len(sessions) == 0
    assert capsys.readouterr().err.count("disk full") == 1


def test_a_folder_that_was_removed_is_told(tmp_path):
    live = tmp_path / "live"
    store = LiveStore(live)
    record(tmp_path, 0, store=store)
    shutil.rmtree(live)
    with pytest.raises(SlimeError, match="was removed while it was recorded into"):
        record(tmp_path, 1, store=store)
    assert not live.exists()
    store.close()
