"""What a recipe says of where things run. The string under each field is its help text, unit included."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slimecli.recipe_sections import Section


class EngineSection(Section):
    """The rollout engine."""

    backend: Literal["embedded", "sglang"] = "embedded"
    """who generates"""
    urls: list[str] = []
    """engines that already run; empty: start `replicas` of them"""
    replicas: int = Field(1, gt=0)
    """engines to start"""
    threads: int = Field(1, gt=0)
    """CPU threads per engine"""
    slots: int = Field(64, gt=0)
    """answers decoded at the same time per engine"""
    max_context: int = Field(0, ge=0)
    """prompt plus answer (tokens); 0: data.max_prompt_tokens + rollout.max_response_tokens"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """compute dtype; auto: float32 on a CPU, the model's on a GPU"""
    host: str = "127.0.0.1"
    """address the servers bind to; loopback unless you say otherwise"""
    start_timeout_s: float = Field(300.0, gt=0)
    """deadline for an engine to answer its health check (seconds)"""


class SyncSection(Section):
    """How new weights reach the engines."""

    kind: Literal["auto", "in_process", "shared_memory", "distributed", "disk"] = "auto"
    """auto: in_process in one process, shared_memory on one host, distributed else"""
    timeout_s: float = Field(300.0, gt=0)
    """deadline of one update (seconds)"""


class ClusterSection(Section):
    """Where processes run."""

    backend: Literal["ray", "local"] = "ray"
    """ray: trainer and engines are Ray actors; local: all in this process, as single commands do"""
    address: str = ""
    """Ray cluster to join; empty: start a local one"""
    start_timeout_s: float = Field(300.0, gt=0)
    """deadline for all actors to be ready (seconds)"""
