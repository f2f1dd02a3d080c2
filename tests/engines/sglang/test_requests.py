"""Every payload that slime sends an SGLang server has only fields that SGLang's own request classes have.

Read from the installed SGLang's io_struct.py where it is there, else from the list recorded from 0.5.21.
"""

from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path

import pytest

from slimecli.engines.http import HttpEngine
from slimecli.engines.sglang import fields
from slimecli.engines.sglang.proof import Checksums
from slimecli.protocols import WeightUpdate
from slimecli.recipe import load_recipe
from slimecli.rollout.sampling import eval_sampling, rollout_sampling
from slimecli.sync.stage import stage_weights
from slimecli.weights.hf import HfFolder

RECORDED = Path(__file__).resolve().parents[2] / "golden" / "sglang_requests.json"
CLASSES = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/weights_checker": "CheckWeightsReqInput",
}


def class_fields(text: str) -> dict[str, list[str]]:
    """Class -> its fields and those of its bases in the same file."""
    nodes = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)}

    def of(node):
        own = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
        return own + [f for b in node.bases if ast.unparse(b) in nodes for f in of(nodes[ast.unparse(b)])]

    return {name: sorted(set(of(node))) for name, node in nodes.items()}


def installed(python) -> dict[str, list[str]]:
    """What the installed SGLang takes, sampling parameters included."""
    managers = fields.installation(str(python)).folder / "srt"
    found = class_fields((managers / "managers" / "io_struct.py").read_text(encoding="utf-8"))
    taken = {name: found[name] for name in CLASSES.values()}
    sampling = class_fields((managers / "sampling" / "sampling_params.py").read_text(encoding="utf-8"))
    return taken | {"SamplingParams": sampling["SamplingParams"]}


@pytest.fixture(scope="module")
def taken():
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.sglang
def test_the_recorded_fields_are_those_of_the_installed_sglang(sglang_python, taken):
    """Record anew: json.dump(installed(python)) into tests/golden/sglang_requests.json."""
    assert installed(sglang_python) == taken


class Recorder(HttpEngine):
    """Takes everything, and says of itself what an SGLang with the folder's weights says."""

    def __init__(self, folder):
        super().__init__("http://recorder", timeout_s=5)
        sums = Checksums(dtype="float32")
        for name, tensor in HfFolder(folder).iterate():
            sums.update(name, tensor)
        self.ranks = [{"checksums": rank} for rank in sums.ranks]
        self.sent = []

    async def call(self, method, path, payload, doing):
        path = path.partition("?")[0]
        if payload is not None:
            self.sent.append((path, payload))
        answers = {
            "/server_info": {"version": "0.5.21", "dtype": "float32", "device": "cpu", "tp_size": 1},
            "/model_info": {"weight_version": "7"},
            "/weights_checker": {"success": True, "ranks": self.ranks},
        }
        return answers.get(path, {"success": True, "message": "ok"})


@pytest.fixture(scope="module")
def sent(models, tmp_path_factory):
    """(path, payload) of everything that slime says to an engine."""
    folder = models("qwen3", 1)
    client = Recorder(folder)
    recipe = load_recipe("quickstart")

    async def scene():
        for sampling in (rollout_sampling(recipe, [2]), eval_sampling(recipe, [2], greedy=True)):
            params = [{**sampling, "sampling_seed": 1}]
            await client.generate({"input_ids": [[1]], "sampling_params": params, "return_logprob": True})
        for mode in ("abort", "retract", "in_place"):
            await client.pause(mode)
        await client.resume()
        await client.abort()
        await client.abort("x")
        await client.sleep()
        await client.wake()
        group = {"master_address": "127.0.0.1", "master_port": 1, "group_name": "g", "backend": "gloo"}
        await client.join_group({**group, "rank_offset": 1, "world_size": 2})
        await client.leave_group("g")
        for kind in ("disk", "shared_memory", "tensor"):
            staged = stage_weights(
                HfFolder(folder).iterate(), kind, version=7, folder=tmp_path_factory.mktemp("s") / "w", like=folder
            )
            receipt = await client.update_weights(staged.update)
            assert (receipt.version, receipt.bytes_) == (7, staged.bytes_), kind
        received = {"names": ["x"], "dtypes": ["float32"], "shapes": [[3, 2]], "group_name": "g"}
        receipt = await client.update_weights(WeightUpdate(kind="distributed", version=7, group=received))
        assert receipt.bytes_ == 24

    asyncio.run(scene())
    return client.sent


def test_every_call_is_known(sent):
    said = {path for path, _ in sent} - {"/flush_cache"}
    assert said == set(CLASSES)


def test_payloads_have_only_fields_that_sglang_takes(sent, taken):
    wrong = {}
    for path, payload in sent:
        unknown = payload.keys() - set(taken[CLASSES[path]]) if path in CLASSES else set()
        if unknown:
            wrong.setdefault(path, set()).update(unknown)
    assert wrong == {}


def test_sampling_parameters_are_sglangs(sent, taken):
    said = {name for path, payload in sent if path == "/generate" for p in payload["sampling_params"] for name in p}
    assert "temperature" in said and said <= set(taken["SamplingParams"]), said - set(taken["SamplingParams"])
