"""Images that tools, environments and programs give: their tokens, what is drawn behind them, and training on them."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pandas as pd
import pytest
import torch
import trl
from datasets import Dataset
from openai import BadRequestError, OpenAI
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.families import tiny
from podium import GRPOConfig, GRPOTrainer, TextEnvironment
from podium.agents.chat import ChatFormat, set_tool_template
from podium.agents.programs.program import CommandProgram
from podium.agents.resolve import resolve_tools
from podium.agents.tools import CallLimits, ToolRunner, as_tools, by_name
from podium.data.images import opened
from podium.models.images import ImageProcessor, joined
from podium.models.stored import outside
from podium.records import Message, as_name
from tests.images.test_families import FAST, PATHS, counted, family_of
from tests.images.test_runs import StopAfter, digest
from tests.images.test_trl_tests import OF_TRL
from tests.images.tiny import PROCESSORS, asked, picture, processor_of
from tests.unit.agents_setup import called, replied

families = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in PROCESSORS]
)

ANSWER: Message = {"role": "assistant", "content": "look"}


def chat_of(name: str) -> tuple[ChatFormat, ImageProcessor]:
    processor = processor_of(name)
    images = ImageProcessor(lambda: processor, family_of(name).placeholder)
    return ChatFormat(tokenizer=processor.tokenizer, images=images), images


def shown(role: str, text: str, *images: Image.Image) -> Message:
    return {**asked(text, *images)[0], "role": role, "name": "look"}


TEMPLATES = [
    file
    for file in (files("trl") / "chat_templates").iterdir()
    if file.name.endswith(".jinja") and "image" in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.name)
def test_the_text_of_an_image_is_found_in_every_template(template: Traversable) -> None:
    """Of those that TRL has for models of images; some write all images before all texts."""
    chat, _ = chat_of("llava")
    chat = replace(chat, chat_template=template.read_text(encoding="utf-8"))
    reply = shown("user", "seen", picture(1), picture(2))
    text = chat.render([{"role": "user", "content": "hi?"}, ANSWER, reply], add_generation_prompt=True)
    assert chat._image_text
    assert text.count(chat._image_text) == 2


@families
@pytest.mark.parametrize("role", ["tool", "user"])
def test_tokens_are_those_of_the_processor(name: str, role: str) -> None:
    """Of two images with text, behind a turn that was drawn."""
    chat, images = chat_of(name)
    reply = shown(role, "seen", picture(1), picture(2, 32, 32))
    whole = [*asked("hi?"), ANSWER, reply]
    expected_ids, expected = images(whole, {"add_generation_prompt": True})
    suffix, given = chat.suffix([reply], last=-1)
    assert list(suffix) == expected_ids[len(expected_ids) - len(suffix) :]
    assert len(suffix) > len(expected.placeholders)
    places = [x.start + place for x in given for place in x.placeholders]
    assert places == [int(place) - len(expected_ids) + len(suffix) for place in expected.placeholders]
    fields = joined([x.fields for x in given])
    assert fields.keys() == expected.fields.keys()
    for key, x in fields.items():
        assert x.flatten().tolist() == pytest.approx(expected.fields[key].flatten().tolist()), key
    for key, x_L in expected.token_fields.items():
        own_L = torch.zeros_like(x_L)
        for found in given:
            start = len(expected_ids) - len(suffix) + found.start
            own_L[start : start + len(found.token_fields[key])] = found.token_fields[key]
        assert own_L.tolist() == x_L.tolist(), key


# ---- whole runs ----


class Painter(TextEnvironment):
    """Shows an image at first, and another one after the first turn."""

    def reset(self, seed: int, **_: Any) -> list[Any]:
        self.seed = seed % 7
        return asked("hi?", picture(self.seed))[0]["content"]

    def step(self, text: str) -> tuple[list[Any] | None, float, bool, dict[str, Any]]:
        reward = float(len(set(text)))
        if self.step_rewards:
            return None, reward, True, {}
        return asked("now? <image>", picture(self.seed + len(text) % 3, 32, 32))[0]["content"], reward, False, {}


def ending(name: str) -> PreTrainedModel:
    """A tiny model with room for tools that soon draws its end token."""
    model = tiny(name)
    model.config.get_text_config().max_position_embeddings = 4096
    end = processor_of(name).tokenizer.eos_token_id

    def likely(_module: Any, _inputs: Any, logits: Tensor) -> Tensor:
        return logits + 3.0 * (torch.arange(logits.shape[-1]) == end)

    model.get_output_embeddings().register_forward_hook(likely)
    return model


def made(folder: Path, name: str, **changes: Any) -> GRPOTrainer:
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 200,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "prove_first_batch": True,
        "log_completions": True,
        "on_finding": {"W120": "ignore"},
        **changes,
    }
    return GRPOTrainer(
        model=ending(name),
        reward_funcs=[],
        args=GRPOConfig(str(folder), **settings),
        train_dataset=[{"prompt": [{"role": "user", "content": ""}]}] * 6,
        processing_class=processor_of(name),
        environment_factory=Painter,
    )


@families
def test_a_run_in_an_environment_that_shows_images(name: str, tmp_path: Path) -> None:
    """Its first batch is proved; some conversations have two images, and are trained on."""
    trainer = made(tmp_path, name, max_steps=2, save_strategy="no")
    with counted(trainer.model) as calls:
        trainer.train()
    assert calls
    table = pd.concat(pd.read_parquet(file) for file in (tmp_path / "completions").glob("*.parquet"))
    assert any("now?" in str(completion) for completion in table["completion"])
    rollouts = pd.concat(pd.read_parquet(file) for file in (tmp_path / "rollouts").glob("*.parquet"))
    known = {as_name(picture(number, 32, 32)) for number in range(9)}
    replies = [x for turns in rollouts["turns"] for turn in json.loads(turns) for x in turn["replies"]]
    assert replies
    assert all(reply["content"][0]["image"] in known for reply in replies)


@pytest.mark.cases(1)
@pytest.mark.parametrize("changes", [{"num_iterations": 2}, {"async_rollouts": 2}], ids=["iterations", "rounds ahead"])
def test_such_a_run_goes_on_bit_by_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Images that an environment gave are in the checkpoint: of the rows alone they cannot be made again."""
    whole = made(tmp_path / "whole", "qwen2_5_vl", prove_first_batch=False, **changes)
    whole.train()
    stopped = made(tmp_path / "parts", "qwen2_5_vl", prove_first_batch=False, **changes)
    stopped.add_callback(StopAfter(1))
    stopped.train()
    resumed = made(tmp_path / "parts", "qwen2_5_vl", prove_first_batch=False, **changes)
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed) == digest(whole)
    assert digest(stopped) != digest(whole)


