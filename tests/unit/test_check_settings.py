"""Rules of settings: each bad recipe gives its code, its place and its cure, by its settings alone.

No model, no rows and no rewards are looked at; cases that need them are in `test_checks`.
"""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as with_facts
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podium.checks import process_as_it_was
from podium.checks.settings import UNUSUAL
from podium.errors import Finding
from podium.errors.rule import Facts, findings
from podium.recipe.changes import apply_changes
from podium.recipe.document import parse
from podium.trainer.setting_rules import OF_RUN
from tests.cures import assert_agree
from tests.facts import RECIPE, found_in, settings_in, written

LAST = len(RECIPE) + 1
"""The line of a key that a case adds."""


@dataclass(frozen=True, kw_only=True)
class Case:
    code: str
    says: tuple[str, ...]
    """What was found, and where."""
    cure: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    """Lines below the keys."""
    severity: str = "error"
    flags: dict[str, Any] = field(default_factory=dict)
    name: str = ""


def defect(line: str, done: str, code: str, says: str, severity: str = "error", **keys: Any) -> Any:
    """A case of a line of `tests/defects/lines.yaml`: what was done, and what is said now."""
    case = Case(code=code, says=("run.yaml", says), severity=severity, keys=keys)
    return pytest.param(case, marks=pytest.mark.defect(line, done), id=f"{line} {done}")


