"""Rows with images: the bad ones are found before weights are loaded, the good ones are read as a person sees them."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from datasets import Dataset, Features, List, Value, load_from_disk
from datasets import Image as ImageColumn
from PIL import Image
from transformers.video_processing_utils import BaseVideoProcessor

import podium.data
from benchmarks.families import tokenizer_of, write_family
from podium import GRPOConfig, GRPOTrainer
from podium.checks import check_recipe
from podium.data import PromptBuilder, check_dataset, sources, survey
from podium.data.columns import Columns
from podium.data.files import file_rows
from podium.data.images import opened
from podium.data.selection import RowTransform, fingerprint
from podium.data.sources import dataset_source, undecoded
from podium.data.survey import RowSurvey, find_problems, survey_rows
from podium.errors import DataError, Finding
from podium.models import loading
from podium.models.images import ImageProcessor

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<image_start><image><image_end>{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = [{"role": "user", "content": "What is this?"}]
PLACE = {"type": "image"}
TEXT = {"type": "text", "text": "What is this?"}


class _Processor(transformers.Qwen2_5_VLProcessor):
    def check_argument_for_proper_class(self, _name: str, argument: Any) -> type:
        """Videos need torchvision, and there are none."""
        return type(argument)


def processor() -> _Processor:
    """A processor that makes one token of 8 x 8 pixels."""
    tokenizer = tokenizer_of("qwen2_5_vl")
    tokenizer.image_token, tokenizer.video_token = "<image>", "<video>"
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, min_pixels=64, max_pixels=4096, temporal_patch_size=2, merge_size=2
    )
    videos = BaseVideoProcessor.__new__(BaseVideoProcessor)
    return _Processor(image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=TEMPLATE)


def builder(**settings: Any) -> PromptBuilder:
    made = processor()
    reader = ImageProcessor(lambda: made, made.tokenizer.image_token_id)
    made.tokenizer.chat_template = TEMPLATE
    return PromptBuilder(tokenizer=made.tokenizer, **{"images": reader, **settings})


BUILDER = builder()


def noise(height: int = 16, width: int = 24, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def bomb() -> bytes:
    """A PNG of a few bytes that says it has 40,000 x 40,000 pixels."""
    start = bytearray(png(Image.new("L", (8, 8))))
    start[16:24] = struct.pack(">II", 40_000, 40_000)
    start[29:33] = struct.pack(">I", zlib.crc32(bytes(start[12:29])))
    return bytes(start)


def animated() -> bytes:
    stream = io.BytesIO()
    noise().save(stream, format="GIF", save_all=True, append_images=[noise(seed=1), noise(seed=2)])
    return stream.getvalue()


def files(folder: Path) -> None:
    """Bad files, by the names that `BAD` has."""
    noise(64, 64).save(folder / "whole.jpg")
    whole = (folder / "whole.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "page.png").write_text("<html>404 Not Found</html>")
    (folder / "folder.png").mkdir()


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("truncated JPEG", {"image": "cut.jpg"}, "D062", "image 1 cannot be read: cut.jpg (image file is truncated"),
    ("empty file", {"image": "empty.png"}, "D062", "image 1 is empty, or in no format that is known: empty.png"),
    ("text as PNG", {"image": "page.png"}, "D062", "image 1 is empty, or in no format that is known: page.png"),
    ("missing", {"images": ["whole.jpg", "no.png"]}, "D062", "image 2 is no file: no.png"),
    ("folder", {"image": "folder.png"}, "D062", "image 1 is no file: folder.png"),
    ("address", {"image": "https://a.example/1.png"}, "D062", "image 1 is an address, and images are not downloaded"),
    ("animated GIF", {"image": animated()}, "D062", "image 1 has 3 frames"),
    ("bytes", {"image": b"\x00\x01garbage"}, "D062", "image 1 is empty, or in no format that is known"),
    ("half of the bytes", {"image": png(noise())[:200]}, "D062", "image 1 cannot be read (image file is truncated"),
    ("bomb", {"image": bomb()}, "D062", "image 1 is too large (Image size (1600000000 pixels)"),
    ("null in a list", {"images": [noise(), None]}, "D062", "image 2 is null"),
    ("number", {"image": 7}, "D062", "image 1 is of type int, and no image, path or bytes"),
    ("list in `image`", {"image": [noise()]}, "D062", "image 1 is of type list, and no image, path or bytes"),
    ("data URI", {"image": "data:image/png;base64," + "A" * 9000}, "D062", "image 1 is empty, or in no format that is known: data:image/png"),  # noqa: E501
    ("NUL in a path", {"image": "a\0.png"}, "D062", "image 1 cannot be read: a\0.png (embedded null byte)"),
    ("nothing stored", {"image": {"bytes": None, "path": None}}, "D062", "image 1 is null"),
    ("bad block", {"prompt": [{"role": "user", "content": [{**PLACE, "image": b"x"}, TEXT]}]}, "D062", "the image in message 1 is empty"),  # noqa: E501
    ("more images than blocks", {"images": [noise(), noise()], "prompt": [{"role": "user", "content": [PLACE, TEXT]}]}, "D063", "images provided (2) does not match number of image placeholders (1)"),  # noqa: E501
    ("fewer images than blocks", {"image": noise(), "prompt": [{"role": "user", "content": [PLACE, PLACE, TEXT]}]}, "D063", "images provided (1) does not match number of image placeholders (2)"),  # noqa: E501
    ("blocks without images", {"prompt": [{"role": "user", "content": [PLACE, TEXT]}]}, "D063", "images provided (0)"),
    ("no message of the user", {"image": noise(), "prompt": [{"role": "system", "content": "Look."}]}, "D063", "placeholders (0)"),  # noqa: E501
    ("plain text", {"image": noise(), "prompt": "What is this?"}, "D063", "the prompt is a text, and the row has"),
    ("role without images", {"image": noise(), "prompt": [{"role": "developer", "content": "x"}, *QUESTION]}, "D063", "Invalid role in message: developer"),  # noqa: E501
    ("unknown role", {"image": noise(), "prompt": [{"role": "robot", "content": "x"}]}, "D010", 'unknown role "robot"'),
    ("video", {"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}, TEXT]}]}, "D036", "content of type video"),  # noqa: E501
    ("audio", {"prompt": [{"role": "user", "content": [{"type": "audio"}, TEXT]}]}, "D036", "content of type audio"),
    ("floating point", {"image": Image.fromarray(np.zeros((8, 8), np.float32))}, "D062", "image 1 cannot be read (its pixels are floating-point numbers"),  # noqa: E501
    ("block beside a text", {"image": noise(), "prompt": [*QUESTION, {"role": "assistant", "content": "?"}, {"role": "user", "content": [PLACE, TEXT]}]}, "D063", "images provided (1) does not match number of image placeholders (2)"),  # noqa: E501
    ("token in the text", {"image": noise(), "prompt": [{"role": "user", "content": "<image>What is it?"}]}, "D063", "the text has `<image>`, which stands for an image"),  # noqa: E501
    ("refused", {"image": noise(2, 900)}, "D063", "the processor refused the conversation with its images"),
]  # fmt: skip
GOOD = [{"prompt": QUESTION, "image": noise()}, {"prompt": QUESTION}, {"prompt": QUESTION, "images": []}]


@pytest.mark.parametrize(("row", "code", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_one_message_for_what_is_bad(row, code, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files(tmp_path)
    rows = [*GOOD, {"prompt": QUESTION, **row}]
    found = find_problems(rows, "train_dataset", builder=BUILDER)
    [finding] = [finding for finding in found if finding.code != "D013"]  # a text beside conversations
    assert (finding.code, finding.severity) == (code, "error")
    assert finding.what.startswith("row 3: ")
    assert says in finding.what
    assert len(finding.what) < 600
    assert finding.fix
    with pytest.raises(DataError) as error:
        BUILDER(rows[3], id=0, row_index=3)
    assert error.value.code == code
    assert str(error.value).count("row 3") == 1


def test_every_bad_image_of_a_row_has_its_message(tmp_path):
    row = {"prompt": QUESTION, "images": [noise(), tmp_path / "a.png", None, b""]}
    found = find_problems([row], "rows", builder=BUILDER)
    assert [finding.what.partition(" is ")[0] for finding in found] == [f"row 0: image {n}" for n in (2, 3, 4)]


def test_the_token_of_an_image_in_the_text_of_a_row_without_any():
    """Beside rows with images a forward would take it for one; among rows of text it is a text."""
    spelled = [{"prompt": [{"role": "user", "content": f"What is <image> {n}?"}]} for n in range(3)]
    [finding] = find_problems([*GOOD, *spelled], "rows", builder=BUILDER)
    assert finding.what == (
        "3 prompts without images have `<image>` in the text, which stands for an image, and other rows have images "
        "(rows 3, 4, 5)"
    )
    assert (finding.code, finding.severity) == ("D063", "error")
    assert not find_problems(spelled, "rows", builder=BUILDER)
    assert not find_problems([*GOOD, *spelled], "rows", builder=builder(images=None))[1:]


def test_a_model_of_text_is_named_once():
    rows = [{"prompt": QUESTION}, *({"prompt": QUESTION, "image": "gone.png"} for _ in range(30))]
    text = builder(images=None)
    [finding] = find_problems(rows, "train_dataset", builder=text)
    assert (finding.code, finding.what) == ("D036", "row 1: the row has images, and the model reads text alone")
    thorough = survey_rows(RowSurvey(source=dataset_source(rows, "rows"), builder=text))
    assert [(finding.code, finding.what[:11]) for finding in thorough.findings] == [("D036", "rows, row 1")]


def test_a_template_without_a_place_for_images():
    plain = builder(template="{% for m in messages %}{{ m['role'] }}{% endfor %}")
    [finding] = find_problems([{"prompt": QUESTION, "image": noise()}], "rows", builder=plain)
    assert (finding.code, "leaves the images out" in finding.what) == ("D063", True)


@pytest.mark.parametrize(("overlong", "severity"), [("error", "error"), ("drop", "warning"), ("truncate", "error")])
def test_tokens_of_images_count_towards_the_limit(overlong, severity):
    rows = [*({"prompt": QUESTION, "image": noise()} for _ in range(3)), {"prompt": QUESTION, "image": noise(64, 64)}]
    long = builder(max_prompt_length=80, overlong=overlong)
    [finding] = find_problems(rows, "rows", builder=long)
    assert (finding.code, finding.severity) == ("D014", severity)
    assert "98 tokens" in finding.what
    assert "truncate" not in finding.fix
    if overlong == "drop":
        found = survey.checked_rows(
            Dataset.from_list([*rows, {"prompt": QUESTION}]), "rows", num_needed=1, builder=long
        )
        assert found.too_long == (3,)


def test_tokens_of_images_are_counted():
    blocks = [{"role": "user", "content": [PLACE, PLACE, TEXT]}]
    rows = [{"prompt": blocks, "images": [noise(8, 8), noise(64, 64)]}, {"prompt": QUESTION, "image": noise(16, 16)}]
    counted = survey_rows(RowSurvey(source=dataset_source(rows, "rows"), builder=BUILDER))
    assert counted.image_tokens == [1, 64, 4]
    assert counted.longest[0] == len(BUILDER(rows[0], id=0, row_index=0).token_ids)
    assert sorted(counted.lengths) == sorted(len(BUILDER(row, id=0, row_index=0).token_ids) for row in rows)
    assert counted.examples[1]["image"].mode == "RGB"


def test_a_trainer_opens_the_images_of_the_first_rows(monkeypatch):
    monkeypatch.setattr(survey, "OPENED_ROWS", 2)
    rows = [{"prompt": QUESTION}, *({"prompt": QUESTION, "image": noise()} for _ in range(2))]
    rows.append({"prompt": QUESTION, "image": "gone.png"})
    check_dataset(rows, "rows", builder=BUILDER)
    with pytest.raises(DataError, match=r"rows, row 3: image 1 is no file: gone.png \[D062\]"):
        builder(name="rows")(rows[3], id=0, row_index=3, checked=True)
    with pytest.raises(DataError, match="gone"):  # prompts that are too long are to be known
        survey.checked_rows(rows, "rows", num_needed=1, builder=builder(overlong="drop", max_prompt_length=500))


# ---- datasets ----


FEATURES: dict[str, Callable[[bytes], tuple[dict[str, Any], Features]]] = {
    "image": lambda data: (
        {"prompt": "x", "image": {"bytes": data, "path": None}},
        Features({"prompt": Value("string"), "image": ImageColumn()}),
    ),
    "images": lambda data: (
        {"prompt": "x", "images": [{"bytes": data, "path": None}]},
        Features({"prompt": Value("string"), "images": List(ImageColumn())}),
    ),
}


@pytest.mark.parametrize("column", [*FEATURES])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_image_of_a_dataset_is_known_by_its_row(column, stream):
    good, features = FEATURES[column](png(noise()))
    bad, _ = FEATURES[column](b"garbage")
    turns = List({"role": Value("string"), "content": Value("string")})
    rows = [{**row, "prompt": QUESTION} for row in (good, bad)]
    data = Dataset.from_list(rows, features=Features({**features, "prompt": turns}))
    data = data.to_iterable_dataset() if stream else data
    [finding] = find_problems(data, "rows", builder=BUILDER)
    assert finding.what.startswith("row 1: image 1 is empty")
    stored = undecoded(data)
    value = next(iter(stored))[column]
    assert (value[0] if column == "images" else value)["bytes"] == png(noise())
    assert data.features[column] == features[column]
    prompt = BUILDER(next(iter(stored)), id=0, row_index=0)
    shown = prompt.columns[column]
    assert np.array_equal(np.asarray(shown[0] if column == "images" else shown), np.asarray(noise()))


def test_blocks_of_a_dataset_that_have_the_keys_of_each_other():
    block = {"type": Value("string"), "text": Value("string"), "image": ImageColumn()}
    features = Features({"prompt": List({"role": Value("string"), "content": List(block)})})
    content = [{**PLACE, "image": {"bytes": png(noise()), "path": None}}, TEXT]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": content}]}], features=features)
    prompt = BUILDER(undecoded(data)[0], id=0, row_index=0)
    assert [sorted(part) for part in prompt.content[0]["content"]] == [["image", "type"], ["text", "type"]]
    assert not find_problems(data, "rows", builder=BUILDER)


def test_a_dataset_of_texts_is_not_touched():
    data = Dataset.from_list([{"prompt": "1+1=", "answer": "2"}])
    assert undecoded(data) is data


# ---- files ----


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    """A folder with images, and a place to look at it from."""
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    for number in range(4):
        noise(seed=number).save(folder / f"pictures/{number}.png")
    monkeypatch.chdir(tmp_path)
    return folder


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    file = folder / f"rows{kind}"
    if kind == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == ".json":
        file.write_text(json.dumps(rows))
    elif kind == ".csv":
        Dataset.from_list(rows).to_csv(file, index=False)
    else:
        Dataset.from_list(rows).to_parquet(file)
    return str(file.relative_to(Path.cwd()))


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".parquet", "folder"])
@pytest.mark.parametrize("streamed", [False, True])
def test_paths_are_relative_to_the_file(photos, kind, streamed):
    rows = [{"question": f"What is {n}?", "photo": f"pictures/{n}.png", "answer": str(n)} for n in range(4)]
    name = write(photos, ".jsonl" if kind == "folder" else kind, rows)
    name = "data" if kind == "folder" else name
    [*made] = podium.data.load(name, prompt="{question}", columns={"image": "photo"}, dataset_streaming=streamed).train
    assert [Path(row["image"]) for row in made] == [Path(f"data/pictures/{n}.png") for n in range(4)]
    assert made[2]["prompt"] == [{"role": "user", "content": "What is 2?"}]
    prompt = BUILDER(made[3], id=0, row_index=3)
    assert np.array_equal(np.asarray(prompt.columns["image"]), np.asarray(noise(seed=3)))


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_several_images_and_none(photos, kind):
    absolute = str(photos / "pictures/1.png")
    paths: list[Any] = [["pictures/0.png", absolute], None]
    if kind == ".csv":
        paths[0] = str(paths[0])
    name = write(photos, kind, [{"prompt": "What is it?", "images": each} for each in paths])
    first, second = podium.data.load(name).train
    assert first["images"] == ["data/pictures/0.png", absolute]
    assert second["images"] is None
    assert not find_problems([first, second], "rows", builder=BUILDER)
    assert BUILDER(second, id=0, row_index=1).images == ()


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("streamed", [False, True])
def test_paths_in_blocks_are_relative_to_the_file(photos, kind, streamed):
    content = [{**PLACE, "image": "pictures/2.png", "text": None}, {**TEXT, "image": None}]
    name = write(photos, kind, [{"prompt": [{"role": "user", "content": content}]}] * 3)
    [row, *_] = podium.data.load(name, dataset_streaming=streamed).train
    prompt = BUILDER(row, id=0, row_index=0)
    assert np.array_equal(np.asarray(prompt.content[0]["content"][0]["image"]), np.asarray(noise(seed=2)))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("column", ["image", "photo"])
def test_a_file_whose_first_image_comes_late(photos, streamed, column, monkeypatch):
    """All rows are conversations then, as in a file that begins with an image."""
    monkeypatch.setattr("podium.data.files.SEARCHED", 7)
    rows = [{"prompt": f"What is {n}?"} for n in range(130)] + [{"prompt": "What is it?", column: "pictures/3.png"}]
    name = write(photos, ".jsonl", rows)
    renamed = {} if column == "image" else {"columns": {"image": column}}
    [*made] = podium.data.load(name, dataset_streaming=streamed, **renamed).train
    assert made[0]["prompt"] == [{"role": "user", "content": "What is 0?"}]
    prompt = BUILDER(made[-1], id=0, row_index=0)
    assert np.array_equal(np.asarray(prompt.columns["image"]), np.asarray(noise(seed=3)))


def test_a_file_of_texts_is_read_once(photos, monkeypatch):
    """What may be a column of images is searched for in its bytes."""
    read = []
    monkeypatch.setattr(sources, "file_rows", lambda path: read.append(path) or file_rows(path))
    podium.data.load(write(photos, ".jsonl", [{"prompt": f"What is an image of {n}?"} for n in range(130)]))
    assert len(read) == 1


@pytest.mark.parametrize("empty", [[], None])
def test_an_empty_column_beside_one_with_an_image(photos, empty):
    """As beside a column `images` alone, or `image` alone."""
    rows = [{"prompt": "What is it?", "images": empty, "image": "pictures/0.png"}]
    rows.append({"prompt": "What are they?", "images": ["pictures/1.png"], "image": None})
    rows.append({"prompt": "What is 1+1?", "images": empty, "image": None})
    made = podium.data.load(write(photos, ".jsonl", rows)).train
    assert not find_problems(made, "rows", builder=BUILDER)
    one, several, none = (BUILDER(row, id=0, row_index=0) for row in made)
    assert np.array_equal(np.asarray(one.columns["image"]), np.asarray(noise(seed=0)))
    assert np.array_equal(np.asarray(several.columns["images"][0]), np.asarray(noise(seed=1)))
    assert not none.images


def test_text_rows_beside_rows_with_images(photos):
    rows = [{"prompt": "What is 1+1?"}, {"prompt": "What is it?", "image": "pictures/0.png"}]
    made = podium.data.load(write(photos, ".jsonl", rows)).train
    assert not find_problems(made, "rows", builder=BUILDER)
    assert [BUILDER(row, id=0, row_index=0).images == () for row in made] == [True, False]


def test_rows_of_a_dataset_keep_their_images(photos):
    features = Features({"question": Value("string"), "photo": ImageColumn()})
    rows = [{"question": "What?", "photo": str(photos / f"pictures/{n}.png")} for n in range(4)]
    Dataset.from_list(rows, features=features).save_to_disk(photos / "saved")
    columns = {"prompt": "{question}", "columns": {"image": "photo"}}
    for name in (load_from_disk(photos / "saved"), "data/saved"):
        made = podium.data.load(name, held_out=0.5, **columns)
        assert made.train.column_names == ["question", "prompt", "photo", "image"]
        assert made.train.features["image"] == ImageColumn()
        shown = [np.asarray(row["image"]) for part in made for row in part]
        assert len(made.train)
        assert len(made.held_out)
        assert sorted(image.tobytes() for image in shown) == sorted(noise(seed=n).tobytes() for n in range(4))


def test_rows_are_told_apart_by_their_images():
    columns = Columns(prompt="{q}")
    values = ["a.png", "b.png", b"1", b"2", {"bytes": b"3", "path": "c.png"}, {"bytes": None, "path": "d.png"}]
    values += [noise(), noise(seed=1)]
    rows = [{"q": "What is this?", "image": value} for value in values]
    names = [fingerprint(columns.identity(row)) for row in [*rows, {"q": "What is this?", "image": None}]]
    assert len({*names}) == len(values) + 1
    assert names[-1] == fingerprint("What is this?")
    assert names[6] == fingerprint(columns.identity({**rows[6], "image": noise(), "answer": "x"}))
    renamed = Columns(prompt="{q}", columns={"image": "photo"})
    assert fingerprint(renamed.identity({"q": "What is this?", "photo": "a.png"})) == names[0]
    split = RowTransform(columns=columns, held_out=0.5)
    many = [{"q": "What is this?", "image": f"{n}.png"} for n in range(200)]
    assert 70 < sum(split(row, Counter()) is not None for row in many) < 130


def test_the_same_question_about_other_images_is_no_repeat(photos):
    rows = [{"prompt": QUESTION, "image": str(photos / f"pictures/{n}.png"), "answer": str(n)} for n in (0, 1, 2, 0)]
    counted = survey_rows(RowSurvey(source=dataset_source(rows, "rows"), builder=BUILDER))
    assert (counted.prompts.num_repeats, counted.prompts.first_repeat) == (1, (3, 0))
    assert counted.prompts.num_contradicting == 0


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_a_folder_of_images_with_their_metadata(photos, name):
    """As `datasets` reads an ImageFolder: the rows were taken for all, and their images left out."""
    rows = [{"file_name": f"pictures/{n}.png", "question": f"What is {n}?", "answer": str(n)} for n in range(4)]
    if name.endswith("csv"):
        Dataset.from_list(rows).to_csv(photos / name, index=False)
    else:
        (photos / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    [*made] = podium.data.load("data", prompt="{question}").train
    assert not find_problems(made, "rows", builder=BUILDER)
    assert sorted(str(row["answer"]) for row in made) == ["0", "1", "2", "3"]
    for row in made:
        prompt = BUILDER(row, id=0, row_index=0)
        assert row["prompt"] == [{"role": "user", "content": f"What is {row['answer']}?"}]
        assert np.array_equal(np.asarray(prompt.columns["image"]), np.asarray(noise(seed=int(row["answer"]))))


# ---- images as a person sees them ----


def seen(image: Image.Image, **settings: Any) -> np.ndarray:
    stream = io.BytesIO()
    image.save(stream, **{"format": "PNG", **settings})
    return np.asarray(opened(stream.getvalue(), "the image"))


RGB = np.asarray(noise(6, 9))
ALPHA = np.random.default_rng(1).integers(0, 255, (6, 9), dtype=np.uint8)
GREY = RGB[..., 0]


def on_white(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return rgb * share + 255 * (1 - share)


def test_palette():
    image = Image.fromarray(RGB).quantize(16)
    assert np.array_equal(seen(image), np.asarray(image.convert("RGB")))


def test_palette_with_transparency():
    image = Image.fromarray(RGB).quantize(16)
    colours = np.asarray(image.convert("RGB"))
    expected = np.where(np.asarray(image)[..., None] == 3, 255, colours)
    assert np.array_equal(seen(image, transparency=3), expected)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_on_white(mode):
    rgb = RGB if mode == "RGBA" else np.repeat(GREY[..., None], 3, axis=-1)
    image = Image.fromarray(np.dstack([RGB, ALPHA]) if mode == "RGBA" else np.dstack([GREY, ALPHA]))
    assert image.mode == mode
    assert np.abs(seen(image) - on_white(rgb, ALPHA)).max() <= 1


def test_a_colour_that_is_transparent():
    expected = np.where((RGB[2, 3] == RGB).all(-1)[..., None], 255, RGB)
    assert np.array_equal(seen(Image.fromarray(RGB), transparency=tuple(RGB[2, 3].tolist())), expected)


def test_cmyk():
    image = Image.fromarray(RGB).convert("CMYK")
    assert np.array_equal(seen(image, format="TIFF"), RGB)


def test_grey_of_16_bits():
    grey = np.linspace(0, 65535, 54).round().astype(np.uint16).reshape(6, 9)
    assert np.array_equal(seen(Image.fromarray(grey)), np.repeat((grey // 257).astype(np.uint8)[..., None], 3, axis=-1))


def test_one_bit():
    bits = GREY > 127
    assert np.array_equal(seen(Image.fromarray(bits)), np.repeat(bits[..., None], 3, axis=-1) * np.uint8(255))


TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.transpose(1, 0, 2),
    6: lambda x: x[::-1].transpose(1, 0, 2),
    7: lambda x: x[::-1, ::-1].transpose(1, 0, 2),
    8: lambda x: x[:, ::-1].transpose(1, 0, 2),
}
"""What a person sees of stored rows, by EXIF orientation."""


@pytest.mark.parametrize("orientation", [*TURNS])
def test_exif_orientation(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(seen(Image.fromarray(RGB), exif=exif), TURNS[orientation](RGB))


def test_a_photo_with_a_preview_behind_it():
    first = noise(64, 64)
    stream = io.BytesIO()
    first.save(stream, format="MPO", save_all=True, append_images=[noise(8, 8)])
    assert opened(stream.getvalue(), "the image").size == (64, 64)


def test_pillow_is_not_imported_before_an_image_is_seen():
    code = "import sys, podium.data.survey; print('podium.data.images' in sys.modules, 'PIL.Image' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]


# ---- a recipe, and a trainer ----


LLAVA = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
RECIPE = """\
model: ../model
dataset: rows.jsonl
prompt: "{question}"
rewards: [exact_match]
per_device_train_batch_size: 8
num_generations: 2
max_completion_length: 8
max_steps: 2
"""


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Path:
    """The folder of a model, with the files of its processor."""
    folder = tmp_path_factory.mktemp("models") / "llava"
    write_family("llava", folder)
    tokenizer = tokenizer_of("llava")
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    tokenizer.chat_template = TEMPLATE
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    transformers.LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, **LLAVA).save_pretrained(folder)
    return folder


def checked(photos: Path, model: Path | str, rows: list[dict[str, Any]]) -> list[Finding]:
    write(photos, ".jsonl", rows)
    (photos / "run.yaml").write_text(RECIPE.replace("../model", str(model)).replace("rows.jsonl", "data/rows.jsonl"))
    return check_recipe(photos / "run.yaml")


def test_a_recipe_with_images_is_checked(photos, llava):
    rows = [{"question": "What is it?", "image": f"pictures/{n}.png", "answer": str(n)} for n in range(4)]
    rows.append({"question": "What is 1+1?", "answer": "2"})
    found = checked(photos, llava, rows)
    assert not [finding for finding in found if finding.severity == "error"]
    [lengths] = [finding for finding in found if finding.code == "D040"]
    assert "4 images become 4 / 4 / 4 tokens each (smallest / median / largest), and texts are asked as" in lengths.what
    assert not [finding for finding in found if finding.code in ("D013", "D016", "D045")]
    rows[1]["image"] = rows[3]["image"] = "pictures/9.png"
    bad = [finding for finding in checked(photos, llava, rows) if finding.severity == "error"]
    assert [(finding.code, finding.what) for finding in bad] == [
        ("D062", f"data/rows.jsonl:{line}, row {line - 1}: image 1 is no file: data/pictures/9.png") for line in (2, 4)
    ]


def test_images_with_one_problem_are_one_finding(photos, llava):
    """Those with another problem, or few of them, stay apart."""
    rows = [{"question": "What is it?", "image": f"gone/{n}.png", "answer": str(n)} for n in range(40)]
    (photos / "broken.png").write_bytes(b"")
    rows += [{"question": "What is it?", "image": "broken.png", "answer": "1"}] * 2
    bad = [finding for finding in checked(photos, llava, rows) if finding.severity == "error"]
    broken = "image 1 is empty, or in no format that is known: data/broken.png"
    assert [finding.what for finding in bad] == [
        "data/rows.jsonl: 40 images cannot be used. The first: row 0: image 1 is no file: data/gone/0.png; "
        "row 1: image 1 is no file: data/gone/1.png; row 2: image 1 is no file: data/gone/2.png",
        f"data/rows.jsonl:41, row 40: {broken}",
        f"data/rows.jsonl:42, row 41: {broken}",
    ]
    assert {finding.code for finding in bad} == {"D062"}


@pytest.mark.parametrize("model", ["builtin:smollm2-135m-instruct", "no processor"])
def test_a_recipe_for_a_model_without_images(photos, tmp_path, model):
    if model == "no processor":
        write_family("llava", tmp_path / "bare")
        model = str(tmp_path / "bare")
    rows = [{"question": "What is it?", "image": f"pictures/{n}.png", "answer": str(n)} for n in range(4)]
    [finding] = [finding for finding in checked(photos, model, rows) if finding.severity == "error"]
    assert finding.code == "D036"
    assert finding.what.startswith("data/rows.jsonl:1, row 0: the row has images, and ")


def test_a_trainer_stops_at_a_bad_image_before_weights(photos, llava, monkeypatch):
    monkeypatch.setattr(loading, "load_policy", lambda *_, **__: pytest.fail("weights were loaded"))
    features = Features({"prompt": List({"role": Value("string"), "content": Value("string")}), "image": ImageColumn()})
    rows = [{"prompt": QUESTION, "image": {"bytes": data, "path": None}} for data in (png(noise()), b"x")] * 4
    args = GRPOConfig(str(photos / "run"), per_device_train_batch_size=8, num_generations=2, max_completion_length=8)
    with pytest.raises(DataError, match=r"row 1: image 1 is empty, or in no format that is known \[D062\]"):
        GRPOTrainer(
            str(llava),
            lambda completions, **_: [0.0] * len(completions),
            args,
            Dataset.from_list(rows, features=features),
        )


def test_a_sample_of_prompts_does_not_say_which_are_too_long():
    rows = [{"prompt": "1+1=" * (30 if n % 2 else 1)} for n in range(8)]
    long = builder(overlong="drop", max_prompt_length=40)
    sampled = survey_rows(RowSurvey(source=dataset_source(rows, "rows"), builder=long)).checked(rows)
    assert survey.checked_rows(sampled, "rows", num_needed=1, builder=long).too_long == (1, 3, 5, 7)
