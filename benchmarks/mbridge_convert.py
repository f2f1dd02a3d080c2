"""The usual way to a Megatron checkpoint: build the model, load the HF weights into it, save it. Run by convert.py.

    python benchmarks/mbridge_convert.py HF_FOLDER OUT

mbridge maps the weights, megatron-core builds the model and writes the checkpoint, as slime's and verl's tools do. On a
machine without a GPU, stand-ins take the place of Transformer Engine's modules (tests/megatron), and initialising the
weights, which would be for nothing, is left out. The last line of stdout is {"seconds", "peak_bytes"}.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import convert

UNSTATED = {"attention_dropout": 0.0, "initializer_range": 0.02, "hidden_act": "silu", "attention_bias": False}
"""what mbridge looks for in a config and transformers has as defaults"""


def work(_: Any, hf: Path, out: Path) -> None:
    """Body of the only rank."""
    from megatron.core import dist_checkpointing

    from tests.megatron.test_mbridge import _bridge

    begin = time.perf_counter()
    bridge = _bridge({**UNSTATED, **json.loads((hf / "config.json").read_text())})
    model = bridge._model_provider([])(pre_process=True, post_process=True)
    bridge.load_weights([model], str(hf))
    out.mkdir(parents=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(out))
    convert.flush(out)
    sys.stdout.write(json.dumps({"seconds": time.perf_counter() - begin, "peak_bytes": convert.peak_bytes()}) + "\n")


def main() -> None:
    """One rank, in this process."""
    from tests.megatron import harness

    with tempfile.TemporaryDirectory() as folder:
        harness._rank(0, harness.World(), f"{folder}/store", work, (Path(sys.argv[1]), Path(sys.argv[2])))


if __name__ == "__main__":
    main()
