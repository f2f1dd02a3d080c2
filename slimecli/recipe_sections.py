"""The sections of a recipe. The string under each field is its help text, unit included."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Frozen, documented, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model, and where its weights come from."""

    name: str = ""
    """registry name, see `slime models`; empty when `path` has a config.json of a known family"""
    path: str = ""
    """local HF folder with config.json, weights and tokenizer, or a Megatron checkpoint (torch_dist) with config and
    tokenizer in its folder `hf`; empty: from the hub, or new for `init`"""
    revision: str = ""
    """hub revision (branch, tag or commit) to pin; empty: the registry's"""
    source: Literal["hub", "path", "init"] = "hub"
    """where weights come from: `hub`, `path`, or `init` = new random weights in the registry's shape"""
    init_std: float = Field(0.02, gt=0)
    """standard deviation of new weights, for source = init"""
    tokenizer_vocab: int = Field(0, ge=0)
    """train a byte-level BPE of this many entries on the training data, for source = init; 0: take the model's own"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of trained, published and exported weights; optimizer state is always float32"""
    trust_remote_code: bool = False
    """run Python code that comes with the model folder"""


class CurriculumSection(Section):
    """Adaptive difficulty: levels of prompts, chosen by what the policy can do. One of the first three turns it on."""

    levels: list[dict[str, Any]] = []
    """source_args of each level, the easiest first, beside `data.source_args`; `data.count` is divided among them"""
    auto_levels: int = Field(0, ge=0)
    """so many levels of reasoning-gym's own curriculum for the task; 0: none"""
    key: str = ""
    """metadata key that holds the level, for rows that come with one, e.g. `level` of MATH"""
    rate: float = Field(0.05, gt=0, le=1)
    """weight of a new group in the running success rate of its level"""
    floor: float = Field(0.05, gt=0, le=1)
    """least weight of a level; one that is solved half of the time weighs 1"""

    @property
    def is_on(self) -> bool:
        """Whether there are levels."""
        return bool(self.levels or self.auto_levels or self.key)


class DataSection(Section):
    """Prompts, and demonstrations for SFT."""

    train: str = ""
    """prompt data: .jsonl, .parquet, .csv or .json, with optional slice FILE@[0:100]; a data set's folder, or the hub's
    `hf://OWNER/NAME#SUBSET/SPLIT`; `live:` or `live:RUN`: conversations that `slime serve --record` keeps; empty: made
    by `source`"""
    source: str = ""
    """generator of prompts, e.g. `reasoning_gym:basic_arithmetic`; empty: `train` is a file"""
    source_args: dict[str, Any] = {}
    """arguments of the generator"""
    curriculum: CurriculumSection = CurriculumSection()
    count: int = Field(0, ge=0)
    """rows to take from the source for training; 0: all of a file"""
    holdout: int = Field(0, ge=0)
    """rows kept out of training for evaluation"""
    demonstrations: str = ""
    """how SFT answers are written for a generated task, see `slime prepare-data --list`; empty: the rows carry them"""
    demonstration_args: dict[str, Any] = {}
    """arguments of the demonstration writer"""
    input_key: str = "prompt"
    """column with the prompt: text or chat messages"""
    label_key: str = "label"
    """column with the answer the reward compares with"""
    messages_key: str = "messages"
    """column with a whole conversation, for SFT"""
    metadata_key: str = "metadata"
    """column with a dict of free data"""
    tool_key: str = "tools"
    """column with tool definitions"""
    convert: str = ""
    """how rows of a well-known set become prompt, label and metadata, e.g. `gsm8k`; see `slime prepare-data --list`, or
    file.py:function (row, rng) -> row"""
    loss_mask_type: Literal["turns", "last", "answer", "qwen", "qwen3", "qwen3_5", "distill_qwen"] = "turns"
    """SFT: which tokens are trained on. `turns`: every assistant turn; `last`: the last one; `answer`: the last one
    verbatim after the generation prompt. slime's names: the qwen ones are `turns` of a Qwen template, `distill_qwen` is
    `answer`"""
    system_prompt: str = ""
    """put before every prompt"""
    prompt_template: str = ""
    """text around every prompt, with {prompt} where that goes; of chat messages, around the last user message"""
    apply_chat_template: bool = True
    """render prompts with the tokenizer's chat template; false: prompts are used verbatim"""
    mix: dict[str, float] = {}
    """metadata.source_name -> weight: how often prompts of a source come, whatever its size; empty: all rows alike"""
    workers: int = Field(0, ge=0)
    """processes that render and tokenize prompts while they are read; 0: this one does it"""
    stream: bool = False
    """read prompts from the file when their turn comes, instead of holding all of them in memory"""
    max_prompt_tokens: int = Field(1024, gt=0)
    """longer prompts are dropped by prepare-data, and counted (tokens)"""
    skip_broken: bool = False
    """prepare-data and offline rollout leave out rows that cannot be read, and count them; false: stop at the first"""
    shuffle: bool = True
    """new seeded order every epoch; false: file order"""

    @property
    def is_live(self) -> bool:
        """Whether training prompts are conversations that a server records."""
        return self.train.startswith("live:")


