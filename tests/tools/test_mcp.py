"""MCP servers over stdio: a real child process."""

import asyncio
import os
import shlex
import sys
from pathlib import Path

import pytest

from slimecli.errors import SlimeError
from slimecli.recipe_tools import ToolsSection
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
    pid = server._process.pid
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
