"""Three agents work on one question: a solver drafts, a critic reviews, a rewriter gives the final answer.

    slime run --recipe quickstart --set rollout.custom_generate=examples/multi_agent.py:generate

All three are the same model. Each of them makes one sample; the samples share their execution's rollout_id, so that the
execution has one weight in the loss, whatever the number of its agents. The reward scores the last sample, the
rewriter's, and the team shares it. For rewards of their own set `sample.reward` before returning.
"""

from __future__ import annotations

from typing import Any

from slimecli.rollout.replies import read_reply
from slimecli.rollout.segments import Trajectory
from slimecli.seeds import derive_seed
from slimecli.types import Sample

CRITIC = "Question: {question}\nDraft: {draft}\nWhat is wrong with the draft?"
REWRITER = "Question: {question}\nDraft: {draft}\nReview: {review}\nWrite the final answer."


class Team:
    """The agents of one execution."""

    def __init__(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
        self._args = args
        self._sample = sample
        self._params = sampling_params
        self.trajectory = Trajectory(max_tokens=args.recipe.max_context)

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        """One agent's answer; its turn goes into the trajectory, where another prompt begins another segment."""
        tokenizer = self._args.tokenizer
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        room = self._args.recipe.max_context - len(prompt_ids)
        number = self.trajectory.turns
        params = self._params | {
            "max_new_tokens": max(1, min(self._params["max_new_tokens"], room)),
            "sampling_seed": derive_seed(self._params["sampling_seed"], "agent", number),
        }
        payload = {"input_ids": prompt_ids, "sampling_params": params, "return_logprob": True}
        said = read_reply(await self._args.engine.generate(payload))
        self.trajectory.append_turn(prompt_ids, said.ids, said.log_probs, said.versions, said.finish)
        return str(tokenizer.decode(said.ids, skip_special_tokens=True))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Three samples of one execution."""
    team = Team(args, sample, sampling_params)
    question = str(sample.prompt[-1]["content"])
    draft = await team.ask(sample.prompt)
    review = await team.ask([{"role": "user", "content": CRITIC.format(question=question, draft=draft)}])
    final = REWRITER.format(question=question, draft=draft, review=review)
    await team.ask([{"role": "user", "content": final}])
    return team.trajectory.samples(sample, lambda ids: str(args.tokenizer.decode(ids, skip_special_tokens=True)))


generate.wants_messages = True  # sample.prompt is then the list of messages, not the rendered text