CASES = [
    Case(code="C001", keys={"learning_rat": 1e-6}, says=(f"run.yaml:{LAST}: unknown key `learning_rat`",), cure="Did you mean `learning_rate`?"),
    Case(code="C001", keys={"lora": {"lora_alph": 8}}, says=(f"run.yaml:{LAST}: unknown key `lora_alph`",), cure="Did you mean `lora_alpha`?", name="nested"),
    Case(code="C002", keys={"num_generations": 4.5}, says=("run.yaml:5: `num_generations`: expected a whole number", "got 4.5"), cure="num_generations: 4"),
    Case(code="C003", keys={"learning_rate": [1, 2]}, says=("run.yaml:7: `learning_rate`: expected a number", "a list"), cure="learning_rate: 1e-06"),
    Case(code="C003", text="beta: on\n", says=(f"run.yaml:{LAST}: `beta`: expected a number, got `on`",), cure="beta: 0.0", name="yaml 1.2"),
    Case(code="C004", keys={"order": "easy_frst", "difficulty": "answer"}, says=(f"run.yaml:{LAST}: `order` must be one of easy_first, hard_first",), cure="Did you mean `easy_first`?", name="order"),
    Case(code="C016", keys={"held_out": 20}, says=(f"run.yaml:{LAST}: `held_out` is 20; it must be between 0.001 and 0.999",), cure="held_out: 0.2", name="held_out"),
    Case(code="C016", keys={"pass_rates": "mine.py", "pass_rate": [0.9, 0.1]}, says=("`pass_rate` must be two shares",), cure="pass_rate: [0.05, 0.95]", name="pass_rate"),
    Case(code="C016", keys={"dataset": [{"path": "rows.jsonl", "weight": 0}]}, says=("run.yaml:2: `weight` must be above 0",), cure="weight: 1", name="weight"),
    Case(code="C001", keys={"dataset": [{"path": "rows.jsonl", "wieght": 1}]}, says=("run.yaml:2: unknown key `wieght`",), cure="Did you mean `weight`?", name="part"),
    Case(code="C030", keys={"held_out": 0.2, "eval_dataset": "rows.jsonl"}, says=(f"run.yaml:{LAST}: `held_out` and `eval_dataset` both say",), cure="Leave one of them out", name="held out twice"),
    Case(code="C030", keys={"order": "easy_first"}, says=(f"run.yaml:{LAST}: `order` needs to know what is hard",), cure="difficulty: COLUMN", name="order by what"),
    Case(code="C030", keys={"order": "easy_first", "difficulty": "n", "shuffle_dataset": True}, says=(f"run.yaml:{LAST}: `order` and `shuffle_dataset: true` exclude each other",), cure="Leave one of them out", name="order and shuffle"),
    Case(code="C030", keys={"pass_rate": [0.1, 0.9]}, says=(f"run.yaml:{LAST}: `pass_rate` needs measured rates",), cure="podium sample -n N --save FILE", name="no rates"),
    Case(code="C030", keys={"dataset": [{"path": "rows.jsonl", "weight": 1}, "rows.jsonl"]}, says=("run.yaml:2: `weight` is given for some parts",), cure="all or none", name="some weights"),
    Case(code="C040", keys={"dataset": "reasoning-gym:chain_sum?size=40", "rewards": None, "max_completion_length": 64}, says=('assumed: rewards [{"name": "reasoning_gym", "args": {"dataset": "chain_sum"}}]', "system"), cure="write what should be otherwise", severity="note"),
    Case(code="C004", keys={"report_to": "mlflow,trackio"}, says=("report_to names mlflow,trackio, which is no tracker",), cure="Did you mean `[mlflow, trackio]`?", name="two trackers"),
    Case(code="C004", keys={"loss_type": "drgrpo"}, says=(f"run.yaml:{LAST}: `loss_type` must be one of", "`drgrpo`"), cure="Did you mean `dr_grpo`?"),
    Case(code="C006", text="beta: 0.1\nbeta: 0.2\n", says=(f"run.yaml:{LAST + 1}: `beta` is already set at line {LAST}",), cure="delete line "),
    Case(code="C009", flags={"num_generation": 4}, says=("--num_generation: unknown key `num_generation`",), cure="Did you mean `num_generations`?"),
    Case(code="C009", flags={"rollouts": True}, says=("--rollouts: unknown key `rollouts`",), cure="leave it out: `podium sample RECIPE -n 8`"),
    Case(code="C010", keys={"per_device_train_batch_size": 30}, says=("run.yaml:", "generation_batch_size (30) must be divisible by num_generations (8)"), cure="make the generation batch 24 or 32"),
    Case(code="C011", keys={"num_generations": 1}, says=("run.yaml:5: `num_generations` is 1; it must be at least 2",), cure="num_generations: 8"),
    Case(code="C012", keys={"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3}, says=("run.yaml:", "eval batch size (3"), cure="per_device_eval_batch_size: 8"),
    Case(code="C013", keys={"fp16": True, "use_cpu": True}, says=(f"run.yaml:{LAST}: fp16=True needs a GPU",), cure="Leave it out"),
    Case(code="C013", keys={"tf32": True}, says=(f"run.yaml:{LAST}: --tf32 requires",), cure="take `bf16`", name="tf32"),
    Case(code="C062", keys={"advantage_estimator": "rloo", "multi_objective_aggregation": "normalize_then_sum"}, says=("advantage_estimator rloo starts from the weighted sum",), cure="Leave one of them out"),
    Case(code="C062", keys={"advantage_estimator": "opo", "turn_discount": 0.9}, says=("advantage_estimator opo gives a whole completion one advantage",), cure="Leave one of them out", name="turns"),
    Case(code="C014", keys={"vllm_mode": "server"}, says=(f"run.yaml:{LAST}: vllm_mode='server' belongs to vLLM",), cure="Set use_vllm: true"),
    Case(code="C035", keys={"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 9, "top_p": 0.9}, says=(f"run.yaml:{LAST + 3}: top_p is 0.9 with vLLM", "sequence_mask"), cure="vllm_importance_sampling_mode: token_truncate", severity="warning"),
    Case(code="C069", keys={"generation_kwargs": {"no_repeat_ngram_size": 3, "min_length": 0}}, says=("generation_kwargs has no_repeat_ngram_size: 3",), cure="take `no_repeat_ngram_size` out of generation_kwargs", severity="warning"),
    Case(code="C069", keys={"repetition_penalty": 1.2}, says=(f"run.yaml:{LAST}: repetition_penalty is 1.2",), cure="repetition_penalty: 1.0", severity="warning", name="penalty"),
    Case(code="C016", keys={"temperature": 0}, says=(f"run.yaml:{LAST}: `temperature` is 0; it must be between", "nothing can be learnt"), cure="temperature: 1.0"),
    Case(code="C016", keys={"learning_rate": -1e-6}, says=("run.yaml:7: `learning_rate` is -1e-06; it must be between 0 and 1000",), cure="learning_rate: 1e-06", name="rate"),
    Case(code="C016", keys={"max_completion_length": 0}, says=("run.yaml:6: `max_completion_length` is 0; it must be at least 1",), cure="max_completion_length: 512", name="length"),
    Case(code="C016", keys={"epsilon": -0.2}, says=(f"run.yaml:{LAST}: `epsilon` is -0.2; it must be at least 0",), cure="epsilon: 0.2", name="epsilon"),
    Case(code="C017", keys={"lora_r": 8}, says=(f"run.yaml:{LAST}: `lora_r` does nothing without `use_peft: true`",), cure="add it"),
    Case(code="C018", keys={"ds3_gather_for_generation": False}, says=(f"run.yaml:{LAST}: ds3_gather_for_generation=False is an option of TRL",), cure="take `ds3_gather_for_generation` out"),
    Case(code="C020", keys={"output_dir": "${SCRATCH}/out"}, says=(f"run.yaml:{LAST}: output_dir: `${{SCRATCH}}/out`", "SCRATCH"), cure="write the path out"),
    Case(code="C021", keys={"lora": {"r": 8}, "learning_rate": 1e-6}, says=("run.yaml:7: learning_rate is 1e-06 for a LoRA adapter",), cure="learning_rate: 0.0002", severity="warning"),
    Case(code="C022", keys={"learning_rate": 2e-4}, says=("run.yaml:7: learning_rate is 0.0002 for all weights",), cure="learning_rate: 2e-05", severity="warning"),
    Case(code="C023", keys={"num_generations": 2}, says=("run.yaml:5: num_generations is 2", "1 other"), cure="num_generations: 8", severity="warning"),
    Case(code="C024", keys={"per_device_train_batch_size": 8}, says=("an optimizer step sees 1 prompt", "counts completions"), cure="gradient_accumulation_steps: 8", severity="warning"),
    Case(code="C025", keys={"loss_type": "dapo", "importance_sampling_level": "sequence"}, says=("run.yaml:", "sequence with loss_type dapo"), cure="loss_type: grpo", severity="warning"),
    Case(code="C025", keys={"loss_type": "luspo"}, says=("luspo with importance_sampling_level token",), cure="importance_sampling_level: sequence", severity="warning", name="luspo"),
    Case(code="C025", keys={"loss_type": "dr_grpo"}, says=("dr_grpo with scale_rewards group",), cure="scale_rewards: none", severity="warning", name="dr_grpo"),
    Case(code="C025", keys={"loss_type": "cispo"}, says=("cispo with an epsilon_high below 1",), cure="epsilon_high: 5.0", severity="warning", name="cispo"),
    Case(code="C026", keys={"learning_rate": 0}, says=("run.yaml:7: learning_rate is 0",), cure="learning_rate: 2e-05", severity="warning"),
    Case(code="C027", keys={"temperature": 0.1}, says=(f"run.yaml:{LAST}: temperature is 0.1",), cure="temperature: 1.0", severity="warning"),
    Case(code="C030", keys={"sync_ref_model": True}, says=(f"run.yaml:{LAST}: sync_ref_model=True has no reference model",), cure="Set beta"),
    Case(code="C030", keys={"sync_ref_model": True, "beta": 0.1, "lora": {"r": 8}}, says=(f"run.yaml:{LAST}: sync_ref_model",), cure="leave sync_ref_model out", name="lora"),
    Case(code="C030", keys={"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 50, "save_steps": 50, "held_out": 0.5}, says=("load_best_model_at_end: the best checkpoint is the one with the lowest eval_loss",), cure="metric_for_best_model: eval_reward", severity="warning", name="best by loss"),
    Case(code="C032", keys={"optim": "adamw_torch_8bit"}, says=(f"run.yaml:{LAST}: optim is adamw_torch_8bit, which needs the package torchao",), cure="pip install torchao", severity="warning"),
    Case(code="C032", keys={"optim": "schedule_free_sgd"}, says=(f"run.yaml:{LAST}: optim is schedule_free_sgd, which needs the package schedulefree",), cure="pip install schedulefree", severity="warning", name="schedule free"),
    Case(code="C031", text="", keys={"model": None}, says=("run.yaml: no `model`",), cure="model: builtin:smollm2-135m-instruct"),
    Case(code="C033", keys={"rollout_device": "cuda:1"}, says=(f"run.yaml:{LAST}: rollout_device is 'cuda:1'",), cure="async_rollouts: 1"),
    Case(code="C037", keys={"learning_rate": 1e-7}, says=("run.yaml:7: learning_rate is 1e-07 for all weights; usual is 2e-05",), cure="learning_rate: 2e-05", severity="warning", name="rate"),
    Case(code="C003", keys={"logging_steps": float("inf")}, says=("logging_steps is inf", "a finite number"), cure="logging_steps:", name="infinite"),
    Case(code="D025", keys={"dataset": "x" * 300}, says=("has 300 characters",), cure="the path of a file", name="too long"),
    Case(code="C060", keys={"stages": [{"name": "a", "until": "done"}]}, says=(f"run.yaml:{LAST}", "`until: done` is not understood"), cure="flat for 20 steps", name="words"),
    Case(code="C061", keys={"filter": "answer"}, says=(f"run.yaml:{LAST}: `filter`: expected a comparison",), cure=""),
]  # fmt: skip

DEFECTS = [
    defect("S4", "max_steps: -5", "C016", "`max_steps` is -5; it must be at least 1", max_steps=-5),
    defect("S4", "max_steps: 0", "C016", "`max_steps` is 0; it must be at least 1", max_steps=0),
    defect("S4", "save_steps: 0", "C016", "`save_steps` is 0; it must be above 0", save_strategy="steps", save_steps=0),
    defect("S4", "learning_rate: .inf", "C016", "`learning_rate` is inf; it must be between 0 and 1000", learning_rate=float("inf")),
    defect("S4", "max_steps and num_train_epochs", "C030", "num_train_epochs is 2, which has no effect: max_steps 8 ends the run", "warning", num_train_epochs=2),
    defect("S4", "warmup_steps: 1000 of 8", "C037", "warmup_steps is 1000, and the run has 8 steps", "warning", warmup_steps=1000),
    defect("S4", "beta: 100", "C037", "beta is 100; usual is 0 to 1", "warning", beta=100),
    defect("S4", "weight_decay: 20", "C037", "weight_decay is 20; usual is 0 to 1", "warning", weight_decay=20),
    defect("S4", "max_grad_norm: 1e-6", "C037", "max_grad_norm is 1e-06; usual is 0.001 or more", "warning", max_grad_norm=1e-6),
    defect("S4", "num_iterations: 50", "C037", "num_iterations is 50; usual is 1 to 8", "warning", num_iterations=50),
    defect("S4", "epsilon: 0", "C037", "epsilon is 0; usual is 0.001 to 1", "warning", epsilon=0),
    defect("S4", "adam_beta1: 0.9999", "C037", "adam_beta1 is 0.9999; usual is 0 to 0.99", "warning", adam_beta1=0.9999),
    defect("S4", "top_k: 1", "C037", "top_k is 1; usual is 2 or more", "warning", top_k=1),
    defect("T1", "gradient_accumulation_steps: 0", "C016", "`gradient_accumulation_steps` is 0; it must be at least 1", gradient_accumulation_steps=0),
    defect("T2", "report_to: wandb, not installed", "C032", "report_to names dvclive, whose package is not installed here", "warning", report_to="dvclive"),
    defect("T2", "report_to: unknown", "C004", "report_to names wandbb, which is no tracker", report_to="wandbb"),
    defect("E7", "report_to: [tensorboard, clearml], one of them missing", "C032", "report_to names clearml", "warning", report_to=["tensorboard", "clearml"]),
    defect("T4", "output_dir: mine.py", "C036", "output_dir is mine.py, which is a file", output_dir="mine.py"),
    defect("T5", "output_dir: /proc/x", "C036", "output_dir is /proc/x, and nothing can be written in /proc", output_dir="/proc/x"),
    defect("T6", 'output_dir: ""', "C036", "output_dir is empty", output_dir=""),
    defect("T6", "resume_from_checkpoint: runs/nope/checkpoint-7", "K001", "runs/nope/checkpoint-7 is not a checkpoint: it is not there", resume_from_checkpoint="runs/nope/checkpoint-7"),
    defect("F14", "check of a missing resume_from_checkpoint", "K001", "There is no checkpoint in out", resume_from_checkpoint=True, output_dir="out"),
    defect("T6", "lora: {r: 0}", "C016", "`r` is 0; it must be at least 1", lora={"r": 0}),
    defect("W8", "learning_rate: 1.0", "C022", "learning_rate is 1 for all weights", "warning", learning_rate=1.0),
    defect("W8", "learning_rate: 0.001", "C022", "learning_rate is 0.001 for all weights", "warning", learning_rate=0.001),
    defect("N", "gradient_accumulation_steps: -1", "C016", "must be at least 1", gradient_accumulation_steps=-1),
    defect("N", "per_device_train_batch_size: 0", "C016", "`per_device_train_batch_size` is 0", per_device_train_batch_size=0),
    defect("N", "num_train_epochs: 0 without max_steps", "C016", "there is nothing to train", num_train_epochs=0, max_steps=None),
    defect("N", "learning_rate: .nan", "C016", "`learning_rate` is nan", learning_rate=float("nan")),
    defect("N", "adam_beta2: 1", "C016", "`adam_beta2` is 1; it must be between 0 and 1", adam_beta2=1.0),
    defect("N", "weight_decay: -0.1", "C016", "`weight_decay` is -0.1", weight_decay=-0.1),
    defect("N", "max_grad_norm: -1", "C016", "`max_grad_norm` is -1; it must be at least 0: 0 switches clipping off", max_grad_norm=-1.0),
    defect("N", "warmup_steps: -5", "C016", "`warmup_steps` is -5", warmup_steps=-5),
    defect("N", "logging_steps: 0", "C016", "`logging_steps` is 0; it must be above 0", logging_steps=0),
    defect("N", "seed: -1", "C016", "`seed` is -1", seed=-1),
    defect("N", "ref_model_sync_steps: 0", "C016", "`ref_model_sync_steps` is 0", beta=0.1, sync_ref_model=True, ref_model_sync_steps=0),
    defect("N", "top_p: 0.01", "C037", "top_p is 0.01; usual is 0.05 to 1", "warning", top_p=0.01),
    defect("N", "repetition_penalty: 5", "C037", "repetition_penalty is 5; usual is 0.8 to 1.5", "warning", repetition_penalty=5.0),
    defect("N", "max_completion_length: 1", "C037", "max_completion_length is 1; usual is 4 or more", "warning", max_completion_length=1),
    defect("N", "adam_epsilon: 1", "C037", "adam_epsilon is 1; usual is 0 to 0.001", "warning", adam_epsilon=1.0),
    defect("N", "output_dir below a file", "C036", "output_dir is mine.py/run, and", output_dir="mine.py/run"),
    defect("N", "rollout_engine: live with no_repeat_ngram_size", "C030", "generation_kwargs no_repeat_ngram_size are `generate`'s alone", rollout_engine="live", generation_kwargs={"no_repeat_ngram_size": 2}),
    defect("N", "lora: {lora_dropout: 2}", "C016", "`lora_dropout` is 2; it must be between 0 and 1", lora={"r": 4, "lora_dropout": 2.0}),
    defect("N", "lora_r: -8", "C016", "`lora_r` is -8; it must be at least 1", use_peft=True, lora_r=-8),
    defect("N", "epochs: 3", "C001", "unknown key `epochs`", epochs=3),
    defect("N", "batch_size: 8", "C001", "unknown key `batch_size`", batch_size=8),
    defect("C2", "a recipe written by a run, with a secret hidden in it", "C003", "`hub_token` holds <hidden>: what was there was secret", hub_token="<hidden>"),
]  # fmt: skip


CODES = {case.code for case in CASES} | {row.values[0].code for row in DEFECTS}
"""Codes that a case here shows."""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with files to name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')


@pytest.mark.cases(36)
@pytest.mark.parametrize(
    "case", [*(pytest.param(case, id=f"{case.code} {case.name}".strip()) for case in CASES), *DEFECTS]
)
def test_a_setting_is_named_with_its_place_and_its_cure(case: Case, now: Callable) -> None:
    text = written(case.text, **case.keys)
    found = found_in(parse(text, name="run.yaml"), case.flags)
    mine = [finding for finding in found if finding.code == case.code]
    fits = [finding for finding in mine if all(word in f"{finding.what} {finding.why}" for word in case.says)]
    assert fits, [str(finding) for finding in found]
    now(f"{fits[0].severity}[{fits[0].code}] {fits[0].what}; fix: {fits[0].fix}")
    assert fits[0].severity == case.severity
    assert fits[0].fix
    assert case.cure in fits[0].fix, str(fits[0])
    assert not any(finding.fix.startswith("see `podium explain") for finding in found), found
    for finding in found:
        assert_agree(finding)
    if fits[0].changes and not case.flags:
        assert_cured(fits[0], found, text)


def assert_cured(finding: Finding, before: list[Finding], text: str) -> None:
    """With the changes of a finding in its recipe, the finding is gone and no error is new."""
    after = found_in(parse(apply_changes(text, finding.changes), name="run.yaml"))
    assert (finding.code, finding.what) not in {(other.code, other.what) for other in after}, finding
    known = {other.code for other in before}
    new = [str(other) for other in after if other.severity == "error" and other.code not in known]
    assert not new, (str(finding), new)


@pytest.mark.defect("S4", "warmup_steps: 1000 of an epoch")
def test_a_warm_up_is_compared_with_the_steps_of_an_epoch() -> None:
    """40 rows in rounds of 4 prompts, 3 epochs: 30 steps."""
    with process_as_it_was({}):
        setup = settings_in(parse(written(warmup_steps=1000, max_steps=None), name="run.yaml"))
        rows: Any = SimpleNamespace(num_rows=40, source=SimpleNamespace(is_stream=False))
        said = [finding.what for finding in findings(UNUSUAL, with_facts(setup, train=rows))]
    assert said == ["warmup_steps is 1000, and the run has 30 steps"]


@pytest.mark.defect("T3", "eval_strategy: steps without rows")
def test_an_evaluation_needs_rows() -> None:
    with process_as_it_was({}):
        args = settings_in(parse(written(eval_strategy="steps", eval_steps=2), name="run.yaml")).settings
        found = {
            evaluates: [finding.what for finding in findings(OF_RUN, Facts(settings=args, evaluates=evaluates))]
            for evaluates in (False, True)
        }
    assert found == {False: ["eval_strategy is steps, and there are no rows to evaluate on."], True: []}


@pytest.mark.defect("W12", "batch 4 with groups of 8: only C010, and no C024 about a batch of 8")
def test_a_batch_that_was_refused_is_not_spoken_of(now: Callable) -> None:
    found = found_in(parse(written(per_device_train_batch_size=4), name="run.yaml"))
    now(" / ".join(f"{finding.code} {finding.what}" for finding in found))
    assert [finding.code for finding in found] == ["C010"]


@pytest.mark.defect("W12", "--max_steps without a value")
def test_a_flag_without_a_value(now: Callable) -> None:
    found = found_in(parse(written(), name="run.yaml"), {"max_steps": True})
    [finding] = [finding for finding in found if finding.severity == "error"]
    now(f"{finding.what}; fix: {finding.fix}")
    assert finding.fix == "for example --max_steps 100"


@pytest.mark.parametrize(
    "value", [pytest.param(v, marks=pytest.mark.defect("E5", f"fsdp: {v}")) for v in (True, "true", "full_shard")]
)
def test_fsdp_as_the_documents_write_it(value: Any, now: Callable) -> None:
    found = found_in(parse(written(fsdp=value), name="run.yaml"))
    said = [f"{finding.code} {finding.what}" for finding in found if "fsdp" in finding.what]
    now("; ".join(said) or "nothing found")
    assert not said
