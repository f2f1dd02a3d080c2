"""What a recipe says of where things run. The string under each field is its help text, unit included."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slimecli.recipe_sections import Section


class ServerGroupSection(Section):
    """Servers of one kind and with the same arguments."""

    kind: Literal["regular", "prefill", "decode"] = "regular"
    """prefill and decode: prompts are computed by the ones, answers continued by the others (sglang, with a router)"""
    replicas: int = Field(1, gt=0)
    """servers of this kind"""
    sglang: dict[str, Any] = {}
    """their arguments, over those of [sglang]"""


class ServedModelSection(Section):
    """A frozen model that is served beside the policy: a teacher, a judge, a reward model."""

    name: str = Field(min_length=1)
    """how others call it: `model:NAME` in place of an address, args.sglang_model_routers[NAME] in hooks"""
    path: str = Field(min_length=1)
    """HF folder, or a Megatron checkpoint (torch_dist) with config and tokenizer in its folder `hf`"""
    replicas: int = Field(1, gt=0)
    """servers to start"""
    slots: int = Field(0, ge=0)
    """requests at the same time per server; 0: engine.slots"""
    max_context: int = Field(0, ge=0)
    """prompt plus answer (tokens); 0: the policy's"""
    sglang: dict[str, Any] = {}
    """its arguments, over those of [sglang]"""


class EngineSection(Section):
    """The rollout engine."""

    backend: Literal["embedded", "sglang"] = "embedded"
    """who generates"""
    urls: list[str] = []
    """engines that already run; empty: start `replicas` of them"""
    urls_wait_s: float = Field(0.0, ge=0)
    """how long engines of `urls` may take to answer when they are first needed (seconds); 0: all must be there when the
    run begins"""
    replicas: int = Field(1, gt=0)
    """engines to start"""
    groups: list[ServerGroupSection] = []
    """servers of several kinds in place of `replicas` equal ones (sglang)"""
    models: list[ServedModelSection] = []
    """frozen models to serve beside the policy"""
    threads: int = Field(1, gt=0)
    """CPU threads per engine"""
    slots: int = Field(64, gt=0)
    """answers decoded at the same time per engine"""
    max_context: int = Field(0, ge=0)
    """prompt plus answer (tokens); 0: data.max_prompt_tokens + rollout.max_response_tokens"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """compute dtype; auto: float32 on a CPU, the model's on a GPU"""
    host: str = "127.0.0.1"
    """address the servers bind to; loopback unless you say otherwise, or the machine's own in the cluster where one is
    joined by cluster.address"""
    python: str = ""
    """sglang: interpreter of the environment that has SGLang; empty: the one that runs slime"""
    api_key_env: str = ""
    """environment variable with the key that servers ask for and clients send; empty: no key"""
    start_timeout_s: float = Field(300.0, gt=0)
    """deadline for an engine to answer its health check (seconds)"""
    on_failure: Literal["restart", "stop"] = "restart"
    """an engine that dies or falls silent. restart: others take over its requests while it is started anew and given
    the current weights (one of `urls`: until it answers again); stop: the run ends with an error"""
    max_restarts: int = Field(3, ge=0)
    """restarts of each engine; one that fails again is left out, and the run ends when none is left"""
    health_interval_s: float = Field(5.0, gt=0)
    """time between two looks at an engine that has requests in flight (seconds)"""
    health_deadline_s: float = Field(60.0, gt=0)
    """an engine that answers no look for so long is given up (seconds)"""
    router: Literal["auto", "builtin", "smg", "sglang", "none"] = "auto"
    """what stands in front of several engines for those who speak HTTP themselves: custom generate functions, agents,
    `slime serve`. auto: smg where it is installed, else the built-in one; sglang: sglang-router; none: they get the
    first engine's address. slime's own requests need no router"""


class SyncSection(Section):
    """How new weights reach the engines."""

    kind: Literal["auto", "in_process", "shared_memory", "tensor", "distributed", "disk", "disk_delta"] = "auto"
    """auto: in_process in one process, shared_memory on one host, disk else; see docs/weight-sync.md"""
    running: Literal["auto", "finish", "abort", "continue"] = "auto"
    """what becomes of answers under way when new weights come. finish: they are waited for; abort: they end with what
    they have; continue: they go on with the new weights, and say which token is of which version; auto: continue where
    rollout.fully_async, else finish"""
    timeout_s: float = Field(300.0, gt=0)
    """deadline of one update (seconds)"""
    interval: int = Field(1, gt=0)
    """steps between two updates; above 1 answers are up to interval - 1 versions old, which rollout.max_staleness must
    allow"""


class ClusterSection(Section):
    """Where processes run."""

    backend: Literal["ray", "local"] = "ray"
    """ray: trainer and engines are Ray actors; local: all in this process, as single commands do"""
    address: str = ""
    """Ray cluster to join; empty: start a local one"""
    placement: Literal["auto", "colocated", "disaggregated"] = "auto"
    """colocated: trainer and engines use the same GPUs in turn, the one sleeps while the other works; disaggregated:
    each has its own; auto: disaggregated where the cluster has GPUs for both, or where they work at the same time"""
    gpus_per_machine: int = Field(8, gt=0)
    """GPUs of a machine: an engine with more of them is spread over several (sglang)"""
    start_timeout_s: float = Field(300.0, gt=0)
    """deadline for all actors to be ready (seconds)"""
