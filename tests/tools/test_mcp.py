"""MCP servers over stdio: a real child process."""

import asyncio
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from slimecli.errors import SlimeError
from slimecli.recipe_tools import ToolsSection
from slimecli.tools import mcp
from slimecli.tools.base import Tool, ToolError
from slimecli.tools.mcp import McpServer
from slimecli.tools.parsers import ToolCall
from slimecli.tools.toolbox import Toolbox

COMMAND = shlex.join([sys.executable, str(Path(__file__).parent / "mcp_server.py")])


@pytest.fixture
def box():
    toolbox = Toolbox(ToolsSection(use=["calculator"], mcp={"test": COMMAND}, timeout_s=1.0))
    yield toolbox
    toolbox.close()


def call(box, name, **arguments):
    return asyncio.run(box.call(ToolCall(name=name, arguments=arguments)))


def test_all_pages_of_tools_are_offered(box):
    assert list(box.tools) == ["calculator", "add", "fail", "hang", "die", "picture"]
    schema = box.schemas(["add"])[0]["function"]
    assert schema["description"] == "Adds two numbers."
    assert schema["parameters"]["required"] == ["a", "b"]


def test_calls_and_errors(box):
    assert call(box, "add", a=2, b=3).text == "5"
    broken = call(box, "fail")
    assert (broken.text, broken.failed) == ("Error: it is broken", True)
    assert call(box, "picture").text == "look:\n[image omitted]"
    assert "lacks the argument b" in call(box, "add", a=2).text


def test_many_calls_at_once_get_their_own_answers(box):
    async def work():
        return await asyncio.gather(*(box.call(ToolCall(name="add", arguments={"a": i, "b": i})) for i in range(20)))

    assert [r.text for r in asyncio.run(work())] == [str(2 * i) for i in range(20)]


def test_a_hanging_call_meets_its_deadline_and_the_server_lives_on(box):
    late = call(box, "hang")
    assert (late.text, late.failed) == ("Error: no result within 1 s", True)
    assert late.seconds < 3
    assert call(box, "add", a=1, b=1).text == "2"


def test_a_server_that_dies_is_started_again_for_the_next_call_but_not_forever(box):
    for _ in range(4):
        with pytest.raises(SlimeError, match=r"'test' ended with exit code 3: .*goodbye"):
            call(box, "die")
    with pytest.raises(SlimeError, match="died 4 times"):
        call(box, "add", a=1, b=1)


def test_a_restarted_server_works(box):
    with pytest.raises(SlimeError, match="exit code 3"):
        call(box, "die")
    assert call(box, "add", a=1, b=1).text == "2"


def test_the_process_is_gone_after_close():
    server = McpServer("test", COMMAND, timeout_s=1.0)
    pid = server._life.process.pid
    server.close()
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_command_that_does_not_start_or_speak():
    with pytest.raises(SlimeError, match="cannot be started"):
        McpServer("x", "/no/such/program", timeout_s=1.0)
    with pytest.raises(SlimeError, match=r"(?s)'x' (ended with exit code 4|has ended)"):
        McpServer("x", shlex.join([sys.executable, "-c", "import sys; sys.exit(4)"]), timeout_s=1.0)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(SlimeError, match="two tools are named 'add'"):
        Toolbox(ToolsSection(mcp={"a": COMMAND, "b": COMMAND}))


DEAF = """
import json, sys, time
for _ in range(3):
    number = json.loads(sys.stdin.readline()).get("id")
    tool = {"name": "note", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}
    if number:
        print(json.dumps({"jsonrpc": "2.0", "id": number, "result": {"tools": [tool]}}), flush=True)
time.sleep(60)
"""


def test_a_server_that_reads_no_more_holds_up_nobody():
    box = Toolbox(ToolsSection(mcp={"deaf": shlex.join([sys.executable, "-c", DEAF])}, timeout_s=0.5))

    async def work():
        ticks = asyncio.ensure_future(tick())
        late = await box.call(ToolCall(name="note", arguments={"text": "x" * 1_000_000}))
        ticks.cancel()
        return late, most[0]

    async def tick():
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.05)
            most[0] = max(most[0], time.monotonic() - before)

    most = [0.0]
    late, longest = asyncio.run(work())
    box.close()
    assert late.text == "Error: no result within 0.5 s" and longest < 0.5


LEAVES_A_CHILD = """
import json, os, subprocess, sys, time
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "tools/call":
        if message["params"]["arguments"]:
            subprocess.Popen(["sleep", "1"])
            os._exit(0)
        time.sleep(2)
    if "id" in message:
        tool = {"name": "go", "inputSchema": {"type": "object"}}
        result = {"tools": [tool], "content": [{"type": "text", "text": "done"}]}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def test_a_dead_servers_late_end_does_not_fail_the_calls_of_the_next():
    """A child that keeps the dead server's output open makes its end known only when the next one works already."""
    box = Toolbox(ToolsSection(mcp={"x": shlex.join([sys.executable, "-c", LEAVES_A_CHILD])}, timeout_s=10))

    async def work():
        first = asyncio.ensure_future(box.call(ToolCall(name="go", arguments={"end": 1})))
        await asyncio.sleep(0.3)
        second = await box.call(ToolCall(name="go"))
        with pytest.raises(SlimeError, match="ended with exit code 0"):
            await first
        return second

    second = asyncio.run(work())
    box.close()
    assert (second.text, second.failed) == ("done", False)


def test_a_server_that_never_answers_is_ended(monkeypatch):
    monkeypatch.setattr("slimecli.tools.mcp.START_S", 0.3)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(popen(*args, **more)) or started[-1])
    with pytest.raises(SlimeError, match="did not answer initialize within 0.3 s"):
        McpServer("mute", "sleep 60", timeout_s=1.0)
    assert started[0].poll() is not None


def test_a_schema_that_leaves_an_argument_open():
    async def call(arguments):
        return "ok"

    tool = Tool(name="f", description="f", parameters={"type": "object", "properties": {"a": True}}, call=call)
    tool.check({"a": [1]})
    assert tool.as_stated({"a": 1}) == {"a": 1}


def test_an_answer_that_is_no_object_is_told(box):
    future = Future()
    mcp._settle(future, {"id": 1, "result": [1]})
    with pytest.raises(ToolError, match="no object"):
        future.result(0)
    life = box._servers[0]._life
    box._servers[0]._hear(life, b'{"id": [1], "result": {}}')
    assert call(box, "add", a=1, b=1).text == "2"
