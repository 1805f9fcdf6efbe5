"""What verbs of the command line do with images."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Value
from datasets import Image as ImageColumn
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor
from typer.testing import CliRunner

import podium.data
from benchmarks.families import tiny
from podium.checks import check_recipe
from podium.cli import app
from podium.cli.chat import Speaker, talk
from podium.data.images import as_name, file_name
from podium.data.selection import asked_about, fingerprint
from podium.errors import ConfigError
from podium.runs.find_model import find_model
from podium.runs.shipping.hub import files_to_send
from tests.images.test_rows import llava
from tests.images.tiny import asked, picture, processor_of

__all__ = ["llava"]

RECIPE = """\
model: {model}
dataset: {dataset}
prompt: "What is it?"
rewards: [{folder}/reward.py:is_even]
accuracy: is_even
per_device_train_batch_size: 8
num_generations: 2
max_completion_length: 4
max_steps: 1
report_to: none
save_strategy: "no"
output_dir: runs/x
"""
REWARD = """\
def is_even(completions, answer, **_):
    return [float(int(x) % 2 == 0) for x in answer]
"""


@pytest.fixture
def verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`verb("sample", ...)`: the output of a verb that ends well."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result.output

    return run


def photos(folder: Path, kind: str) -> str:
    """Twelve rows whose images alone differ, of which every other is solved."""
    (folder / "data" / "pictures").mkdir(parents=True)
    rows = []
    for number in range(12):
        picture(number).save(folder / f"data/pictures/{number}.png")
        rows.append({"image": f"pictures/{number}.png", "answer": str(number)})
    file = folder / f"data/rows{kind}"
    if kind == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == ".csv":
        Dataset.from_list(rows).to_csv(file, index=False)
    else:
        features = Features({"image": ImageColumn(), "answer": Value("string")})
        stored = [{**row, "image": {"bytes": (folder / "data" / row["image"]).read_bytes()}} for row in rows]
        Dataset.from_list(stored, features=features).to_parquet(file)
    return f"data/{file.name}"


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_pass_rates_of_images_select_rows(tmp_path: Path, verb: Any, llava: Path, kind: str) -> None:
    """Sampled, saved, filtered by and trained on: rows are known by the bytes of their images."""
    dataset = photos(tmp_path, kind)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(RECIPE.format(model=llava, dataset=dataset, folder=tmp_path))
    verb("sample", "run.yaml", "-n", 8, "--save", "rates.jsonl")
    lines = [json.loads(line) for line in Path("rates.jsonl").read_text().splitlines()]
    assert len({line["fingerprint"] for line in lines}) == len(lines) == 8
    assert {line["prompt"] for line in lines} == {"[image] What is it?"}
    words = ("run.yaml", "--pass_rates", "rates.jsonl", "--pass_rate", "0.5", "1.0")
    unsolved = sum(line["pass_rate"] == 0 for line in lines)
    assert f"{unsolved} of 12 rows are left out" in verb("check", *words)
    moved = tmp_path / "elsewhere"
    (tmp_path / "data").rename(moved)
    (tmp_path / "run.yaml").write_text(RECIPE.format(model=llava, dataset=moved / Path(dataset).name, folder=tmp_path))
    verb("train", *words)
    rollouts = podium.Run.load("runs/x").rollouts
    measured = {line["fingerprint"]: line["pass_rate"] for line in lines}
    made = podium.data.load(str(moved / Path(dataset).name), prompt="What is it?", columns={}, chat=True)
    kept = podium.data.load(
        str(moved / Path(dataset).name), prompt="What is it?", pass_rates="rates.jsonl", pass_rate=(0.5, 1.0)
    ).train
    assert len(kept) == len(made.train) - unsolved
    assert 0.0 in measured.values()
    assert {*rollouts["row"]} <= {*range(len(kept))}


def test_a_stream_holds_out_what_the_file_holds_out(tmp_path: Path, verb: Any) -> None:
    """Images of a stream are known by what is stored, too."""
    name = photos(tmp_path, ".parquet")
    sides = []
    for streamed in (False, True):
        split = podium.data.load(name, prompt="What is it?", held_out=0.5, dataset_streaming=streamed)
        sides.append([sorted(row["answer"] for row in rows) for rows in split])
    assert sides[0] == sides[1]
    assert all(sides[0])


def test_an_image_is_named_by_its_file(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "b.png").write_bytes(data)
    picture(1).save(tmp_path / "c.png")
    same = [data, tmp_path / "a.png", str(tmp_path / "b.png"), {"bytes": data, "path": "x.png"}]
    assert len({file_name(value) for value in [*same, {"bytes": None, "path": str(tmp_path / "a.png")}]}) == 1
    assert file_name(tmp_path / "c.png") != file_name(data)
    assert file_name("gone.png") == "gone.png"
    question = [{"role": "user", "content": "What is it?"}]
    names = [fingerprint(asked_about({"prompt": question, "image": value})) for value in same]
    assert len({*names}) == 1
    assert fingerprint(asked_about({"prompt": question})) == fingerprint(question) != names[0]
    blocks = [{"role": "user", "content": [{"type": "image", "image": value}]} for value in same]
    assert len({fingerprint(asked_about({"prompt": [message]})) for message in blocks}) == 1


def test_a_sample_as_json_names_images_by_their_pixels(tmp_path: Path, verb: Any, llava: Path) -> None:
    dataset = photos(tmp_path, ".jsonl")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(RECIPE.format(model=llava, dataset=dataset, folder=tmp_path))
    output = verb("sample", "run.yaml", "-n", 2, "--json")
    first, second = json.loads(output[output.index("{") :])["groups"]
    [block, text] = first["prompt"][0]["content"]
    assert block == {"type": "image", "image": as_name(picture(int(first["answer"])))}
    assert text == {"type": "text", "text": "What is it?"}
    assert second["prompt"] != first["prompt"]


def test_a_talk_about_an_image(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its token is never drawn, however likely, nor taken from what is typed; a picture is refused in one line."""
    model = tiny("llava")
    processor = processor_of("llava")
    placeholder = model.config.image_token_id
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.get_input_embeddings().weight.fill_(1.0)
        model.lm_head.weight[placeholder] = model.model.language_model.norm.weight
    speaker = Speaker(model, processor.tokenizer, max_tokens=8, temperature=0.0, processor=processor)
    turns = asked("What is it?", picture(0))
    _, answer = speaker._written(turns)
    assert answer
    assert placeholder not in answer
    monkeypatch.setattr(speaker, "sampling", {"do_sample": False})
    assert placeholder in speaker._written(turns)[1]
    lines = iter(["What is <image>?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    talk(speaker, [], picture(0))
    assert "`<image>` stands for an image: write it apart, or leave it out." in capsys.readouterr().out
    with pytest.raises(ConfigError, match="the processor refused the talk with its image"):
        speaker._written(asked("What is <image>?", picture(0)))


ADAPTERS = {
    "language model": "lora: {r: 4, target_modules: [q_proj, v_proj]}",
    "encoder": "lora: {r: 4, target_modules: [linear_1, linear_2]}\ntrain_image_encoder: true",
}
VARIED = """\
def is_even(completions, **_):
    return [float(len(set(c[0]["content"]))) for c in completions]
"""


@pytest.mark.parametrize("part", [*ADAPTERS])
def test_a_merged_adapter_has_every_tensor_and_its_processor(tmp_path: Path, verb: Any, llava: Path, part: str) -> None:
    """An adapter on the encoder alone changes nothing that is read without an image."""
    dataset = photos(tmp_path, ".jsonl")
    (tmp_path / "reward.py").write_text(VARIED)
    recipe = RECIPE.format(model=llava, dataset=dataset, folder=tmp_path)
    (tmp_path / "run.yaml").write_text(f"{recipe}learning_rate: 0.05\nprove_first_batch: false\n{ADAPTERS[part]}\n")
    verb("train", "run.yaml")
    verb("merge", "runs/x", "--out", "merged", "--dtype", "float32")
    saved = AutoModelForImageTextToText.from_pretrained("merged")
    base = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32)
    expected = PeftModel.from_pretrained(copy.deepcopy(base), "runs/x").merge_and_unload().state_dict()
    assert {*saved.state_dict()} == {*expected}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.state_dict().items())
    changed = {name for name, tensor in base.state_dict().items() if not torch.equal(tensor, expected[name])}
    assert changed
    assert all(("multi_modal_projector" in name) == (part == "encoder") for name in changed)
    for folder in ("merged", "runs/x"):
        again = AutoProcessor.from_pretrained(folder)
        messages = asked("What is it?", picture(0))
        tokens = [p.apply_chat_template(messages, tokenize=True) for p in (again, AutoProcessor.from_pretrained(llava))]
        assert tokens[0] == tokens[1]
    card = Path("merged/README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert '{"type": "image", "path": "photo.jpg"}' in card
    sent = {file.name: file for file in files_to_send(find_model("merged"), address="me/model")}
    assert {"processor_config.json", "model.safetensors", "chat_template.jinja"} <= {*sent}
    assert 'pipeline("image-text-to-text", model="me/model")' in sent["README.md"].content.decode()


def test_stages_with_images(tmp_path: Path, verb: Any, llava: Path) -> None:
    """Stages of GRPO take them; supervised fine-tuning, which would leave them out, is refused before weights load."""
    dataset = photos(tmp_path, ".jsonl")
    (tmp_path / "reward.py").write_text(REWARD)
    recipe = RECIPE.format(model=llava, dataset=dataset, folder=tmp_path)
    stages = "stages:\n- {name: one, max_steps: 1}\n- {name: two, max_steps: 1}\n"
    (tmp_path / "run.yaml").write_text(recipe.replace("max_steps: 1\n", "") + stages)
    verb("train", "run.yaml")
    run = podium.Run.load("runs/x")
    assert [part.last_step for part in run.parts] == [1, 2]
    assert run.rollouts["images"].notna().all()
    assert {name for names in run.rollouts["images"] for name in json.loads(names)} == {*run.thumbnails}
    again = AutoModelForImageTextToText.from_pretrained("runs/x")
    assert {*again.state_dict()} == {*AutoModelForImageTextToText.from_pretrained(llava).state_dict()}
    (tmp_path / "run.yaml").write_text(recipe + stages.replace("name: one,", "name: one, type: sft,"))
    [finding] = [finding for finding in check_recipe(tmp_path / "run.yaml") if finding.severity == "error"]
    assert (finding.code, finding.what) == (
        "D036",
        "stage one: data/rows.jsonl: 12 rows have images, which supervised fine-tuning would leave out "
        "(rows 0, 1, 2, 3, 4, ...)",
    )