class TrainerSection(Section):
    """How weights are trained."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """who trains"""
    bridge: Literal["slime", "mbridge"] = "slime"
    """whose weight maps lead from the model folder to Megatron and back: slime's, or those of the package mbridge"""
    processes: int = Field(1, gt=0)
    """trainer processes: GPUs, or gloo ranks on a CPU"""
    threads: int = Field(1, gt=0)
    """CPU threads per process; more than one loses on shared cores"""
    global_batch_size: int = Field(256, gt=0)
    """answers per optimizer step"""
    steps_per_rollout: int = Field(1, gt=0)
    """optimizer steps per rollout; batch_size x n_samples_per_prompt = global_batch_size x steps_per_rollout"""
    max_tokens_per_micro_batch: int = Field(8192, gt=0)
    """token budget of a packed micro-batch, per process (tokens)"""
    lr: float = Field(1e-6, ge=0)
    """peak learning rate"""
    warmup_steps: int = Field(0, ge=0)
    """optimizer steps of linear warm-up"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """shape after warm-up, over all optimizer steps of the run"""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """last learning rate as a share of the peak"""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Adam: decay of the first moment"""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Adam: decay of the second moment"""
    adam_eps: float = Field(1e-8, gt=0)
    """Adam: added to the denominator"""
    weight_decay: float = Field(0.0, ge=0)
    """decoupled weight decay, on matrices only"""
    clip_grad: float = Field(1.0, ge=0)
    """largest gradient norm; 0: no clipping"""
    activation_checkpointing: bool = False
    """recompute activations in the backward pass"""
    logits_chunk_tokens: int = Field(1024, gt=0)
    """rows of logits alive at a time (tokens)"""
    shared_prefix: bool = True
    """compute a group's common prompt once per micro-batch in training, where the backend can"""


class SftSection(Section):
    """Supervised warm-up before RL, or the whole job of an SFT recipe."""

    steps: int = Field(0, ge=0)
    """optimizer steps; 0: no SFT stage"""
    batch_size: int = Field(64, gt=0)
    """demonstrations per optimizer step"""
    lr: float = Field(1e-5, gt=0)
    """peak learning rate"""
    warmup_steps: int = Field(0, ge=0)
    """optimizer steps of linear warm-up"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """shape after warm-up"""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """last learning rate as a share of the peak"""
    max_tokens: int = Field(0, ge=0)
    """longer conversations are dropped by prepare-data, and counted; 0: none is (tokens)"""
    data: str = ""
    """demonstrations (.jsonl or .parquet with messages); empty: what prepare-data wrote"""


class CheckpointSection(Section):
    """What is kept to resume from."""

    interval: int = Field(10, gt=0)
    """steps between checkpoints; the last step always has one"""
    keep: int = Field(2, gt=0)
    """complete checkpoints kept; older ones go only after a newer one is complete"""


class GatesSection(Section):
    """What must hold, and what happens if it does not."""

    action: Literal["warn", "stop"] = "stop"
    """what a broken gate does"""
    max_logprob_gap: float = Field(0.05, gt=0)
    """mean absolute gap between engine and trainer log-probs of the sampled tokens, every step"""
    first_step_kl: float = Field(1e-6, gt=0)
    """largest |KL| between policy and reference, and between policy and old policy, at the first step"""
    max_zero_variance: float = Field(1.0, gt=0, le=1)
    """largest share of groups without any difference in reward, every step"""


class ObserveSection(Section):
    """Trackers besides metrics.jsonl."""

    tensorboard: bool = False
    """write tensorboard/ in the run directory"""
    wandb_project: str = ""
    """Weights & Biases project; empty: off"""


class ExportSection(Section):
    """The HF folder at the end."""

    dtype: Literal["", "float32", "bfloat16"] = ""
    """dtype of the exported weights; empty: model.dtype"""
    max_shard_bytes: int = Field(5_000_000_000, gt=0)
    """largest safetensors shard (bytes)"""
