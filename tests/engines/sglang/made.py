"""A made-up SGLang: arguments in the forms that SGLang writes them in, and a server that answers a health check."""

from __future__ import annotations

import textwrap
from pathlib import Path

SERVER_ARGS = '''
    class ServerArgs:
        """The older form: plain fields."""
        model_path: str
        port: int = 30000
        host: str = "127.0.0.1"
        nccl_port: Optional[int] = None
        random_seed: Optional[int] = None
        weight_version: str = "default"
        trust_remote_code: bool = False
        stat_loggers: Optional[Callable] = None
        _internal: int = 0

        @staticmethod
        def add_cli_args(parser):
            parser.add_argument("--sampling-backend", type=str, choices=CHOICES)
            parser.add_argument("--disable-cuda-graph", action=DeprecatedStoreTrueAction)

    class Other:
        not_an_argument: int = 1
'''
FIELDS = """
    class Parallel(msgspec.Struct):
        tp_size: A[int, Arg(help="ranks", aliases=["--tensor-parallel-size"])] = 1
        dp_size: A[int, Arg(help="copies", aliases=["--data-parallel-size"])] = 1
        enable_dp_attention: A[bool, "x"] = False
        fp8_gemm_runner_backend: A[str, Arg(help="x", cli_name="--fp8-gemm-backend")] = "auto"
        hidden: A[bool, Arg(no_cli=True)] = False
        plain: Optional[str] = None
        offload: A[Optional[bool], Arg(help="x", action=argparse.BooleanOptionalAction)] = None
        enable_metrics: A[bool, "Enable them."] = False
        mem_fraction_static: A[Optional[float], "Share of the memory."] = None
        encoder_urls: A[List[str], "URLs."] = []
        cuda_graph_config: A[Optional[CudaGraphConfig], Arg(type_parser=json.loads)] = None
        attention_backend: A[Optional[str], Arg(choices=CHOICES)] = None
        grammar_backend: A[Optional[str], "x"] = None
        disable_overlap_schedule: A[bool, "x"] = False
        sleep_on_idle: A[bool, "x"] = False
        max_running_requests: A[Optional[int], "x"] = None
        max_total_tokens: A[Optional[int], "x"] = None
        context_length: A[Optional[int], "x"] = None
        dtype: A[Literal["auto", "float32", "bfloat16"], "x"] = "auto"
        device: A[Optional[str], "x"] = None
        enable_memory_saver: A[bool, "x"] = False
        nnodes: A[int, "x"] = 1
        node_rank: A[int, "x"] = 0
        dist_init_addr: A[Optional[str], "x"] = None
        disaggregation_mode: A[str, "x"] = "null"
        disaggregation_transfer_backend: A[str, "x"] = "mooncake"
        disaggregation_decode_retraction_backup: A[Optional[str], "x"] = None
"""
SERVER = """
    import http.server, json, os, subprocess, sys, time
    if "--enable-metrics" in sys.argv:
        raise ValueError("metrics are out of order")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if "--max-total-tokens" in sys.argv and sys.argv[sys.argv.index("--max-total-tokens") + 1] == "1":
                return self.send_error(503)
            told = {"argv": sys.argv[1:], "child": child.pid, "threads": os.environ["OMP_NUM_THREADS"],
                    "rank": os.environ.get("RANK"), "cpu": os.environ.get("SGLANG_USE_CPU_ENGINE"),
                    "bound": os.environ.get("SGLANG_CPU_OMP_THREADS_BIND")}
            self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(told).encode())
        def log_message(self, *args): print("GET", self.path, flush=True)
    print("listening", flush=True)
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
TORCH = '''
    """What the stand-ins for a CPU touch of torch; the real one takes seconds to import."""
    import types
    class Library:
        def __init__(self, *words): pass
        def define(self, schema): pass
    library = types.SimpleNamespace(Library=Library)
    cuda = types.SimpleNamespace()
    backends = types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: False))
'''


PATIENT = ("engine.start_timeout_s=800",)
"""of real servers: 25 s to start on two idle cores, several minutes on busy ones"""


def overrides(python: Path | str, *more: str) -> tuple[str, ...]:
    """--set values of a tiny SGLang engine."""
    return (
        "engine.backend=sglang",
        f"engine.python={python}",
        "engine.slots=8",
        "data.max_prompt_tokens=128",
        "rollout.max_response_tokens=384",
        *more,
    )


def installation(folder: Path, interpreter: str) -> Path:
    """Write the package and an interpreter that finds it; returns the interpreter."""
    package = folder / "site" / "sglang"
    for path, text in {
        "__init__.py": "",
        "_platform_stubs.py": "def install_platform_stubs(): pass",
        "srt/server_args.py": SERVER_ARGS,
        "srt/arg_groups/fields/parallel.py": FIELDS,
        "srt/models/qwen3.py": "class Qwen3ForCausalLM(nn.Module): pass",
        "srt/models/mixtral.py": "class MixtralForCausalLM(nn.Module): pass",
        "launch_server.py": SERVER,
    }.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(textwrap.dedent(text), encoding="utf-8")
    (package.parent / "torch.py").write_text(textwrap.dedent(TORCH), encoding="utf-8")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/site" exec "{interpreter}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return python
