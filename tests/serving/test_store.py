"""Recorded conversations: appended, read by a run that goes on, taken up after a kill."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slimecli.agents.chat import Ask, Chat
from slimecli.agents.conversation import Sessions
from slimecli.errors import SlimeError
from slimecli.recipe_live import LiveSection
from slimecli.serving.front import reap
from slimecli.serving.live_source import LiveSource, staleness
from slimecli.serving.store import LiveStore, recording
from slimecli.types import Sample
from tests.agents.scripted import scripted


def record(folder, number, *, store=None, lines=("hello", "bye"), reward=1.0, group="", version="0"):
    """One conversation of two turns, ended with a reward (None: left open)."""
    own, text = scripted(folder / f"tok{number}", *lines)
    own.version = version
    sessions = Sessions(text, on_turn=store.turn, on_end=store.end)
    chat = Chat(text, sessions)
    sessions.open(f"s{number}", group=group)
    messages = []
    for line in lines:
        messages.append({"role": "user", "content": f"{number} {line}?"})
        (answer,) = asyncio.run(chat.answer(chat.prepare(Ask(messages=list(messages), session=f"s{number}"))))
        messages.append(answer.message)
    return sessions.end(f"s{number}", reward=reward) if reward is not None else list(sessions)


def source(folder, n=2, **section):
    return LiveSource(folder, n, LiveSection(**{"wait_s": 0.5, **section}))


def test_a_run_reads_what_a_server_appends_each_session_once(tmp_path):
    live, reader = tmp_path / "live", source(tmp_path / "live")
    with recording(live) as store:
        record(tmp_path, 0, store=store, reward=0.0)
        reader.poll()
        assert reader.available == 0
        record(tmp_path, 1, store=store)
        asyncio.run(reader.wait(1, 1))
        (group,) = reader.take(1)
        assert [s.session_id for s in group] == ["s0", "s1"] and [s.reward for s in group] == [0.0, 1.0]
        assert [s.group_index for s in group] == [0, 0] and [s.rollout_id for s in group] == [0, 1]
        state = reader.state()
        for number in (2, 3, 4):
            record(tmp_path, number, store=store)
    resumed = source(live)
    resumed.restore(state)
    resumed.poll()
    (group,) = resumed.take(1)
    assert [s.session_id for s in group] == ["s2", "s3"] and [s.rollout_id for s in group] == [2, 3]
    with pytest.raises(SlimeError, match=r"step 2 waited 0.5 s for 1 groups of 2 .* 1 session\(s\) in 1 incomplete"):
        asyncio.run(resumed.wait(1, 2))


def test_a_backlog_stays_on_the_disk_until_it_is_its_turn(tmp_path):
    reader = source(tmp_path / "live", n=1, max_staleness=1)
    with recording(tmp_path / "live") as store:
        for number, version in enumerate("1114444"):
            record(tmp_path, number, store=store, version=version)
    asyncio.run(reader.wait(2, 5))
    assert [g[0].session_id for g in reader.take(2)] == ["s3", "s4"] and reader.dropped == {"stale": 3}
    assert reader.state()["ready"] == [], "nothing but the place is written at every step"
    resumed = source(tmp_path / "live", n=1)
    resumed.restore(reader.state())
    assert [g[0].session_id for g in resumed.take(2)] == ["s5", "s6"]


def test_named_groups_wait_for_their_own(tmp_path):
    reader = source(tmp_path / "live")
    with recording(tmp_path / "live") as store:
        for number, group in enumerate(("a", "b", "a")):
            record(tmp_path, number, store=store, group=group)
    reader.poll()
    assert [[s.session_id for s in g] for g in reader.take(1)] == [["s0", "s2"]] and reader.available == 0


def test_stale_and_unrated_conversations_are_left_out_and_counted(tmp_path):
    reader = source(tmp_path / "live", n=1, max_staleness=1)
    with recording(tmp_path / "live") as store:
        record(tmp_path, 0, store=store, version="1")
        record(tmp_path, 1, store=store, version="4")
        sessions = record(tmp_path, 2, store=store, reward=None)
        store.end(sessions[0], sessions[0].samples(lambda ids: ""), "idle")
    asyncio.run(reader.wait(1, 5))
    ((sample,),) = reader.take(1)
    assert sample.session_id == "s1" and staleness(sample, 5) == 0 and staleness(sample, 7) == 2
    reader.poll()
    assert reader.dropped == {"stale": 1, "unrated": 1}
    with pytest.raises(SlimeError, match="1 left out: stale"):
        asyncio.run(reader.wait(1, 5))


def test_one_server_at_a_time(tmp_path):
    with recording(tmp_path), pytest.raises(SlimeError, match=f"process {os.getpid()}"):
        LiveStore(tmp_path)
    LiveStore(tmp_path).close()


def test_segments_are_followed_across_servers_and_torn_lines_are_not_there(tmp_path):
    live = tmp_path / "live"
    with recording(live) as store:
        record(tmp_path, 0, store=store)
    with (live / "sessions_000001.jsonl").open("ab") as handle:
        handle.write(b'{"session_id": "torn", "samp')
    reader = source(live, n=1)
    reader.poll()
    store = LiveStore(live, segment_bytes=10)
    for number in (1, 2):
        record(tmp_path, number, store=store)
    store.close()
    reader.poll()
    assert [g[0].session_id for g in reader.take(3)] == ["s0", "s1", "s2"]
    assert len(list(live.glob("sessions_*.jsonl"))) == 3


KILLED = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from slimecli.serving.store import LiveStore
from tests.serving.test_store import record
store = LiveStore(Path({folder!r}) / "live")
record(Path({folder!r}), 0, store=store)
record(Path({folder!r}), 1, store=store, reward=None)
print("ready", flush=True)
time.sleep(60)
"""


