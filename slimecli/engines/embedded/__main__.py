"""`python -m slimecli.engines.embedded --model DIR`: an engine over HTTP. Prints {"url": ...} when ready."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from pathlib import Path

from slimecli import console, env

KEY_VARIABLE = "SLIME_ENGINE_API_KEY"
PARENT_S = 1.0
"""time between two looks at whether the parent is alive (seconds)"""


async def serve(args: argparse.Namespace) -> None:
    """Until SIGTERM or Ctrl-C."""
    from slimecli.engines.embedded.engine import EmbeddedEngine
    from slimecli.engines.embedded.server import Server

    engine = EmbeddedEngine(
        Path(args.model),
        slots=args.slots,
        max_context=args.max_context,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
    )
    server = Server(engine, api_key=args.api_key, allow_pickle=args.allow_pickle)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        console.emit({"url": await server.start(args.host, args.port)})
        while not stop.is_set() and args.parent in (0, os.getppid()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PARENT_S if args.parent else None)
    finally:
        await engine.close()
        await server.stop()


def main() -> int:
    """Parse and serve."""
    from slimecli.errors import SlimeError

    parser = argparse.ArgumentParser(prog="python -m slimecli.engines.embedded", description=__doc__)
    parser.add_argument("--model", required=True, help="HF folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--max-context", type=int, default=2048, help="prompt plus answer (tokens)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--api-key", default=env.secret(KEY_VARIABLE), help=f"default: what {KEY_VARIABLE} holds")
    parser.add_argument("--parent", type=int, default=0, help="process number: end when this is no longer the parent")
    parser.add_argument("--allow-pickle", action="store_true", help="open pickled tensors: trusted callers only")
    args = parser.parse_args()
    env.set_threads(args.threads)
    env.quiet_libraries()
    try:
        asyncio.run(serve(args))
    except SlimeError as error:
        console.fail(str(error))
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
