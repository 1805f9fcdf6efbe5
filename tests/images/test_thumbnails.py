"""Thumbnails of prompts: each image once in a run's folder, small, and nothing in them but pixels."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from podium.records import Completion, Group, Prompt, ScoredGroup
from podium.runs import recording
from podium.runs.recording import RunFolder, rollout_rows
from podium.runs.report import page, write_report
from podium.runs.run import Run
from podium.runs.thumbnails import EDGE, name_of, thumbnails
from tests.images.test_runs import made
from tests.images.tiny import asked, picture, processor_of


def prompt(number: int, *images: Image.Image) -> Prompt:
    content = asked("What is this?", *images)
    _, found = reader()(content, {"add_generation_prompt": True})
    mark = f"[image {found.digest.hex()[:8]}]" if images else ""
    return Prompt(id=number, row=number, token_ids=(1, 2), text=f"{mark} What is this?", content=content, images=found)


def reader() -> Any:
    from podium.models.images import ImageProcessor

    processor = processor_of("qwen2_5_vl")
    return ImageProcessor(lambda: processor, processor.tokenizer.convert_tokens_to_ids("<image>"))


def tables(step: int, *prompts: Prompt, completions: int = 3, images: bool = True) -> list[Any]:
    completion = Completion(token_ids=(3,), logps=(-0.5,), finish="stop", text="a cat", policy_step=0)
    scored = [
        ScoredGroup(
            group=Group(prompt=each, completions=(completion,) * completions),
            names_K=("right",),
            rewards_GK=np.zeros((completions, 1)),
        )
        for each in prompts
    ]
    advantages = [np.zeros(completions)] * len(prompts)
    kept = [np.ones(completions, bool)] * len(prompts)
    return rollout_rows(scored, advantages, kept, weights_K=np.ones(1), step=step, images=images)


def begun(path: Path, *, resumed_step: int | None = None) -> RunFolder:
    folder = RunFolder(path / "run")
    folder.begin(resumed_step=resumed_step)
    return folder


def names(run: Run) -> list[list[str]]:
    return [json.loads(images) for images in run.rollouts["images"]]


@pytest.mark.parametrize("size", [(1, 1), (40, 30), (3000, 2000), (9000, 1), (1, 9000)])
def test_a_thumbnail_is_small_and_not_enlarged(size: tuple[int, int]) -> None:
    [jpeg] = thumbnails(asked("What is this?", picture(0, size[1], size[0])))
    with Image.open(io.BytesIO(jpeg)) as image:
        assert image.format == "JPEG"
        assert image.width <= min(EDGE, size[0])
        assert image.height <= min(EDGE, size[1])
        assert abs(image.width / image.height - size[0] / size[1]) < 0.01 or min(image.size) == 1
    assert len(jpeg) < 60_000


def test_nothing_of_the_file_is_in_a_thumbnail_but_its_pixels() -> None:
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[0x010E] = "SECRET in EXIF"
    picture(0).save(stream, format="JPEG", comment=b"SECRET comment", exif=exif, icc_profile=b"SECRET profile")
    image = Image.open(io.BytesIO(stream.getvalue())).convert("RGB")
    assert image.info["comment"] == b"SECRET comment"
    [jpeg] = thumbnails(asked("What is this?", image))
    assert b"SECRET" not in jpeg


def test_an_image_is_kept_once(tmp_path: Path) -> None:
    """Whatever number of completions, prompts and steps it is in, and after the run goes on."""
    first, second = prompt(0, picture(0)), prompt(1, picture(0), picture(1))
    folder = begun(tmp_path)
    folder.add_rollouts(tables(1, first, second))
    folder.add_rollouts(tables(2, second))
    begun(tmp_path, resumed_step=2).add_rollouts(tables(3, first))
    run = Run.load(tmp_path / "run")
    assert len((tmp_path / "run" / "thumbnails.jsonl").read_text().splitlines()) == 2
    zero, one = thumbnails(second.content)
    assert run.thumbnails == {name_of(zero): zero, name_of(one): one}
    both = [name_of(zero), name_of(one)]
    assert names(run) == [both[:1]] * 3 + [both] * 6 + [both[:1]] * 3
    begun(tmp_path)
    assert Run.load(tmp_path / "run" / "earlier-1").thumbnails == run.thumbnails
    assert Run.load(tmp_path / "run").thumbnails == {}


def test_a_run_keeps_so_many_bytes_of_thumbnails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jpegs = [thumbnails(asked("", picture(seed)))[0] for seed in range(6)]
    monkeypatch.setattr(recording, "THUMBNAIL_BYTES", sum(map(len, jpegs[:3])))
    for seed in range(6):
        begun(tmp_path, resumed_step=9).add_rollouts(tables(seed, prompt(seed, picture(seed))))
    run = Run.load(tmp_path / "run")
    assert [*run.thumbnails.values()] == jpegs[:3]
    assert [found for [found] in names(run)[::3]] == [name_of(jpeg) for jpeg in jpegs]


def test_damaged_lines_have_no_picture(tmp_path: Path) -> None:
    begun(tmp_path).add_rollouts(tables(1, prompt(0, picture(0))))
    with (tmp_path / "run" / "thumbnails.jsonl").open("a") as file:
        file.write('{"jpeg": 7}\n{"jpeg": "<script>"}\n{"other": 1}\n[]\n{"jpeg": "AAA')
    assert [*Run.load(tmp_path / "run").thumbnails.values()] == [*thumbnails(asked("", picture(0)))]


def test_a_page_has_the_latest_thumbnails_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun(tmp_path)
    for step in range(1, 5):
        folder.add_rollouts(tables(step, prompt(step, picture(step))))
    run = Run.load(tmp_path / "run")
    size = sum(len(base64.b64encode(jpeg)) for jpeg in [*run.thumbnails.values()][2:])
    monkeypatch.setattr(page, "MAX_IMAGE_BYTES", size)
    shown = page.run_data(run)["completions"]["thumbnails"]
    assert {*shown} == {*[*run.thumbnails][2:]}
    assert all(base64.b64decode(jpeg) == run.thumbnails[name] for name, jpeg in shown.items())
    assert len(page.run_data(run, share=2)["completions"]["thumbnails"]) == 1
    assert len(page.run_data(run, after_step=3)["completions"]["thumbnails"]) == 1


def test_a_page_without_thumbnails_allows_no_image(tmp_path: Path) -> None:
    begun(tmp_path).add_rollouts(tables(1, prompt(0, picture(0)), images=False))
    run = Run.load(tmp_path / "run")
    assert run.rollouts["images"].isna().all()
    html = write_report([run], tmp_path / "page.html").read_text()
    assert "img-src" not in html
    begun(tmp_path).add_rollouts(tables(1, prompt(0, picture(0))))
    html = write_report([Run.load(tmp_path / "run")], tmp_path / "page.html").read_text()
    assert html.count("img-src data:; ") == 1


@pytest.mark.parametrize("log_multimodal", [True, False])
def test_a_run_keeps_the_images_that_it_was_trained_on(tmp_path: Path, log_multimodal: bool) -> None:
    made(tmp_path, max_steps=1, save_strategy="no", log_multimodal=log_multimodal).train()
    run = Run.load(tmp_path)
    assert (tmp_path / "thumbnails.jsonl").exists() is log_multimodal
    assert len(run.thumbnails) == (2 if log_multimodal else 0)
    assert run.rollouts["images"].notna().sum() == (8 if log_multimodal else 0)
