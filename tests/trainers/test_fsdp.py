"""The FSDP trainer in one process: equal to transformers, independent of layout, deterministic, safe."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slimecli.batch import from_groups
from slimecli.errors import DataError, SlimeError, UsageError
from slimecli.trainers import open_trainer
from tests.models import tiny_model
from tests.trainers import made


def one_by_one(hf, batch):
    """[T] transformers' own log-probs, sample by sample, 0 where not trained."""
    rows = []
    for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        logits = hf(input_ids=batch.tokens[a:b][None]).logits[0] / batch.temperature
        rows.append(logits.log_softmax(1).gather(1, batch.targets[a:b, None]).squeeze(1))
    return torch.cat(rows) * batch.loss_mask


@pytest.mark.parametrize("shared", ["true", "false"])
@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_log_probs_equal_transformers(family, shared, request):
    folder = request.getfixturevalue(family)
    batch = from_groups(made.groups(5, 4), temperature=0.7)
    trainer = made.trainer(folder, "trainer.max_tokens_per_micro_batch=90", f"trainer.shared_prefix={shared}")
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert (trainer.log_probs(batch) - one_by_one(hf, batch)).abs().max() < 1e-5


def test_sliding_window_models(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    folder = tiny_model(tmp_path / "m", "qwen3", **window)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert hf.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    batch = from_groups(made.groups(3, 3), temperature=1.0)
    with torch.no_grad():
        assert (made.trainer(folder).log_probs(batch) - one_by_one(hf, batch)).abs().max() < 1e-5


@pytest.mark.parametrize("shared", ["true", "false"])
def test_a_step_equals_plain_autograd(qwen, shared):
    """The gradient norm and the weights after one step, against a padded-free loop with torch's own AdamW."""
    options = ("algo.entropy_coef=0.01", "trainer.weight_decay=0.1", f"trainer.shared_prefix={shared}")
    section = made.recipe(*options)
    batch = made.batch(section, temperature=1.3)
    trainer = made.trainer(qwen, *options)
    stats = trainer.step(batch)

    hf = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    loss = torch.zeros(())
    for i in range(batch.num_samples):
        one = batch.select([i])
        log_p = (hf(input_ids=one.tokens[None]).logits[0] / 1.3).log_softmax(1)
        lp = log_p.gather(1, one.targets[:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(1)
        ratio = (lp - lp.detach()).exp()
        loss = loss + (one.loss_weight * (-ratio * one.advantages - 0.01 * entropy)).sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
    groups = [
        {"params": [p for p in hf.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in hf.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-4).step()
    assert stats.loss == pytest.approx(loss.item(), abs=1e-6)
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert made.gap(made.weights(trainer), {n: p.detach() for n, p in hf.named_parameters()}) < 1e-5


@pytest.mark.parametrize("aggregation", ["sample", "token", "constant"])
def test_micro_batches_do_not_change_a_step(qwen, aggregation):
    """1 x 8 equals 8 x 1: same loss, gradient norm, metrics and weights."""
    results = []
    for budget in (8192, 40):
        options = (f"algo.aggregation={aggregation}", f"trainer.max_tokens_per_micro_batch={budget}")
        trainer = made.trainer(qwen, *options)
        batch = made.batch(made.recipe(*options))
        results.append((trainer.step(batch), made.weights(trainer), len(trainer._plan(batch))))
    (one, weights_one, bins_one), (many, weights_many, bins_many) = results
    assert (bins_one, bins_many > 4) == (1, True)
    assert many.loss == pytest.approx(one.loss, abs=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert many.metrics == pytest.approx(one.metrics, rel=1e-5, abs=1e-6)
    assert made.gap(weights_one, weights_many) < 1e-5


def test_the_order_of_groups_does_not_matter(qwen):
    made_recipe = made.recipe()
    rows = made.groups(5, 3)
    found = []
    for order in (rows, rows[::-1]):
        trainer = made.trainer(qwen)
        stats = trainer.step(made.ready(from_groups(order, temperature=1.0), made_recipe))
        found.append((stats, made.weights(trainer)))
    assert found[1][0].grad_norm == pytest.approx(found[0][0].grad_norm, rel=1e-5)
    assert made.gap(found[0][1], found[1][1]) < 1e-5


def test_metrics_by_hand(qwen):
    options = ("algo.kl_coef=0.1", "algo.kl_type=k1", "trainer.max_tokens_per_micro_batch=60")
    trainer = made.trainer(qwen, *options)
    batch = made.batch(made.recipe(*options))
    lp = trainer.log_probs(batch)
    assert torch.equal(lp, trainer.log_probs(batch, "reference"))
    old = torch.where(batch.loss_mask > 0, lp + 0.3, 0.0)
    reference = torch.where(batch.loss_mask > 0, lp - 0.2, 0.0)
    stats = trainer.step(batch.replace(old_log_probs=old, ref_log_probs=reference))
    mask, count = batch.loss_mask, float(batch.loss_mask.sum())
    gap = ((lp - batch.rollout_log_probs).abs() * mask).sum() / count
    assert stats.metrics["logprob_gap"] == pytest.approx(float(gap), rel=1e-5)
    assert stats.metrics["logprob_gap_max"] == pytest.approx(float(((lp - batch.rollout_log_probs) * mask).abs().max()))
    assert stats.metrics["ppo_kl"] == pytest.approx(0.3, rel=1e-4)
    assert stats.metrics["kl"] == pytest.approx(0.2, rel=1e-4)
    negative = float(((batch.advantages < 0) * mask).sum())
    assert stats.metrics["clip_fraction"] == pytest.approx(negative / count)
    assert 0 < stats.metrics["entropy"] < 5.8
    assert stats.tokens == int(count)
    assert trainer.step(batch.replace(ref_log_probs=reference)).lr == 1e-3


def test_a_sample_above_the_budget_is_trained_alone_and_counted(qwen):
    options = ("trainer.max_tokens_per_micro_batch=10",)
    batch = made.batch(made.recipe(*options))
    stats = made.trainer(qwen, *options).step(batch)
    assert stats.metrics["oversized_samples"] == float((batch.lengths > 10).sum()) > 0


def test_reference_stays_while_the_policy_moves(qwen):
    trainer = made.trainer(qwen, "algo.kl_coef=0.1")
    batch = made.batch(made.recipe("algo.kl_coef=0.1"))
    before = trainer.log_probs(batch, "reference")
    trainer.step(batch.replace(ref_log_probs=before))
    assert torch.equal(trainer.log_probs(batch, "reference"), before)
    assert not torch.equal(trainer.log_probs(batch), before)
    with pytest.raises(SlimeError, match="no ref_log_probs"):
        trainer.step(batch)
    with pytest.raises(SlimeError, match="no reference model"):
        made.trainer(qwen).log_probs(batch, "reference")


def test_activation_checkpointing_recomputes_and_changes_nothing(qwen):
    found, passes = [], []
    for on in ("false", "true"):
        trainer = made.trainer(qwen, f"trainer.activation_checkpointing={on}")
        count = [0]
        mlp = trainer._policy.hf.model.layers[0].mlp
        mlp.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        trainer.step(made.batch(made.recipe()))
        found.append(made.weights(trainer))
        passes.append(count[0])
    assert passes == [1, 2]
    assert made.gap(*found) == 0


def test_weights_carry_the_names_and_values_of_the_folder(qwen, llama):
    for folder in (qwen, llama):
        stored = load_file(folder / "model.safetensors")
        published = made.weights(made.trainer(folder))
        assert published.keys() == stored.keys()
        assert all(torch.equal(published[name], stored[name]) for name in stored)
    half = dict(made.trainer(qwen, "model.dtype=bfloat16").weights())
    assert {t.dtype for t in half.values()} == {torch.bfloat16}


def test_a_step_neither_uses_nor_moves_the_random_numbers_of_the_process(qwen, tmp_path):
    """Dropout, were a model to have it, would depend on seed and step only."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        trainer = made.trainer(qwen)
        trainer._policy.hf.model.layers[0].mlp.register_forward_hook(
            lambda _module, _inputs, out: torch.nn.functional.dropout(out, 0.5)
        )
        trainer.step(made.batch(made.recipe()))
        assert torch.equal(torch.get_rng_state(), before)
        folder = tmp_path / str(seed)
        folder.mkdir()
        trainer.save(folder)
        found.append((folder / "rank_00000.safetensors").read_bytes())
    assert found[0] == found[1]
    trainer.load(folder)


def test_same_inputs_give_the_same_bytes(qwen):
    found = []
    for _ in range(2):
        trainer = made.trainer(qwen, "trainer.max_tokens_per_micro_batch=64")
        for seed in range(3):
            trainer.step(made.batch(made.recipe(), seed=seed))
        found.append(made.weights(trainer))
    assert made.gap(*found) == 0


def test_nan_leaves_the_weights_alone_and_names_the_parameter(qwen):
    trainer = made.trainer(qwen)
    batch = made.batch(made.recipe())
    trainer.step(batch)
    before = made.weights(trainer)
    broken = batch.advantages.clone()
    broken[int(batch.loss_mask.argmax())] = float("nan")
    with pytest.raises(SlimeError, match=r"optimizer step 2: the gradient model\.\S+ is NaN"):
        trainer.step(batch.replace(advantages=broken))
    assert made.gap(before, made.weights(trainer)) == 0
    clean = made.trainer(qwen)
    clean.step(batch)
    assert trainer.step(batch) == clean.step(batch)


def test_nothing_to_train_on_is_an_error(qwen):
    batch = made.batch(made.recipe())
    with pytest.raises(SlimeError, match="no token"):
        made.trainer(qwen).step(batch.replace(loss_mask=torch.zeros_like(batch.loss_mask)))


def test_sft_learns(qwen):
    trainer = made.trainer(qwen, "algo.name=sft", "algo.aggregation=token", "trainer.lr=3e-3")
    batch = made.batch(made.recipe("algo.name=sft", "algo.aggregation=token"), temperature=0.5)
    losses = [trainer.step(batch).loss for _ in range(12)]
    assert losses[-1] < 0.6 * losses[0]


def test_sft_ignores_the_sampling_temperature(qwen):
    section = made.recipe("algo.name=sft")
    losses = {made.trainer(qwen, "algo.name=sft").step(made.batch(section, temperature=t)).loss for t in (0.5, 1.0)}
    assert len(losses) == 1


def test_grpo_raises_the_probability_of_rewarded_answers(qwen):
    trainer = made.trainer(qwen)
    batch = made.batch(made.recipe())
    before = trainer.log_probs(batch)
    for _ in range(3):
        trainer.step(batch)
    assert ((trainer.log_probs(batch) - before) * batch.advantages).sum() > 0


def test_incomplete_folder_is_refused(qwen, tmp_path):
    folder = shutil.copytree(qwen, tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"lacks 1 weight.*layers\.1\.mlp\.up_proj"):
        made.trainer(folder)


def test_a_model_that_mixes_packed_samples_is_refused(tmp_path):
    """Recurrent layers have no attention to keep samples apart."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(SlimeError, match=r"cannot train mamba .*samples change each other"):
        made.trainer(tmp_path)


def test_wrong_backend_or_process_count(qwen):
    recipe = made.recipe()
    section = recipe.trainer.model_copy(update={"backend": "fsdq"})
    with pytest.raises(UsageError, match="no trainer 'fsdq'.*did you mean 'fsdp'"):
        open_trainer(recipe.model_copy(update={"trainer": section}), qwen, total_steps=1)
    with pytest.raises(SlimeError, match=r"runs in 1 process.*recipe says 2"):
        made.trainer(qwen, "trainer.processes=2")


def test_close_twice(qwen):
    trainer = made.trainer(qwen)
    trainer.close()
    trainer.close()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_resume_equals_straight_on_byte_for_byte(qwen, tmp_path):
    options = ("trainer.lr_schedule=cosine", "trainer.warmup_steps=2", "trainer.weight_decay=0.1")
    batches = [made.batch(made.recipe(), seed=s) for s in range(4)]
    straight = made.trainer(qwen, *options)
    for batch in batches[:2]:
        straight.step(batch)
    straight.save(tmp_path)
    expected = [straight.step(batch) for batch in batches[2:]]
    resumed = made.trainer(qwen, *options)
    resumed.step(batches[3])
    resumed.load(tmp_path)
    assert [resumed.step(batch) for batch in batches[2:]] == expected
    assert made.gap(made.weights(straight), made.weights(resumed)) == 0
    again = tmp_path / "again"
    other = tmp_path / "other"
    for folder, trainer in ((again, straight), (other, resumed)):
        folder.mkdir()
        trainer.save(folder)
    for name in ("state.json", "rank_00000.safetensors"):
        assert (again / name).read_bytes() == (other / name).read_bytes()


def test_save_before_the_first_step(qwen, tmp_path):
    made.trainer(qwen).save(tmp_path)
    loaded = made.trainer(qwen)
    loaded.load(tmp_path)
    batch = made.batch(made.recipe())
    assert loaded.step(batch) == made.trainer(qwen).step(batch)


@pytest.mark.parametrize("missing", ["state.json", "rank_00000.safetensors"])
def test_a_missing_file_is_an_error(qwen, tmp_path, missing):
    trainer = made.trainer(qwen)
    trainer.save(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=missing.replace(".", r"\.")):
        trainer.load(tmp_path)


def test_a_torn_file_is_an_error(qwen, tmp_path):
    trainer = made.trainer(qwen)
    trainer.save(tmp_path)
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read"):
        trainer.load(tmp_path)


@pytest.mark.parametrize("kind", ["weight", "exp_avg", "exp_avg_sq"])
def test_a_missing_piece_is_an_error(qwen, tmp_path, kind):
    trainer = made.trainer(qwen)
    trainer.save(tmp_path)
    path = tmp_path / "rank_00000.safetensors"
    stored = load_file(path)
    gone = next(name for name in stored if name.startswith(f"{kind}/"))
    save_file({name: tensor for name, tensor in stored.items() if name != gone}, path)
    with pytest.raises(DataError, match=f"lacks {gone}"):
        trainer.load(tmp_path)


def test_another_model_is_an_error(qwen, llama, tmp_path):
    made.trainer(llama).save(tmp_path)
    with pytest.raises(DataError, match="lacks|has no"):
        made.trainer(qwen).load(tmp_path)
    index = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**index, "format": "foreign"}))
    with pytest.raises(DataError, match="'foreign'"):
        made.trainer(llama).load(tmp_path)
