"""`podium merge`: what it saves is the trained model, in plain transformers; anything else leaves nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, PeftModel
from peft.tuners.lora import LoraModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, pipeline
from typer.testing import CliRunner

from podium.cli import BEGINS, app
from podium.errors import ModelError
from podium.runs.checkpoint import damage
from podium.runs.find_model import find_model
from podium.runs.shipping.merge import merged_folder
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer

RECIPE = """\
model: {model}
dataset: builtin:additions
rewards:
  - {{function: {place}/mine.py:length, weight: 2}}
  - answer_format
per_device_train_batch_size: 4
num_generations: 2
max_completion_length: 4
learning_rate: 5.0e-2
max_steps: 2
save_steps: 1
eval_rows: 8
eval_samples: 2
prove_first_batch: false
seed: 1
hub_token: {token}
"""
TOKEN = "hf_" + "q" * 34
PROMPTS = [f"What is {a} + {b}?" for a in range(1, 3) for b in range(1, 4)]

Cli = Callable[[str], tuple[int, str, str]]


def podium(line: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, line.split())
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and the runs `runs/adapter` and `runs/full` on it, as `podium train` leaves them."""
    place = tmp_path_factory.mktemp("trained")
    model = save_tiny_model(place / "base")
    (place / "mine.py").write_text(
        "def length(completions, **columns):\n    return [len(c[0]['content']) / 4 for c in completions]\n"
    )
    (place / "run.yaml").write_text(RECIPE.format(model=model, place=place, token=TOKEN))
    for name, more in (("adapter", '--lora {"r":4,"lora_alpha":64,"target_modules":"all-linear"}'), ("full", "")):
        code, _, err = podium(f"train {place}/run.yaml --output_dir {place}/runs/{name} {more}")
        assert code == 0, err
    make_readable(place / "runs/adapter", place / "base")
    return place


