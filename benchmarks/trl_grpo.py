"""The other half of grpo_step: TRL's GRPOTrainer. Runs in TRL's own environment, so it imports nothing of slime.

Writes one JSON line per finished step to --perf: {"step", "seconds/step", "response_length", "reward"}.
Everything that TRL offers to be quick on this task is on, what slows it down (gradient checkpointing) is off.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """One line per step, from the end of the step before to the end of this one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs):
        self._last = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "reward" not in logs:
            return
        now = time.perf_counter()
        record = {
            "step": state.global_step,
            "seconds/step": now - self._last,
            "response_length": logs["completions/mean_length"],
            "reward": logs["reward"],
        }
        self._last = now
        with self._path.open("a") as handle:
            handle.write(json.dumps(record) + "\n")


def score(completions: list[str], label: list[str], **kwargs: object) -> list[float]:
    """1 when the text after the last `=` is the answer."""
    return [float(text.rpartition("=")[2].strip() == right) for text, right in zip(completions, label, strict=True)]


def config(flags: argparse.Namespace, folder: str) -> GRPOConfig:
    """TRL's configuration of the same job."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        seed=flags.seed,
        max_steps=flags.steps,
        per_device_train_batch_size=flags.prompts * flags.group,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        num_generations=flags.group,
        num_iterations=1,
        max_completion_length=flags.max_new_tokens,
        generation_kwargs={"min_new_tokens": flags.min_new_tokens} if flags.min_new_tokens else None,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=flags.lr,
        lr_scheduler_type="linear",
        warmup_steps=5,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


def main() -> None:
    """Train, and write what each step took."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--model", required=True, help="HF folder with tokenizer")
    flags.add_argument("--prompts-file", type=Path, required=True, help='JSON lines {"prompt": text, "label": text}')
    flags.add_argument("--perf", type=Path, required=True)
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--steps", type=int, default=25)
    flags.add_argument("--prompts", type=int, default=32)
    flags.add_argument("--group", type=int, default=8)
    flags.add_argument("--max-new-tokens", type=int, default=24)
    flags.add_argument("--min-new-tokens", type=int, default=0)
    flags.add_argument("--lr", type=float, default=4e-4)
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args()
    torch.set_num_threads(args.threads)
    rows = [json.loads(line) for line in args.prompts_file.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=config(args, folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[StepClock(args.perf)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
