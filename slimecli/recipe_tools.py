"""The tools section of a recipe. The string under each field is its help text, unit included."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slimecli.recipe_sections import Section


class ToolsSection(Section):
    """What the model may call with `rollout.custom_generate = "tool_loop"`."""

    use: list[str] = []
    """tools: `calculator`, `python`, `search`, and own functions as `file.py:function` or `module:function`"""
    mcp: dict[str, str] = {}
    """MCP servers that speak over stdin and stdout: name -> command line; all of their tools are offered"""
    shown: bool = True
    """put what the tools are into the prompt, as the chat template writes it; false: the model knows them already"""
    call_format: str = "auto"
    """how the model writes a call: `hermes`, `qwen3_coder`, `llama3`, `glm`, `deepseek`, ...; auto: by chat template"""
    max_turns: int = Field(8, gt=0)
    """requests to the engine per answer, the last word included"""
    max_turn_tokens: int = Field(0, ge=0)
    """token budget of one turn; 0: what is left of rollout.max_response_tokens (tokens)"""
    max_output_tokens: int = Field(512, gt=0)
    """longest tool output that the model is shown; the rest is cut off, and it is told so (tokens)"""
    timeout_s: float = Field(20.0, gt=0)
    """deadline of one tool call (seconds)"""
    concurrency: int = Field(8, gt=0)
    """tool calls at the same time, over all answers"""
    corpus: str = ""
    """for `search`: .jsonl or .parquet file with columns `text` and optionally `title`"""
    search_results: int = Field(3, gt=0)
    """for `search`: passages per call"""
    python_memory_mb: int = Field(1024, ge=64)
    """for `python`: address space of one process (MiB)"""
    python_isolation: Literal["required", "best", "limits"] = "best"
    """for `python`: what the code must be cut off from: network, processes and files; processes; or nothing"""