def make_readable(run: Path, base: Path) -> None:
    """Completions of the first round as the base might have sampled them: text that becomes the same tokens again.

    A tiny model samples bytes that are no text.
    """
    [path] = sorted((run / "rollouts").glob("0000001-*.parquet"))
    rows = pandas.read_parquet(path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    for i, prompt in enumerate(rows["prompt"]):
        asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        said = tokenizer(f"{i} + {i + 3}", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logps = model(torch.tensor([[*asked, *said]])).logits[0, len(asked) - 1 : -1].log_softmax(-1)
        rows.loc[i, "completion"], rows.loc[i, "num_tokens"] = f"{i} + {i + 3}", len(said)
        rows.loc[i, "mean_logp"] = float(logps.gather(-1, torch.tensor(said)[:, None]).mean())
    rows.to_parquet(path)


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to write into; the adapter's base stays where it was."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(model: PreTrainedModel | PeftModel, tokenizer: Any) -> list[str]:
    """Greedy answers."""
    said = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
        said.append(tokenizer.decode(output[0, ids.shape[1] :]))
    return said


@pytest.mark.versions
def test_adapter_merged_and_reloaded_say_the_same(trained: Path, place: Path) -> None:
    code, out, err = podium("merge runs/adapter --out merged")
    assert code == 0, err
    assert "merged in float32, saved in float32" in out
    assert "saved model and trained model differ by at most" in out
    tokenizer = AutoTokenizer.from_pretrained("merged")
    with_adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(trained / "base"), "runs/adapter")
    said = texts(with_adapter, tokenizer)
    assert texts(AutoModelForCausalLM.from_pretrained("merged"), tokenizer) == said
    assert texts(AutoPeftModelForCausalLM.from_pretrained("runs/adapter"), tokenizer) == said
    assert texts(AutoModelForCausalLM.from_pretrained(trained / "base"), tokenizer) != said
    generate = pipeline("text-generation", model="merged")
    piped = generate(PROMPTS[0], max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]
    assert piped == tokenizer.decode(tokenizer(said[0])["input_ids"], skip_special_tokens=True)


def test_what_is_saved(place: Path) -> None:
    podium("merge runs/adapter --out merged")
    merged = place / "merged"
    names = {path.name for path in merged.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"} <= names
    assert {"README.md", "merge.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not any("adapter" in name or "training_args" in name for name in names)
    assert damage(merged) is None
    record = json.loads((merged / "merge.json").read_text())
    assert record["proof"]["passed"]
    assert record["proof"]["difference"] < 1e-4 < record["proof"]["effect"]
    end = json.loads((merged / "generation_config.json").read_text())["eos_token_id"]
    assert end == tiny_tokenizer().eos_token_id
    assert AutoTokenizer.from_pretrained("merged").chat_template == tiny_tokenizer().chat_template
    assert not list(place.glob(".tmp-*"))


@pytest.mark.defect("LScard", "as long as what was measured")
def test_the_card_says_how_and_what_came_of_it_and_no_folder_or_token(trained: Path, place: Path) -> None:
    with (place / "runs/adapter/config.yaml").open("a") as file:
        file.write("resume_from_checkpoint: true\n")
    podium("merge runs/adapter --out merged")
    card = (place / "merged" / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "text-generation"
    assert "base_model" not in metadata, "the base is a folder of this machine"
    assert "`base`, fine-tuned with GRPO (a LoRA adapter, merged into the weights)" in card
    before, after = (
        json.loads((place / f"runs/adapter/evaluation/{when}.json").read_text()) for when in ("before", "after")
    )
    for told in (before["reward"], after["reward"]):
        assert f"{told['value']:.3f} [{told['low']:.3f}, {told['high']:.3f}]" in card
    assert "| `length` | 2.0 |" in card
    assert "| `learning_rate` | `0.05` |" in card
    longest = yaml.safe_load((place / "runs/adapter/config.yaml").read_text())["max_completion_length"]
    assert f"max_new_tokens={longest}, " in card
    assert f"completions of at most {longest} tokens" in card
    assert "| `lora lora_alpha` | `64` |" in card
    assert f"torch {torch.__version__}".replace("+", "\\+") in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert recipe["model"] == "base"
    assert recipe["rewards"][0] == {"function": "mine.py:length", "weight": 2}
    assert not {"hub_token", "resume_from_checkpoint"} & {*recipe}
    for path in (place / "merged").iterdir():
        if path.suffix != ".safetensors":
            text = path.read_text()
            assert TOKEN not in text
            for folder in (trained, place, Path.home()):
                assert f"{folder}/" not in text, path.name


@pytest.mark.parametrize("fault", ["merge", pytest.param("save", marks=pytest.mark.slow)])
def test_a_wrong_merge_is_refused_and_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A merge that forgets the adapter; and a right one of which a tensor is lost on the way to the disk."""
    if fault == "merge":
        monkeypatch.setattr(LoraModel, "merge_and_unload", lambda self, *_, **__: self.unload())
    else:
        save = LlamaForCausalLM.save_pretrained

        def lossy(self: Any, *given: Any, **settings: Any) -> Any:
            with torch.no_grad():
                self.model.layers[1].mlp.down_proj.weight.zero_()
            return save(self, *given, **settings)

        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", lossy)
    code, _, err = podium("merge runs/adapter --out merged")
    assert code == 2
    assert err.startswith(
        f"{BEGINS['merge']} ...\nerror: The merge is refused: saved model and trained model differ by at most"
    )
    assert "nats (0.001 allowed)" in err
    assert [path.name for path in place.iterdir()] == ["runs"]


@pytest.mark.versions
def test_a_full_fine_tune_is_copied_and_cast(trained: Path, place: Path) -> None:
    code, out, err = podium("merge runs/full --out copy")
    assert code == 0, err
    assert "all its weights were trained, so there is nothing to merge: copied, saved in float32" in out
    trained_weights = AutoModelForCausalLM.from_pretrained("runs/full").state_dict()
    copied = AutoModelForCausalLM.from_pretrained("copy").state_dict()
    assert all(value.equal(copied[name]) for name, value in trained_weights.items())
    code, out, err = podium("merge runs/full --out half --dtype bfloat16")
    assert code == 0, err
    assert "saved in bfloat16" in out
    half = AutoModelForCausalLM.from_pretrained("half").state_dict()
    assert all(half[name].equal(value.to(torch.bfloat16)) for name, value in trained_weights.items())
    assert "`base`, fine-tuned with GRPO." in (place / "half" / "README.md").read_text()
    assert "Weights in bfloat16." in (place / "half" / "README.md").read_text()


@pytest.mark.defect("F14", "merge of a folder that was never trained")
@pytest.mark.defect("H9", "merge of all weights")
def test_a_folder_without_a_run_is_not_called_trained(trained: Path, place: Path, now: Callable[[str], None]) -> None:
    code, out, err = podium(f"merge {trained}/base --out copy")
    assert code == 0, err
    assert "no adapter and no run beside it, so there is nothing to merge: copied, saved in float32" in out
    assert "saved model and original differ by at most 0 nats" in out
    card = (place / "copy/README.md").read_text()
    assert "A copy of `base`. No run is known that trained it." in card
    assert "fine-tuned" not in card.split("---")[2]
    assert "trained model" not in out + card
    now(out.splitlines()[0])


@pytest.mark.defect("F9", "opening messages, verdict, pass@k and format")
def test_the_card_asks_as_training_did(place: Path, now: Callable[[str], None]) -> None:
    config = place / "runs/adapter/config.yaml"
    text = yaml.safe_load(config.read_text())
    hostile = 'Say "```" and <answer>\u202e'
    config.write_text(
        yaml.safe_dump({**text, "dataset": "x.jsonl", "prompt": "{q}", "answer": "{a}", "system": hostile})
    )
    after = place / "runs/adapter/evaluation/after.json"
    looked = {**json.loads(after.read_text()), "pass_at": {"1": {"value": 0.5}, "4": {"value": 0.75}}}
    after.write_text(json.dumps(looked))
    code, _, err = podium("merge runs/adapter --out merged")
    assert code == 0, err
    card = (place / "merged/README.md").read_text()
    program = card.split("## Use")[1].split("## Results")[0]
    assert "began with the messages in front of the question" in program
    code = re.search(r"^(`{3,})python\n(.*?)^\1$", program, re.DOTALL | re.MULTILINE)[2]
    names: dict[str, Any] = {}
    exec(code.split("generate =")[0] + code[code.index("messages =") : code.index("print(")], names)
    assert [turn["content"] for turn in names["messages"]] == [hostile, "..."]
    assert "| pass@4 |  | 0.750 |" in card
    assert "| format kept \\(answer\\_format\\) |" in card
    verdict = json.loads((place / "runs/adapter/evaluation/comparison.json").read_text())["verdict"]
    assert verdict.split(":")[0] in card
    now(code.splitlines()[4])


def test_rounding_that_loses_what_was_trained_is_refused(place: Path) -> None:
    """A change of the third digit behind the point of weights of two digits."""
    weights = place / "runs/adapter/adapter_model.safetensors"
    save_file({name: value * (1e-3 if "lora_B" in name else 1) for name, value in load_file(weights).items()}, weights)
    code, _, err = podium("merge runs/adapter --out merged")
    assert code == 2
    assert "is not as training saved it" in err
    code, _, err = podium("merge runs/adapter --out merged --dtype bfloat16 --ignore M032")
    assert code == 2
    assert "keep the weights in float32 (`--dtype float32`)" in err
    code, out, err = podium("merge runs/adapter --out merged --ignore M032")
    assert code == 0, err
    assert "trained model" not in out


@pytest.mark.slow
def test_a_checkpoint_has_a_card_of_its_own(place: Path) -> None:
    code, _, err = podium("merge runs/adapter/checkpoint-1 --out first")
    assert code == 0, err
    card = (place / "first" / "README.md").read_text()
    assert "# adapter, checkpoint 1" in card
    assert "A checkpoint after 1 optimizer steps." in card
    assert "This checkpoint has not been evaluated by itself." in card


@pytest.mark.slow
def test_a_run_in_an_older_ones_folder_has_its_own_evaluation(trained: Path, place: Path) -> None:
    """Measured before training begins, when the older run's is moved."""
    code, _, err = podium(f"train {trained}/run.yaml --output_dir runs/full --max_steps 1 --eval_rows 2")
    assert code == 0, err
    for folder in (place / "runs/full", place / "runs/full/earlier-1"):
        assert {"before.json", "after.json"} <= {path.name for path in (folder / "evaluation").iterdir()}
        assert (folder / "report.html").is_file()
        assert (folder / "model.safetensors").is_file()
    assert not (place / "runs/full/earlier-2").exists()


@pytest.mark.slow
def test_another_base_of_the_same_shape_can_be_given(place: Path, tmp_path: Path) -> None:
    moved = save_tiny_model(tmp_path / "moved")
    config = place / "runs/adapter/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "/nowhere/base"}))
    code, _, err = podium("merge runs/adapter --out merged")
    assert code == 2
    assert "belongs to /nowhere/base, which cannot be had" in err
    code, _, err = podium(f"merge runs/adapter --out merged --base {moved}")
    assert code == 0, err


OTHERS: dict[str, dict[str, Any]] = {
    "other seed": {"seed": 11},
    "other architecture": {"kind": "mistral", "seed": 11},
    "other width": {"hidden_size": 64},
}
"""Bases that an adapter was not trained on."""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=pytest.mark.defect("F1", f"merge with --base: {how}")) for how in OTHERS],
)
def test_a_merge_onto_another_base_is_one_message(place: Path, how: str, now: Callable[[str], None]) -> None:
    code, out, err = podium(f"merge runs/adapter --out merged --base {save_tiny_model(place / 'other', **OTHERS[how])}")
    assert code == 2
    assert "Traceback" not in err
    assert "saved model" not in out
    assert not (place / "merged").exists()
    assert ("does not fit" if how == "other width" else "other is not the base that the adapter") in err
    assert "--base OWNER/NAME" in err
    now(err)


@pytest.mark.defect("F1", "the base's folder got other weights; its adapter is served")
def test_a_base_that_was_overwritten(trained: Path, place: Path, now: Callable[[str], None]) -> None:
    moved = place / "base"
    shutil.copytree(trained / "base", moved)
    config = place / "runs/adapter/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(moved)}))
    save_tiny_model(moved, seed=11)
    with pytest.raises(ModelError, match="is not the base that the adapter") as refused:
        merged_folder(find_model("runs/adapter"))
    assert refused.value.code == "M031"
    now(str(refused.value))
    assert not (place / "runs/adapter/merged").exists()


@pytest.mark.cases(2)
@pytest.mark.parametrize("verb", ["merge runs/adapter --out merged", "chat runs/adapter", "eval runs/adapter"])
def test_every_verb_refuses_a_base_with_other_numbers(place: Path, verb: str) -> None:
    """A base that differs by a thousandth in every number."""
    moved = place / "base"
    shutil.copytree(find_model("runs/adapter").base, moved)
    weights = load_file(moved / "model.safetensors")
    save_file({name: x * 1.001 for name, x in weights.items()}, moved / "model.safetensors", {"format": "pt"})
    config = place / "runs/adapter/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(moved)}))
    code, out, err = podium(verb)
    assert code == 2
    assert "--ignore M031" in err
    assert "saved model" not in out


@pytest.mark.defect("F1", "nothing recorded to compare the base with")
@pytest.mark.defect("N", "a merge where nothing is recorded is not called that of the trained model")
def test_without_a_record_the_base_is_not_called_the_trained_one(place: Path, now: Callable[[str], None]) -> None:
    (place / "runs/adapter/adapter_digests.json").unlink()
    shutil.rmtree(place / "runs/adapter/rollouts")
    code, out, err = podium("merge runs/adapter --out merged")
    assert code == 0, err
    said = out.splitlines()[1]
    assert said.startswith("saved model and adapter on this base differ")
    assert said.endswith("whether this is the base that was trained on is not recorded")
    assert "is not recorded" in (place / "merged/README.md").read_text()
    assert json.loads((place / "merged/merge.json").read_text())["proof"]["base"] is None
    now(said)


@pytest.mark.defect("F1", "trained on a base in 4 bits: line and card")
def test_a_run_in_four_bits_says_what_was_compared(place: Path, now: Callable[[str], None]) -> None:
    """The record of a run on rounded weights: its completions are somewhat further from the unrounded base."""
    record = place / "runs/adapter/config.yaml"
    record.write_text(record.read_text() + "load_in_4bit: true\n")
    digests = place / "runs/adapter/adapter_digests.json"
    contents = json.loads(digests.read_text())
    digests.write_text(json.dumps({**contents, "base": {**contents["base"], "is_whole": False}}))
    [path] = sorted((place / "runs/adapter/rollouts").glob("0000001-*.parquet"))
    rows = pandas.read_parquet(path)
    rows["mean_logp"] += 0.3
    rows.to_parquet(path)
    code, out, err = podium("merge runs/adapter --out merged")
    assert code == 0, err
    said = out.splitlines()[1]
    assert said.startswith("saved model and adapter on this base differ")
    assert "0.3 nats a token from what the run recorded (1 is usual); training saw its weights rounded" in said
    assert "rounded to 4 or 8 bits" in (place / "merged/README.md").read_text()
    now(said)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("merge runs/adapter --out runs", "runs is there already"),
        ("merge runs/adapter --out m --dtype int8", "--dtype is 'int8'; it must be one of float32"),
        ("merge runs/nothing --out m", "`runs/nothing` is not a folder here"),
    ],
)
def test_mistakes_are_said_before_weights_are_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.setattr("podium.runs.shipping.merge.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    code, _, err = podium(line)
    assert code == 2
    assert message in err


def test_a_quantized_base_is_refused_before_weights_are_loaded(place: Path, tmp_path: Path) -> None:
    base = Path(save_tiny_model(tmp_path / "rounded"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    code, _, err = podium(f"merge runs/adapter --out m --base {base}")
    assert code == 2
    assert "rounded is stored quantized" in err
    assert "--base OWNER/NAME" in err


def test_the_merged_folder_of_a_server_is_made_once_for_each_training(place: Path) -> None:
    source = find_model("runs/adapter")
    folder = merged_folder(source)
    assert folder == Path("runs/adapter/merged")
    first = (folder / "model.safetensors").stat().st_mtime_ns
    assert (merged_folder(source) / "model.safetensors").stat().st_mtime_ns == first
    for name in ("adapter_model.safetensors", "adapter_digests.json"):
        shutil.copy(f"runs/adapter/checkpoint-1/{name}", f"runs/adapter/{name}")
    assert (merged_folder(find_model("runs/adapter")) / "model.safetensors").stat().st_mtime_ns != first
    assert find_model("runs/adapter").adapter == Path("runs/adapter"), "the run itself is still its adapter"


@pytest.mark.slow
def test_the_built_in_model_says_the_same_on_fifty_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, with an adapter that changes most answers."""
    from peft import LoraConfig, get_peft_model

    from podium.models.builtin import resolve_model

    monkeypatch.chdir(tmp_path)
    base = resolve_model("builtin:smollm2-135m-instruct")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lora = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", init_lora_weights="gaussian")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.03)
    model.save_pretrained("adapter")
    code, _, err = podium("merge adapter --out merged --dtype float32")
    assert code == 0, err
    tokenizer = AutoTokenizer.from_pretrained("merged")

    turns = [[{"role": "user", "content": f"What is {number} + {number // 3}?"}] for number in range(50)]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(rendered, return_tensors="pt", padding=True, padding_side="left")

    def answers(model: Any) -> list[str]:
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])

    said = answers(model.eval())
    assert answers(AutoModelForCausalLM.from_pretrained("merged")) == said
    assert answers(AutoPeftModelForCausalLM.from_pretrained("adapter")) == said
    with model.disable_adapter():
        plain = answers(model)
    assert sum(one != other for one, other in zip(plain, said, strict=True)) > 25


@pytest.mark.slow
def test_a_run_of_a_script_has_a_card_without_a_recipe(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer(model=tiny_model("llama"))
    trainer.train()
    trainer.save_model(trainer.args.output_dir)
    trainer.processing_class.save_pretrained(trainer.args.output_dir)
    code, _, err = podium(f"merge {trainer.args.output_dir} --out {tmp_path}/copy")
    assert code == 0, err
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "Train it again" not in card
    assert "| `digits` | 1.0 |" in card
    assert "The run has not looked at held-out prompts." in card
