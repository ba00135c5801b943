"""Adapters of low rank, gradient checkpointing and precision, on the tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerState

from awpo.config_training import AdapterConfig, PolicyConfig, SftConfig
from awpo.data.store import read_instances
from awpo.errors import UserError
from awpo.events import METRICS, RunLog, Tail
from awpo.methods import get_method
from awpo.training import policy as policy_module
from awpo.training import sft as sft_module
from awpo.training.checkpoints import check_positions, load_policy, split_revision
from awpo.training.hardware import (
    accumulation_steps,
    device_arguments,
    dtype_of_weights,
    recomputes_activations,
    uses_bfloat16,
)
from awpo.training.lora import check_layers, peft_config, save_trained
from awpo.training.policy import prompt_rows, train_policy
from awpo.training.policy_trainer import PolicyTrainer
from awpo.training.scoring import Scorer
from awpo.training.sft import Demonstrations, train_sft
from awpo.training.sft_trainer import PadAroundTarget, TargetTrainer

ADAPTER = AdapterConfig(rank=4, alpha=8, dropout=0.1)
SFT = SftConfig(steps=5, batch_size=12, learning_rate=1e-2, save_every=2, lora=ADAPTER)
POLICY = PolicyConfig(
    method="grpo",
    steps=4,
    prompts_per_rollout=4,
    group_size=4,
    steps_per_rollout=2,
    micro_batch_size=4,
    learning_rate=1e-2,
    max_completion_length=12,
    save_every=2,
    lora=ADAPTER,
)
STAGES = {
    "sft": (train_sft, SFT, sft_module.LogToFiles),
    "policy": (train_policy, POLICY, policy_module.LogPolicyToFiles),
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def sft_trainer(tiny_model: Path, instances: Path, out: Path, config: SftConfig) -> TargetTrainer:
    model, tokenizer = load_policy(str(tiny_model))
    return TargetTrainer(
        model=model,
        processing_class=tokenizer,
        args=sft_module.trainer_arguments(config, out),
        peft_config=peft_config(config.lora),
        train_dataset=Demonstrations(tokenizer, read_instances(instances, {"train"}), 2000).to_dataset(),
        data_collator=PadAroundTarget(tokenizer.pad_token_id),
    )


def policy_trainer(tiny_model: Path, instances: Path, out: Path, config: PolicyConfig, kl: float) -> PolicyTrainer:
    model, tokenizer = load_policy(str(tiny_model))
    chosen = read_instances(instances, {"train"})
    method = get_method("grpo").changed(kl=kl)
    return PolicyTrainer(
        model=model,
        processing_class=tokenizer,
        args=policy_module.trainer_arguments(config, method, out, 1),
        peft_config=peft_config(config.lora),
        train_dataset=prompt_rows(tokenizer, chosen, 2000)[0],
        method=method,
        scorer=Scorer(method, config, None),
        instances=chosen,
        log=RunLog(out),
    )


def backward(trainer: TargetTrainer, rows: range) -> dict[str, torch.Tensor]:
    """Gradients of one batch, by the name of the weight."""
    trainer.model.train()
    batch = trainer.data_collator([trainer.train_dataset[row] for row in rows])
    trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(400)).backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def test_only_adapters_are_trained_and_the_base_stays_as_it_is(
    tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    trainer = sft_trainer(tiny_model, instances, tmp_path, SFT)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    gradients = backward(trainer, range(4))
    assert gradients
    assert all("lora_" in name for name in gradients)
    # Every linear layer but the head: seven in each of two blocks, two matrices each.
    assert len(gradients) == 7 * 2 * 2
    trainer.model.zero_grad()
    trainer.train()
    after = trainer.model.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed
    assert all("lora_" in name for name in changed)


def test_the_merged_checkpoint_is_the_model_with_its_adapters(
    tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    trainer = sft_trainer(tiny_model, instances, tmp_path / "run", SFT)
    trainer.train()
    model = trainer.model.eval()
    batch = PadAroundTarget(0)([trainer.train_dataset[row] for row in range(3)])
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        adapted = model(**inputs).logits
        with model.disable_adapter():
            base = model(**inputs).logits
    assert (adapted - base).abs().max() > 0.1
    save_trained(model, AutoTokenizer.from_pretrained(tiny_model), tmp_path / "out", {"method": "sft"})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint").eval()
    assert not any("lora" in name for name in merged.state_dict())
    kept = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model), str(tmp_path / "out" / "adapter")
    ).eval()
    with torch.no_grad():
        for loaded in (merged, kept):
            assert torch.allclose(loaded(**inputs).logits, adapted, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_run_with_adapters_ends_as_an_undisturbed_one(
    stage: str, tiny_model: Path, instances: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, so that the state of random numbers counts too."""
    train, config, callback = STAGES[stage]
    train(str(tiny_model), instances, tmp_path / "whole", config)

    def die(self: object, args: object, state: TrainerState, control: object, **_: object) -> None:
        if state.global_step == 3:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(callback, "on_step_begin", die)
        with pytest.raises(RuntimeError, match="killed"):
            train(str(tiny_model), instances, tmp_path / "cut", config)
    train(str(tiny_model), instances, tmp_path / "cut", config)
    whole, cut = weights(tmp_path / "whole" / "checkpoint"), weights(tmp_path / "cut" / "checkpoint")
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    assert any(not torch.equal(whole[key], value) for key, value in weights(tiny_model).items())
    for name in ("whole", "cut"):
        assert [row["step"] for row in Tail(tmp_path / name / METRICS)] == list(range(1, config.steps + 1))
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert {"adapter/adapter_config.json", "checkpoint/model.safetensors"} <= set(manifest["outputs"])
        assert not any("lora" in key for key in weights(tmp_path / name / "checkpoint"))