def test_after_kill_9_ended_sessions_are_there_and_open_ones_go_on(tmp_path):
    code = KILLED.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    live = tmp_path / "live"
    with recording(live) as store:
        (open_one,) = store.recover()
        assert open_one.id == "s1" and len(open_one.turns) == 2
        tokens = open_one.turns[0].prompt_ids + open_one.turns[0].output_ids
        assert open_one.turns[1].prompt_ids[: len(tokens)] == tokens, "prompts are whole again"
        assert len(open_one.samples(lambda ids: "")) == 1
    with recording(live) as store:
        assert [c.id for c in store.recover()] == ["s1"], "an open session outlives any number of servers"
    reader = source(live, n=1)
    reader.poll()
    assert [g[0].session_id for g in reader.take(reader.available)] == ["s0"]


def test_a_server_that_fails_while_it_takes_sessions_up_doubles_no_answer(tmp_path, monkeypatch):
    live = tmp_path / "live"
    store = LiveStore(live)
    record(tmp_path, 0, store=store, reward=None)
    record(tmp_path, 1, store=store, reward=None)
    store.close()
    written = []

    def full(self, session, turn, write=LiveStore.turn):
        if len(written) == 3:
            raise SlimeError("the disk is full")
        written.append(write(self, session, turn))

    monkeypatch.setattr(LiveStore, "turn", full)
    with recording(live) as store, pytest.raises(SlimeError, match="full"):
        store.recover()
    monkeypatch.undo()
    with recording(live) as store:
        assert [len(c.turns) for c in store.recover()] == [2, 2]


def test_what_was_stated_of_a_session_outlives_its_server_before_anything_is_said(tmp_path):
    live = tmp_path / "live"
    with recording(live) as store:
        _, text = scripted(tmp_path, "a")
        sessions = Sessions(text, on_open=store.opened, on_turn=store.turn, on_end=store.end)
        for name in ("kept", "ended"):
            session = sessions.open(name, group="g")
            session.base.label = "4"
            sessions.keep(session)
        sessions.end("ended")
    with recording(live) as store:
        (session,) = store.recover()
    assert (session.id, session.group, session.base.label, session.turns) == ("kept", "g", "4", [])


def test_a_session_that_cannot_be_written_does_not_keep_the_others_open(tmp_path, capsys):
    _, text = scripted(tmp_path, "a", "b")
    ended = []

    def write(session, samples, why):
        if session.id == "bad":
            raise SlimeError("it cannot be written")
        ended.append(session.id)

    sessions = Sessions(text, on_end=write)
    for name in ("bad", "good"):
        sessions.open(name)

    async def wait():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reap(sessions, 0.05), 0.5)

    asyncio.run(wait())
    assert ended == ["good"] and capsys.readouterr().err.count("it cannot be written") == 1


def test_another_kind_of_state_is_refused(tmp_path):
    with pytest.raises(SlimeError, match="prompts from a file"):
        source(tmp_path).restore({"rows": 3})
    with pytest.raises(SlimeError, match="there are no 1 groups"):
        source(tmp_path).take(1)


def test_given_back_groups_come_first(tmp_path):
    reader = source(tmp_path, n=1)
    reader.give_back([[Sample(index=9)]])
    other = source(tmp_path, n=1)
    other.restore(reader.state())
    assert other.take(1)[0][0].index == 9


def test_an_id_used_again_after_its_end_is_another_session(tmp_path):
    live = tmp_path / "live"
    store = LiveStore(live)
    record(tmp_path, 0, store=store)
    record(tmp_path, 0, store=store, reward=None)
    store.close()
    with recording(live) as store:
        assert [c.id for c in store.recover()] == ["s0"]


def test_an_answer_that_comes_after_the_end_is_not_kept(tmp_path):
    _, text = scripted(tmp_path, "late")
    turns = []
    sessions = Sessions(text, on_turn=lambda s, t: turns.append(t))
    chat = Chat(text, sessions)
    pending = chat.prepare(Ask(messages=[{"role": "user", "content": "x"}], session="s"))
    sessions.end("s")
    asyncio.run(chat.answer(pending))
    assert not turns and len(sessions) == 0 and text.counts["late"] == 1


def test_what_nobody_goes_on_with_ends_by_itself(tmp_path):
    _, text = scripted(tmp_path, "hello")
    ended = []
    sessions = Sessions(text, on_end=lambda session, samples, why: ended.append((session.id, len(samples), why)))
    chat = Chat(text, sessions)
    asyncio.run(chat.answer(chat.prepare(Ask(messages=[{"role": "user", "content": "x"}], session="s"))))

    async def wait():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reap(sessions, 0.05), 1.0)

    asyncio.run(wait())
    assert ended == [("s", 1, "idle")] and len(sessions) == 0
