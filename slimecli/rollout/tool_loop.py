"""The built-in generate function `tool_loop`: the model answers, calls tools, reads their output, and goes on.

One conversation per answer. The token ids of a turn are the ids that the model said; everything else in the response
(tool output, the template's frame around it) has loss mask 0. See slimecli.rollout.turns and slimecli.rollout.segments.
"""

from __future__ import annotations

import asyncio
from typing import Any

from slimecli.data_tools.prompts import require_template
from slimecli.data_tools.selection import ANSWER_MESSAGES, PROMPT_MESSAGES
from slimecli.errors import DataError
from slimecli.recipe_tools import ToolsSection
from slimecli.rollout.execution import Execution
from slimecli.rollout.replies import read_reply
from slimecli.rollout.segments import Trajectory
from slimecli.rollout.turns import Conversation
from slimecli.seeds import derive_seed
from slimecli.tools.parsers import Parsed, load_parser, split_reasoning
from slimecli.tools.toolbox import Toolbox, ToolResult
from slimecli.types import LAST_TURN, Message, Sample, SampleStatus


class ToolLoop:
    """Answers with tools. Ends with `close`, which ends servers of tools."""

    supports_partial = True

    def __init__(self, section: ToolsSection) -> None:
        self._section = section
        self._toolbox = Toolbox(section)

    async def __call__(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
        """Work on one sample until the model calls no more tools, or its budget is spent.

        Returns one sample; several where the template broke the prefix and rollout.on_prefix_break = segment. The
        numbers in `metadata.stats` of the last one speak of the whole execution.
        """
        run = self._begin(args, sample, sampling_params)
        parse = load_parser(self._section.call_format, str(args.tokenizer.chat_template))
        while len(run.log) < self._section.max_turns:
            said = await self._turn(run)
            if run.finish == "abort":
                return [run.interrupted()]
            if run.finish != "stop":
                break
            parsed = parse(split_reasoning(said)[1])
            if not parsed.calls and not parsed.errors:
                break
            if len(run.log) == self._section.max_turns:
                run.finish = "length"
            else:
                await self._answer(run, parsed)
        return _samples(run)

    def _begin(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Execution:
        require_template(args.tokenizer)
        messages = sample.metadata.get(PROMPT_MESSAGES) if isinstance(sample.prompt, str) else sample.prompt
        if not messages:
            raise DataError(
                f"sample {sample.index} has a rendered prompt, and tool_loop needs messages",
                "set data.apply_chat_template = true",
            )
        tools = self._tools(sample)
        shown = tools if self._section.shown else []
        talk = Conversation(args.tokenizer, messages, shown, sampling_params.get("stop_token_ids") or [])
        if sample.session_id is None:
            sample.session_id = f"{sample.group_index}-{sample.index}"
        sample.tokens = list(talk.ids)
        section = args.recipe.rollout
        run = Execution(
            args=args,
            sample=sample,
            params=dict(sampling_params),
            talk=talk,
            trajectory=Trajectory(on_break=section.on_prefix_break, linear=True, max_tokens=args.recipe.max_context),
            offered=[tool["function"]["name"] for tool in tools],
            prompt_tokens=len(talk.ids),
        )
        run.resume()
        return run

    def _tools(self, sample: Sample) -> list[dict[str, Any]]:
        """What the row offers, in its own words, else all tools of the recipe."""
        stated = sample.metadata.get("tools")
        if not stated:
            return self._toolbox.schemas()
        names = [_name(tool) for tool in stated]
        known = self._toolbox.schemas(names)
        return [t if isinstance(t, dict) and "function" in t else k for t, k in zip(stated, known, strict=True)]

    async def _turn(self, run: Execution) -> str:
        """One request, or what is left of an interrupted one; the text of the turn."""
        room, turn = run.room(self._section.max_turn_tokens), len(run.log)
        if room <= 0:
            if not turn and not run.begun:
                raise DataError(
                    f"the prompt with its tools fills the context: {len(run.talk.ids)} of "
                    f"{run.args.recipe.max_context} tokens",
                    "raise data.max_prompt_tokens or engine.max_context, or offer fewer tools",
                )
            run.finish = "length"
            return run.finish_turn() if run.begun else ""
        params = run.params | {"max_new_tokens": room}
        if turn and "sampling_seed" in params:
            params["sampling_seed"] = derive_seed(params["sampling_seed"], "turn", turn)
        reply = await run.args.engine.generate(
            {
                "input_ids": run.prompt_ids,
                "sampling_params": params,
                "return_logprob": True,
                "routing_key": run.sample.session_id,
            }
        )
        said = read_reply(reply)
        run.finish = said.finish
        if said.ids or said.finish != "abort":
            run.begun.append(said)
        return "" if said.finish == "abort" else run.finish_turn()

    async def _answer(self, run: Execution, parsed: Parsed) -> None:
        """Run the calls of a turn and tell the model what came of them."""
        results = await asyncio.gather(*(self._toolbox.call(call, run.offered) for call in parsed.calls))
        results += [ToolResult(text=f"Error: {text}", failed=True, seconds=0.0) for text in parsed.errors]
        run.tool_seconds += max((r.seconds for r in results), default=0.0)
        run.stats["tool_calls"] += len(results)
        run.stats["tool_errors"] += sum(r.failed for r in results)
        names = [call.name for call in parsed.calls] + [""] * len(parsed.errors)
        messages: list[Message] = [
            {"role": "tool", "name": name, "tool_call_id": _id(i), "content": self._cut(run, result.text)}
            for i, (name, result) in enumerate(zip(names, results, strict=True))
        ]
        calls = [
            {"id": _id(i), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(parsed.calls)
        ]
        run.hear(messages, [] if parsed.errors else calls, parsed.text)

    def _cut(self, run: Execution, text: str) -> str:
        """The beginning of a long output, and how much is missing."""
        limit = self._section.max_output_tokens
        tokenizer = run.args.tokenizer
        may_be_long = len(text.encode(errors="replace")) > limit  # one character may be several tokens, a byte is not
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if may_be_long else []
        if len(ids) <= limit:
            return text
        return f"{tokenizer.decode(ids[:limit])}\n[cut: {len(ids) - limit} of {len(ids)} tokens left out]"

    def close(self) -> None:
        """End the servers of tools. Idempotent."""
        self._toolbox.close()


def _id(number: int) -> str:
    """What a call of a turn is named: nine letters and digits, as Mistral's templates demand."""
    return f"call{number:05d}"


def _name(tool: Any) -> str:
    """Of a tool in a row: a name, OpenAI's form, or its inner part."""
    if isinstance(tool, str):
        return tool
    return str(tool.get("function", tool).get("name", ""))


def _samples(run: Execution) -> list[Sample]:
    """The execution's samples; what holds for all of it stands in the last."""
    tokenizer = run.args.tokenizer
    samples = run.trajectory.samples(run.sample, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))
    last = samples[-1]
    if run.finish == "length":
        last.status = SampleStatus.TRUNCATED
    if PROMPT_MESSAGES in last.metadata:  # used offline, where conversations may become SFT data
        last.metadata[ANSWER_MESSAGES] = run.talk.answers
        last.metadata |= {"tools": run.talk.tools} if run.talk.tools else {}
    if run.log:
        last.metadata[LAST_TURN] = next(m["content"] for m in reversed(run.talk.messages) if m["role"] == "assistant")
    last.non_generation_time = round(run.tool_seconds, 6)
    last.metadata["stats"] = {
        **run.stats,
        "turns": float(len(run.log)),
        "prefix_breaks": float(run.trajectory.breaks),
    }
    return samples
