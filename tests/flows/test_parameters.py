"""Pipeline settings: presets hold what their name says, and what is wrong is said before anything is begun."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from awpo.config_training import PolicyConfig
from awpo.errors import UserError
from awpo.launch import INFRA
from awpo.methods import METHODS
from flows.cli_support import changed
from flows.parameters import PipelineSettings, StudySettings, check_policy_method, pipeline_presets, read_pipeline
from flows.pieces import Start, init_of
from tasks.layout import Layout


@pytest.mark.parametrize("name", pipeline_presets())
def test_every_preset_is_valid(name: str) -> None:
    settings = read_pipeline(name)
    assert settings.check() is settings
    assert set(settings.parameters()) == set(PipelineSettings.model_fields)


def test_the_demo_trains_what_is_promised() -> None:
    demo = read_pipeline("demo")
    assert demo.methods == ("grpo", "grpo_mixed", "awpo")
    assert demo.init == "sft"
    assert set(demo.evaluation.benchmarks) == {"held_out", "bfcl_v3"}
    assert demo.evaluation.samples == 8
    assert demo.evaluation.bfcl_items_per_category == 30
    assert demo.policy.steps_per_rollout > 1, "with one step per rollout batch no clip does anything"
    assert demo.evaluation.temperature == demo.policy.temperature


def test_the_parameters_of_flow_and_settings_are_the_same() -> None:
    import flows.pipeline

    wanted = {*PipelineSettings.model_fields, "out"}
    assert set(flows.pipeline.pipeline.parameters.properties) == wanted


def test_a_file_is_a_preset_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("methods: [dapo]\nseed: 7\n")
    assert read_pipeline(str(file)).methods == ("dapo",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("methods: [awop]", "did you mean 'awpo'"),
        ("methods: [base]", "trains no policy"),
        ("methods: []", "methods"),
        ("sed: 1", "did you mean 'seed'"),
        ("policy: {learning_rat: 1}", "learning_rat"),
        ("seed: -1", "seed"),
        ("- a list", "mapping"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=expected) as caught:
        read_pipeline(str(file))
    assert "\n" not in str(caught.value)


def test_a_benchmark_that_is_not_installed_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "bfcl-eval":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UserError, match="bfcl-eval"):
        read_pipeline("demo").check()


def test_policy_methods() -> None:
    for name, method in METHODS.items():
        if method.trains:
            assert check_policy_method(name) == name
        else:
            with pytest.raises(UserError):
                check_policy_method(name)


@pytest.mark.parametrize(
    ("method", "init", "expected"),
    [("grpo", "base", "base"), ("grpo", "sft", "sft"), ("sft_grpo", "base", "sft"), ("awpo", "base", "base")],
)
def test_where_a_method_starts(method: str, init: str, expected: str, tmp_path: Path) -> None:
    assert init_of(method, init) == expected
    start = Start(read_pipeline("quick"), "tiny", Layout(tmp_path).cell("tiny", 0), tmp_path, "base", tmp_path / "sft")
    assert start.checkpoint(init_of(method, init)) == (str(tmp_path / "sft") if expected == "sft" else "base")


def test_how_dialogues_become_instances_is_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("decomposition: {invalid_calls: drop, masking: {share: 0.5}}\n")
    found = read_pipeline(str(file)).decomposition
    assert found.invalid_calls == "drop"
    assert found.masking is not None
    assert found.masking.share == 0.5
    file.write_text("decomposition: {invalid_call: drop}\n")
    with pytest.raises(UserError, match="did you mean 'invalid_calls'"):
        read_pipeline(str(file))


def test_a_study_is_the_same_as_before_where_nothing_of_decomposition_is_set() -> None:
    # Finished cells are known by these settings: a key more would ask for all of them anew.
    assert "decomposition" not in StudySettings().common()
    changed = StudySettings.read({"decomposition": {"invalid_calls": "drop"}}, "here")
    assert changed.common()["decomposition"] == {"invalid_calls": "drop"}
    assert changed.pipeline(0).decomposition.invalid_calls == "drop"


def test_what_is_taken_of_instances_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tasks.data
    from flows import pieces

    asked = []
    for name in ("write_corpus", "decompose", "select", "write_rationales"):
        task = getattr(tasks.data, name)
        monkeypatch.setattr(pieces, name, lambda *given, task=task: asked.append(task.name) or Path(task.name))
    file = tmp_path / "mine.yaml"
    file.write_text("selection: {near_duplicates: {threshold: 0.9}}\n")
    pieces.prepare_instances(Layout(tmp_path), read_pipeline(str(file)), None)  # type: ignore[arg-type]
    pieces.prepare_instances(Layout(tmp_path), read_pipeline("demo"), None)  # type: ignore[arg-type]
    assert asked == ["corpus", "decompose", "select", "rationales", "corpus", "decompose", "rationales"]
    assert "selection" not in StudySettings().common(), "finished cells of studies would all be asked for anew"


def test_what_would_fail_late_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="grpo more than once"):
        PipelineSettings.read({"methods": ["grpo", "awpo", "grpo"]}, "x")
    with pytest.raises(
        UserError, match=r"evaluation\.splits\.1: must be .*, not 'test_tool'; did you mean 'test_tools'\?"
    ):
        PipelineSettings.read({"evaluation": {"splits": ["test_phrasings", "test_tool"]}}, "x")
    with pytest.raises(UserError, match=r"format: must be .*, not 'toolac'; did you mean 'toolace'\?"):
        PipelineSettings.read({"format": "toolac"}, "x")
    short = PipelineSettings.read({"methods": ["dapo"], "policy": {"max_completion_length": 8}}, "x")
    if METHODS["dapo"].overlong_share * 8 < 1:
        with pytest.raises(UserError, match=r"policy: the overlong penalty of 'dapo' grows over the last"):
            short.check()
    with pytest.raises(UserError, match=r"policy\.judge\.scale: must be a finite number"):
        PipelineSettings.read({"policy": {"judge": {"scale": float("inf")}}}, "x")


@pytest.mark.parametrize("launch", ["cpu-2", "cpu-2-zero3"])
def test_every_pipeline_of_the_presets_can_be_launched_on_two_cpus(launch: str) -> None:
    for name in pipeline_presets():
        read_pipeline(name).model_copy(update={"launch": launch}).check()


def test_steps_that_can_t_be_shared_out_are_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("processes: 16\n")
    launched = read_pipeline("quick").model_copy(update={"launch": str(file)})
    with pytest.raises(UserError, match="the 8 rows of an optimiser step can't be shared out evenly among 16"):
        launched.check()
    file.write_text("processes: 8\n")
    launched.check()
    file.write_text("processes: 2\n")
    sft = launched.sft.model_copy(update={"batch_size": 15})
    with pytest.raises(UserError, match="the 15 rows of an optimiser step can't be shared out evenly among 2"):
        launched.model_copy(update={"sft": sft}).check()
    launched.model_copy(update={"sft": sft, "init": "base"}).check()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"methods": ["grpo"], "policy": {"method": "awpo"}}, "policy.method = 'awpo' contradicts methods = grpo"),
        ({"policy": {"method": "dapo"}}, "policy.method = 'dapo' contradicts methods = grpo, grpo_mixed, awpo"),
        ({"seed": 1, "policy": {"seed": 2}}, "policy.seed = 2 contradicts seed = 1"),
        ({"sft": {"seed": 3}}, "sft.seed = 3 contradicts seed = 0"),
    ],
)
def test_method_and_seed_stand_at_the_top_alone(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected.replace(".", r"\.")) as caught:
        PipelineSettings.read(given, "mine.yaml")
    assert "\n" not in str(caught.value)
    assert "leave " in str(caught.value)


def test_a_file_that_also_says_method_and_seed_below_is_read_as_before() -> None:
    settings = PipelineSettings.read(
        {"methods": ["grpo"], "seed": 2, "policy": {"method": "grpo", "seed": 2, "steps": 8}, "sft": {"seed": 2}}, "x"
    )
    assert settings == PipelineSettings.read({"methods": ["grpo"], "seed": 2, "policy": {"steps": 8}}, "x")
    study = StudySettings.read({"seeds": [4, 5], "policy": {"seed": 4, "method": "awpo"}}, "x")
    assert study == StudySettings.read({"seeds": [4, 5]}, "x")
    with pytest.raises(UserError, match=r"policy\.seed = 6 contradicts seeds = 4, 5"):
        StudySettings.read({"seeds": [4, 5], "policy": {"seed": 6}}, "x")
    with pytest.raises(UserError, match=r"unknown key 'sft\.method'"):
        PipelineSettings.read({"sft": {"method": "awpo"}}, "x")


def test_a_call_that_says_another_method_below_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy\.method = 'dapo' contradicts methods = awpo"):
        PipelineSettings(methods=("awpo",), policy=PolicyConfig(method="dapo"))
    policy = PipelineSettings(methods=("grpo",), policy=PolicyConfig(steps=8)).policy.with_method("grpo", 3)
    assert (policy.method, policy.seed, policy.steps) == ("grpo", 3, 8)


def test_what_a_form_left_as_it_is_becomes_that_of_a_larger_model_s_preset() -> None:
    quick = read_pipeline("quick")
    large = quick.model_copy(update={"model": "qwen3-4b-instruct-2507"}).fitted(quick)
    assert large.policy.learning_rate == 1e-6
    assert large.policy.max_completion_length == 1024
    assert large.sft.learning_rate < 1e-4 < quick.sft.learning_rate
    assert large.evaluation.max_completion_length == 1024
    mine = quick.policy.model_copy(update={"learning_rate": 5e-6})
    changed = quick.model_copy(update={"model": "qwen3-4b-instruct-2507", "policy": mine}).fitted(quick)
    assert changed.policy == mine, "what a person changed stays as it is"
    assert changed.sft == large.sft
    assert (quick.launch, large.launch) == ("cpu", "zero2-8"), "the launch is a part of the model's preset"
    launched = quick.model_copy(update={"model": "qwen3-4b-instruct-2507", "launch": "fsdp2-8"}).fitted(quick)
    assert launched.launch == "fsdp2-8"
    for model in ("embedded-1m", "embedded-3m"):
        same = quick.model_copy(update={"model": model})
        assert same.fitted(quick) == same


def test_another_model_on_the_command_line_brings_its_settings_and_its_launch() -> None:
    quick = read_pipeline("quick")
    large = changed(quick, {"model": "qwen3-8b"}, {}, settings_of_model=True)
    assert (large.model, large.launch) == ("qwen3-8b", "zero3-8")
    assert large.policy.rollouts.engine == "vllm_colocate"
    own = changed(quick, {"model": "qwen3-8b", "launch": "zero2-8"}, {}, settings_of_model=True)
    assert own.launch == "zero2-8", "an option counts more"
    assert changed(quick, {"model": "embedded-3m"}, {}, settings_of_model=True).launch == quick.launch
    assert changed(quick, {"model": "qwen3-8b"}, {}).launch == quick.launch


@pytest.mark.parametrize("template", ["slurm/train.sbatch", "kubernetes/train.yaml"])
def test_the_templates_of_several_machines_name_a_training_that_two_can_share(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWPO_MACHINES", "2")
    text = (INFRA / template).read_text("utf-8").replace(",", "")
    told = re.search(r"train(?:\.sbatch)? --model (\S+) --launch (\S+) ", text)
    assert told, text
    options = {"model": told[1], "launch": told[2]}
    changed(read_pipeline("quick"), options, {}, settings_of_model=True).check()