def test_the_reference_of_the_kl_penalty_is_the_model_without_adapters(
    tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    trainer = policy_trainer(tiny_model, instances, tmp_path, POLICY, kl=0.01)
    assert trainer.ref_model is None  # no second model in memory
    generator = torch.Generator().manual_seed(1)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:  # zeros at first, so the adapters do nothing yet
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([dict(trainer.train_dataset[i // 4]) for i in range(16)])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width, real = batch["completion_ids"].shape[1], batch["completion_mask"].bool()

    def log_probabilities(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1]
        return logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)[real]

    base = log_probabilities(AutoModelForCausalLM.from_pretrained(tiny_model).eval())
    assert torch.allclose(batch["ref_per_token_logps"][real], base, atol=1e-4)
    assert (log_probabilities(trainer.model.eval()) - base).abs().max() > 0.01


@pytest.mark.parametrize("lora", [None, AdapterConfig(rank=4)], ids=["full", "lora"])
def test_gradient_checkpointing_changes_no_gradient(
    lora: AdapterConfig | None, tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    found: list[dict[str, torch.Tensor]] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: object, state: object, control: object, **named: Any) -> None:
            assert named["model"].is_gradient_checkpointing == (switch == "on")
            found.append({n: p.grad.clone() for n, p in named["model"].named_parameters() if p.grad is not None})

    for switch in ("off", "on"):
        changes = {"lora": lora, "gradient_checkpointing": switch, "steps": 1}
        trainer = sft_trainer(tiny_model, instances, tmp_path / switch, SFT.model_copy(update=changes))
        trainer.add_callback(Watch())
        trainer.train()
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    assert max(value.abs().max() for value in plain.values()) > 1e-3
    for name, value in plain.items():
        assert torch.allclose(value, recomputed[name], atol=1e-6), name


def test_a_step_is_the_same_however_it_is_cut_into_micro_batches(
    tiny_model: Path, instances: Path, tmp_path: Path
) -> None:
    """The rows of a step and the gradient of its first optimiser step, by the norm that is logged."""
    rows, norms = [], []
    for micro in (None, 4, 3):
        out = tmp_path / str(micro)
        config = SFT.model_copy(update={"lora": None, "micro_batch_size": micro, "steps": 2})
        trainer = sft_trainer(tiny_model, instances, out, config)
        rows.append(list(trainer._get_train_sampler()))
        trainer.train()
        norms.append([row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row])
    assert rows[0] == rows[1] == rows[2]
    assert len(norms[0]) == 2
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_what_does_not_fit_is_refused_before_any_weight_is_loaded(
    stage: str, tiny_model: Path, instances: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    train, config, _ = STAGES[stage]
    monkeypatch.setattr("awpo.training.checkpoints.AutoModelForCausalLM.from_pretrained", load)
    cases = {
        "sft": [
            ({"max_length": 2049}, r"sft\.max_length = 2049 tokens, and .* has 2048 positions"),
            ({"precision": "bfloat16"}, r"precision: bfloat16 needs a GPU that has it, and this is a CPU"),
        ],
        "policy": [
            (
                {"max_prompt_length": 2040},
                r"max_prompt_length \+ max_completion_length = 2040 \+ 12 = 2052 tokens, and .* has 2048 positions",
            ),
            ({"precision": "bfloat16"}, r"precision: bfloat16 needs a GPU that has it, and this is a CPU"),
        ],
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for number, (change, message) in enumerate(cases[stage]):
        with pytest.raises(UserError, match=message):
            train(str(tiny_model), instances, tmp_path / str(number), config.model_copy(update=change))


def test_a_layer_that_is_not_there_gets_no_adapter(tiny_model: Path) -> None:
    model, _ = load_policy(str(tiny_model))
    check_layers(model, AdapterConfig(target_modules=("q_proj", "mlp.up_proj")))
    check_layers(model, AdapterConfig())
    with pytest.raises(
        UserError, match=r"no linear layer 'query'; it has down_proj, gate_proj, k_proj, lm_head, o_proj"
    ):
        check_layers(model, AdapterConfig(target_modules=("q_proj", "query")))


def test_rows_are_split_among_processes_or_refused_with_the_numbers() -> None:
    assert accumulation_steps(24, 4, 2, "x") == 3
    with pytest.raises(UserError, match=r"the 24 rows .* among 5 processes; make them a multiple of 5"):
        accumulation_steps(24, 4, 5, "x")
    with pytest.raises(UserError, match=r"x = 8 must divide 24 / 2 = 12: choose one of 1, 2, 3, 4, 6, 12$"):
        accumulation_steps(24, 8, 2, "x")
    assert POLICY.rollouts_per_step % 2 == 0
    whole = POLICY.model_copy(update={"micro_batch_size": POLICY.rollouts_per_step})
    args = policy_module.trainer_arguments(whole, get_method("grpo"), Path("out"), 2)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (POLICY.rollouts_per_step // 2, 1)
    dapo = get_method("dapo")
    config = POLICY.model_copy(update={"micro_batch_size": 1, "prompts_per_rollout": 5, "group_size": 8})
    with pytest.raises(UserError, match=r"prompts_per_rollout = 5 can't be shared out among 2; choose a multiple of 2"):
        policy_module.trainer_arguments(config, dapo, Path("out"), 2)


@pytest.mark.parametrize(
    ("gpu", "bfloat16", "changes", "expected"),
    [
        (False, False, {}, (False, torch.float32, False)),
        (False, False, {"gradient_checkpointing": "on"}, (False, torch.float32, True)),
        (True, False, {}, (False, torch.float32, True)),
        (True, True, {}, (True, torch.float32, True)),
        (True, True, {"precision": "float32", "gradient_checkpointing": "off"}, (False, torch.float32, False)),
        (True, True, {"lora": AdapterConfig()}, (True, "auto", True)),
        (True, True, {"lora": AdapterConfig(), "precision": "float32"}, (False, torch.float32, True)),
    ],
)
def test_what_the_machine_has_decides_precision_and_checkpointing(
    gpu: bool,
    bfloat16: bool,
    changes: dict[str, object],
    expected: tuple[bool, object, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")
    config = SftConfig().model_copy(update=changes)
    assert (uses_bfloat16(config), dtype_of_weights(config), recomputes_activations(config)) == expected
    arguments = device_arguments(config)
    assert arguments == {
        "bf16": expected[0],
        "gradient_checkpointing": expected[2],
        "use_cpu": not gpu,
        "dataloader_pin_memory": gpu,
    }
    if gpu and not bfloat16:
        with pytest.raises(UserError, match="needs a GPU that has it, and this is an old GPU; set auto or float32"):
            uses_bfloat16(SftConfig(precision="bfloat16"))


def test_a_hub_id_may_have_a_revision_and_a_folder_an_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run@home").mkdir()
    assert split_revision(str(tmp_path / "run@home")) == (str(tmp_path / "run@home"), None)
    assert split_revision("Qwen/Qwen3-8B@abc123") == ("Qwen/Qwen3-8B", "abc123")
    assert split_revision("Qwen/Qwen3-8B") == ("Qwen/Qwen3-8B", None)
    asked = []

    def from_pretrained(name: str, *, revision: str | None = None, **_: object) -> None:
        asked.append((name, revision))
        raise OSError("no network here")

    for loader in ("AutoConfig", "AutoTokenizer"):
        monkeypatch.setattr(f"awpo.training.checkpoints.{loader}.from_pretrained", from_pretrained)
    for ask in (lambda: check_positions("Qwen/Qwen3-8B@abc123", 1, "x"), lambda: load_policy("Qwen/Qwen3-8B@abc123")):
        with pytest.raises(UserError, match="cannot load the model 'Qwen/Qwen3-8B@abc123': no network here"):
            ask()
    assert asked == [("Qwen/Qwen3-8B", "abc123")] * 2