def look(number: int) -> list[Any]:
    """Look at a picture.

    Args:
        number: of the picture.
    """
    if number == 3:
        return [{"type": "image", "image": b"no image"}]
    if number == 4:
        return [{"type": "image", "image": "/etc/hostname"}]
    return [{"type": "image", "image": picture(number)}, {"type": "text", "text": "seen"}]


@pytest.mark.parametrize("engine", ["live", "transformers"])
def test_a_tool_gives_images(engine: str, tmp_path: Path) -> None:
    """The policy sees them; what is no image, and what names a file, is a result of no use, or text."""
    seen: list[Any] = []

    def score(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [float(len(str(completion)) % 7) for completion in completions]

    processor = processor_of("qwen3_vl")
    tokenizer = processor.tokenizer

    def first_calls(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Each completion begins with a call of its own."""
        turns = [tokenizer(called("look", number=i))["input_ids"] + [tokenizer.eos_token_id] for i in range(5)]
        rendered = trainer.processing_class.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True)
        return {
            "prompt_ids": rendered["input_ids"],
            "completion_ids": turns,
            "logprobs": [[-1.0] * len(turn) for turn in turns],
        }

    trainer = GRPOTrainer(
        model=ending("qwen3_vl"),
        reward_funcs=score,
        args=GRPOConfig(
            str(tmp_path),
            per_device_train_batch_size=5,
            num_generations=5,
            max_completion_length=400,
            max_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            rollout_engine=engine,
            chat_template_kwargs={"chat_template": "builtin:tools"},
        ),
        train_dataset=[{"prompt": [{"role": "user", "content": "Look."}]}] * 2,
        processing_class=processor,
        tools=[look],
        rollout_func=first_calls,
    )
    with counted(trainer.model) as calls:
        trainer.train()
    results = [completion[1]["content"] for completion in seen]
    assert [content[0]["image"].size for content in results[:3]] == [(24, 16)] * 3
    assert "in no format that is known" in results[3]
    assert results[4] == "[{'type': 'image', 'image': '/etc/hostname'}]"
    assert sum(calls) >= 3


LOOK = """
import io
from PIL import Image

def look(side: int) -> list:
    \"\"\"Look at a square.

    Args:
        side: its pixels.
    \"\"\"
    image = Image.new("RGBA", (side, 8), (255, 0, 0, 0))
    file = io.BytesIO()
    image.save(file, "PNG")
    blocks = [{"type": "image", "image": image}, {"type": "image", "image": file.getvalue()}]
    return [*blocks, {"type": "text", "text": "clear"}]
"""


@pytest.mark.parametrize("here", [True, False], ids=["in this process", "in a worker"])
@pytest.mark.parametrize("most", [None, 5])
def test_images_of_a_tool_are_opened_as_those_of_rows(here: bool, most: int | None, tmp_path: Path) -> None:
    """What is transparent is white; a limit of tokens cuts nothing off."""
    (tmp_path / "tools.py").write_text(LOOK)
    if here:
        space: dict[str, Any] = {}
        exec(LOOK, space)
        tools = by_name(as_tools([space["look"]]))
    else:
        tools = by_name(resolve_tools(["tools.py:look"], tmp_path))
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"side": 3}}}]
    runner = ToolRunner()
    try:
        [call] = runner.run(calls, tools, CallLimits(max_result_tokens=most, reads_images=True))
    finally:
        runner.close()
    assert [block["type"] for block in call.content] == ["image", "image", "text"]
    assert [block["image"].getpixel((0, 0)) for block in call.content[:2]] == [(255, 255, 255)] * 2
    assert [block["image"].size for block in call.content[:2]] == [(3, 8)] * 2


def as_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


REFUSED = {
    "https://example.org/cat.png": "none is downloaded",
    "/etc/hostname": "none is downloaded",
    "data:image/png;base64,AAAA": "in no format that is known",
    "data:image/png;base64,*": "cannot be read",
    as_url(Image.new("1", (20_000, 6_000))): "is too large",
}
"""What is no image for the endpoint, and part of its answer."""


def look_twice(base_url: str, api_key: str, row: Any, number: int) -> dict[str, float]:
    """Two turns with an image each, one by each interface, then an edited history; and images that are refused."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    def part(seed: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": as_url(picture(seed))}}

    def ask(messages: list[Any]) -> str:
        return str(client.chat.completions.create(model="policy", messages=messages).choices[0].message.content)

    for url, said in REFUSED.items():
        bad = [{"type": "image_url", "image_url": {"url": url}}]
        with pytest.raises(BadRequestError, match=said):
            ask([{"role": "user", "content": bad}])
    messages: list[Any] = [{"role": "user", "content": [part(number), {"type": "text", "text": "hi?"}]}]
    first = ask(messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": [part(number + 1)]}]
    second = ask(messages)
    sent = {"type": "input_image", "image_url": as_url(picture(7)), "detail": "auto"}
    text = {"type": "input_text", "text": "of another?"}
    other = client.responses.create(model="policy", input=[{"role": "user", "content": [sent, text]}])
    source = {"type": "base64", "media_type": "image/png", "data": as_url(picture(8)).partition(",")[2]}
    block = {"type": "image", "source": source}
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
    third = httpx.post(f"{base_url}/messages", json=body, headers={"x-api-key": api_key}).raise_for_status().json()
    texts = [first, second, other.output_text, *(block.get("text", "") for block in third["content"])]
    return {"length": float(sum(map(len, texts)))}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", [name for name, path in PATHS.items() if path == "shared"])
def test_a_program_sends_images(name: str, tmp_path: Path) -> None:
    """As data URLs, by every interface of the endpoint; its first batch is proved."""
    model = ending(name)
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=600,
            max_steps=2,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            prove_first_batch=True,
        ),
        train_dataset=[{"prompt": [{"role": "user", "content": "?"}], "number": i} for i in range(4)],
        processing_class=processor_of(name),
        agent=look_twice,
    )
    trainer.train()
    sequences = [x for scored in trainer.scored for c in scored.group.completions for x in c.sequences]
    assert sorted(len(x.prompt.images + x.images) for x in sequences) == [1] * 8 + [2] * 4


