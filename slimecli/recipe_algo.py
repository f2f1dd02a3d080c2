"""The algorithm's section of a recipe. The string under each field is its help text, unit included."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slimecli.recipe_sections import Section


class CorrectionSection(Section):
    """Off-policy correction: the policy loss weighted, and answers left out, by the ratio old policy / engine."""

    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """ratio that weights the loss: each token's own, the product over the answer, or that product's geometric mean"""
    mode: Literal["truncate", "mask"] = "truncate"
    """a ratio outside low..high is moved to the bound (`truncate`: TIS), or weighs 0 (`mask`: IcePop, MIS)"""
    low: float = Field(0.0, ge=0)
    """lower bound of the weight (a ratio)"""
    high: float = Field(2.0, ge=0)
    """upper bound of the weight (a ratio); 0: unbounded"""
    normalize: bool = False
    """divide the weights by their mean over the trained tokens of the optimizer step"""
    reject_level: Literal["none", "token", "sequence", "geometric"] = "none"
    """leave out (weight 0, denominators kept) what lies outside reject_low..reject_high at this level"""
    reject_low: float = Field(0.5, ge=0)
    """lower bound of what is kept (a ratio)"""
    reject_high: float = Field(2.0, ge=0)
    """upper bound of what is kept (a ratio); 0: unbounded"""
    veto: float = Field(0.0, ge=0, lt=1)
    """leave out an answer that has a token below this ratio, e.g. 1e-4; 0: off"""


class AlgoSection(Section):
    """The algorithm and its numbers."""

    name: str = "grpo"
    """advantage estimator and loss, see `slime recipes --algorithms`; or an own one: `file.py:OBJECT`"""
    rewards_normalization: bool = True
    """compare rewards within the answers to one prompt; false: the reward itself is the advantage"""
    std_normalization: bool = True
    """divide group-centred rewards by the group's standard deviation (grpo, gspo, cispo); false: Dr.GRPO's choice"""
    whiten_advantages: bool = False
    """scale advantages to mean 0, variance 1 over all trained tokens of a rollout; reinforce_plus_plus always does"""
    gamma: float = Field(1.0, gt=0, le=1)
    """discount per token of what comes later (ppo, reinforce_plus_plus)"""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """GAE's decay per token: 1 trusts the rewards that came, 0 the critic (ppo)"""
    value_clip: float = Field(0.2, gt=0)
    """largest step of the critic's value from its old one that lowers its loss (ppo; in units of reward)"""
    critic_lr: float = Field(0.0, ge=0)
    """the critic's peak learning rate; 0: trainer.lr (ppo)"""
    critic_warmup: int = Field(0, ge=0)
    """first steps of the run in which only the critic learns (ppo)"""
    critic_offload: bool = False
    """policy and critic take turns on the device, the other one in host memory: slower (ppo, megatron backend)"""
    eps_clip: float = Field(0.2, gt=0)
    """lower clip range of the policy ratio"""
    eps_clip_high: float = Field(0.2, gt=0)
    """upper clip range of the policy ratio (clip-higher, DAPO)"""
    dual_clip: float = Field(0.0, ge=0)
    """bound c of the loss of a negative advantage: at most -c x advantage; above 1, e.g. 3; 0: off (dual clip)"""
    aggregation: Literal["sample", "token", "constant"] = "sample"
    """loss denominators: mean over samples of token means, mean over tokens, or a constant per sample"""
    constant_length: int = Field(0, ge=0)
    """the constant denominator (tokens), for aggregation = constant; 0: rollout.max_response_tokens"""
    kl_coef: float = Field(0.0, ge=0)
    """weight of the KL to the reference; above 0 the reference model is held"""
    kl_place: Literal["loss", "reward"] = "loss"
    """where the KL counts: a term of the loss, or subtracted from the reward before advantages are made"""
    kl_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """KL estimator (Schulman 2020); low_var_kl is k3 bounded to -10..10"""
    kl_unbiased: bool = False
    """weight the KL of the loss by the policy ratio: value and gradient are then those of the KL (DeepSeek-V3.2)"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""
    old_log_probs: Literal["recompute", "engine", "published"] = "recompute"
    """what the ratio divides by: the trainer's own log-probs at the start of the step, those the engine gave, or those
    of the weights that were last published (which differ where not every step publishes)"""
    opsm_delta: float = Field(0.0, ge=0)
    """leave out answers of negative advantage whose mean log(engine / policy) exceeds this, e.g. 1e-4; 0: off (OPSM)"""
    correction: CorrectionSection = CorrectionSection()

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is subtracted from the reward."""
        return self.kl_coef > 0 and self.kl_place == "reward"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL is a term of the loss."""
        return self.kl_coef > 0 and self.kl_place == "loss"

    @property
    def uses_engine_log_probs(self) -> bool:
        """Whether the loss cannot do without the engine's log-probs."""
        correction = self.correction
        off = (correction.level, correction.reject_level) == ("none", "none") and not correction.veto
        return self.old_log_probs == "engine" or self.opsm_delta > 0 or not off

    def recomputes(self, steps_per_rollout: int) -> bool:
        """Whether old log-probs take a forward pass of their own.

        They do not where the only optimizer step finds them on its way: then the old policy is the one being trained.
        """
        before = self.kl_in_reward or self.correction.normalize
        return self.old_log_probs == "recompute" and (steps_per_rollout > 1 or before)


class DistillSection(Section):
    """On-policy distillation: a teacher's log-probs of the policy's own answers."""

    teacher: str = ""
    """frozen teacher with the policy's tokenizer, held by the trainer: an HF folder, or a Megatron checkpoint
    (torch_dist) with its config in its folder `hf`; empty: none"""
    url: str = ""
    """server that has the teacher (SGLang's /generate); empty: none"""
    coef: float = Field(1.0, ge=0)
    """weight of log(teacher / policy), added to the advantage of every token"""
    only: bool = False
    """learn from the teacher alone: rewards are measured, and not trained on"""

    @property
    def is_on(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teacher or self.url)
