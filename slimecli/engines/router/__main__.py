"""`python -m slimecli.engines.router --worker-urls URL ...`: the built-in router. Flags are named as smg's are."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys

from slimecli import env
from slimecli.engines.router.policies import POLICIES, Policy

KEY_VARIABLE = "SLIME_ROUTER_API_KEY"
"""environment variable of the API key: a command line can be read by every user of the machine"""


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog="python -m slimecli.engines.router",
        description=f"The API key, if there is to be one, is read from {KEY_VARIABLE}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=0, help="0 takes a free one")
    add("--worker-urls", nargs="*", default=[], help="engines")
    add("--policy", choices=sorted(POLICIES), default="cache_aware", help="which engine gets a request")
    add("--cache-threshold", type=float, default=0.3, help="share of a prompt that must be known to follow it")
    add("--balance-abs-threshold", type=int, default=64, help="requests by which an engine may be ahead of the idlest")
    add("--balance-rel-threshold", type=float, default=1.5, help="how many times more than the idlest one may have")
    add("--max-tree-size", type=int, default=1 << 16, help="pieces of prompts remembered")
    add("--retry-max-retries", type=int, default=3, help="further engines asked when one is lost")
    add("--queue-timeout-secs", type=float, default=60.0, help="how long a request waits when no engine lives")
    add("--max-concurrent-requests", type=int, default=8192, help="more are turned away with 429")
    add("--max-payload-size", type=int, default=256 << 20, help="largest request (bytes)")
    add("--max-buffered-request-bytes", type=int, default=1 << 30, help="of requests in flight, all together")
    add("--request-timeout-secs", type=float, default=1800.0, help="deadline of a request")
    add("--health-check-interval-secs", type=float, default=5.0, help="between two looks at an engine")
    add("--health-check-timeout-secs", type=float, default=5.0, help="deadline of a look")
    add("--health-failure-threshold", type=int, default=3, help="looks in vain after which an engine is given up")
    add("--parent", type=int, default=0, help="process without which this one ends; 0: none")
    return parser


def main() -> int:
    """Parse and serve until SIGTERM or Ctrl-C."""
    args = build_parser().parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(args))
    return 0


async def serve(args: argparse.Namespace) -> None:
    """Listen until told to stop, or until the process named by --parent is gone."""
    from aiohttp import web

    from slimecli.engines.router.app import Gateway, Settings, build_app
    from slimecli.engines.router.workers import Workers, log

    settings = Settings(
        policy=_policy(args),
        retries=args.retry_max_retries,
        wait_s=args.queue_timeout_secs,
        max_in_flight=args.max_concurrent_requests,
        max_body=args.max_payload_size,
        max_buffered=args.max_buffered_request_bytes,
        timeout_s=args.request_timeout_secs,
        api_key=env.secret(KEY_VARIABLE),
    )
    workers = Workers(
        interval_s=args.health_check_interval_secs,
        timeout_s=args.health_check_timeout_secs,
        threshold=args.health_failure_threshold,
    )
    gateway = Gateway(settings, workers)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(build_app(gateway), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await gateway.open(args.worker_urls)
    try:
        await runner.setup()
        await web.TCPSite(runner, args.host, args.port, backlog=4096).start()
        log.info("listening on %s port %d, policy %s", args.host, runner.addresses[0][1], args.policy)
        while not stop.is_set() and (not args.parent or os.getppid() == args.parent):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 1.0)
    finally:
        await runner.cleanup()
        await gateway.close()


def _policy(args: argparse.Namespace) -> Policy:
    from slimecli.engines.router.policies import CacheAware
    from slimecli.lookup import look_up

    kind = look_up(POLICIES, args.policy, "policy")
    if kind is not CacheAware:
        plain: Policy = kind()
        return plain
    return CacheAware(args.cache_threshold, args.balance_abs_threshold, args.balance_rel_threshold, args.max_tree_size)


if __name__ == "__main__":
    raise SystemExit(main())