def test_the_row_of_a_command_has_its_images_as_data_urls(tmp_path: Path) -> None:
    program = CommandProgram(["python", "-c", "pass"], tmp_path)
    task = SimpleNamespace(row={"images": [picture(3)], "number": float("nan")}, variables={})
    program.request(cast(Any, task), tmp_path)
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["number"] is None
    [sent] = row["images"]
    assert opened(sent, "it").tobytes() == picture(3).tobytes()


# ---- beside TRL ----


def scripted_look(trainer: Any, tokenizer: Any) -> None:
    """Have each completion call `look` at first, and answer then; in place of `model.generate`."""

    def generate(input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        texts = [tokenizer.decode(row[mask.bool()]) for row, mask in zip(input_ids, attention_mask, strict=True)]
        answers = [
            f"It is {number}." if replied(text) else called("look", number=number % 3)
            for number, text in enumerate(texts)
        ]
        turns = [[*tokenizer(answer)["input_ids"], tokenizer.eos_token_id] for answer in answers]
        width = max(map(len, turns))
        padded = [[*turn, *[tokenizer.pad_token_id] * (width - len(turn))] for turn in turns]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    trainer.model.generate = generate


CALLING = [x for x in OF_TRL if x not in ("gemma3", "gemma4")]
"""Families that TRL trains with such tools: Gemma 3 has no template for tools, and Gemma 4's forward does not read the
kinds of tokens under the name that TRL has for them."""


@pytest.mark.parametrize("beside", ["an image in the prompt", "no image in the prompt"])
@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x == "qwen3_5" else pytest.mark.slow) for x in CALLING])
def test_tools_that_give_images_move_weights_as_in_trl(name: str, beside: str, tmp_path: Path) -> None:
    settings = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 300,
        "max_steps": 2,
        "learning_rate": 0.005,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "max_grad_norm": 1e3,
        "gradient_checkpointing": False,
        "router_aux_loss_coef": 0.0,
    }
    rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": f"Row {i}"}]} for i in range(2)]
    if beside == "an image in the prompt":
        rows = [{**row, "image": picture(50 + i)} for i, row in enumerate(rows)]
    moves = []
    losses = []
    for kind, config in ((trl.GRPOTrainer, trl.GRPOConfig), (GRPOTrainer, GRPOConfig)):
        processor = processor_of(name)
        set_tool_template(processor.tokenizer)
        processor.chat_template = processor.tokenizer.chat_template
        torch.manual_seed(0)
        model = tiny(name)
        model.config.get_text_config().max_position_embeddings = 4096
        own = {} if kind is trl.GRPOTrainer else {"prove_first_batch": False, "product_precision": "float32"}
        trainer = kind(
            model=model,
            reward_funcs=lambda completions, **_: [0.1 * i * len(completions[i]) for i in range(len(completions))],
            args=config(**settings, **own),
            train_dataset=Dataset.from_list(rows),
            processing_class=processor,
            tools=[look],
        )
        if kind is trl.GRPOTrainer:
            trainer._image_pad_token_id = model.config.image_token_id
            for parameter in outside(trainer.model).values():
                parameter.requires_grad_(False)
        scripted_look(trainer, processor.tokenizer)
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        after = dict(trainer.model.named_parameters())
        moves.append(torch.cat([(after[n].detach() - p).flatten() for n, p in before.items()]))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert trainer.state.log_history[0]["tools/call_frequency"] == 1
    assert moves[0].norm() > 1e-3
    assert float((moves[1] - moves[0]).norm() / moves[0].norm()) < 1e-4
    assert losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-4)
