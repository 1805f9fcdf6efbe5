"""Exports a run's model as a plain folder for any library: `export_model(find_model("runs/x"), Path("x-merged"))`.

An adapter and its base are compared with the hashes that training recorded; then the adapter is merged in float32 and
the result compared with the model before; a full fine-tune is copied. Either is cast, saved, loaded from the disk
and compared with that model on prompts of the run. Only then the folder gets its name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError, ModelError
from podium.errors.texts import listed
from podium.models.check import read_config
from podium.runs.checkpoint import atomic_folder, damage
from podium.runs.find_model import ADAPTER, MERGED, ModelSource, load_model, load_tokenizer, run_of, with_adapter
from podium.runs.rounds import frame_of, recorded_files
from podium.runs.run import ROLLOUTS, STAGES, Run
from podium.runs.shipping.card import CARD, checkpoint_step, model_card
from podium.runs.shipping.origin import (
    LOCAL_KEYS,
    OPENING,
    RECORD,
    TEMPLATE,
    base_named,
    edited,
    opening,
    template_kwargs,
)

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from podium.models.adapters import Origin
    from podium.models.merging import BaseProof, Expected, MergeProof
    from podium.records import GivenImages

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = 8
"""Prompts of the run, each with a completion, that the trained and the saved model are compared on."""
COMPLETIONS = 64
"""Completions of the run, at most, that its base is compared on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """An exported model."""

    folder: Path
    dtype: str
    proof: MergeProof
    merged: bool
    """False: there was no adapter."""


def export_model(source: ModelSource, out: Path, *, dtype: str | None = None) -> Export:
    """Write the model into `out`, which must not exist; see the top of this module.

    Args:
        source: from `find_model`.
        out: the folder to make.
        dtype: of the saved weights, one of `DTYPES`; None: the stored type of the base, or of a full fine-tune itself.

    Raises:
        ConfigError: `out` exists, or no such dtype.
        ModelError: the base is quantized; the adapter or its base are not those of the training, or it has no effect.
        ProofError: the saved model answers differently from the model and its adapter (P013). Nothing is left of it.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already.", fix="Give a folder that is not: --out DIR.", out=out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be made ({error.strerror}).",
            fix="Give another place: --out DIR.",
            out=out,
            strerror=error.strerror,
        ) from error
    return _write(source, out, dtype)


def merged_folder(source: ModelSource) -> Path:
    """The folder of the merged model inside an adapter's own; it is written first, unless `is_merged`.

    Raises as `export` does.
    """
    assert source.adapter is not None
    out = source.adapter / MERGED
    if not is_merged(source):
        logger.info("Merging the adapter into %s.", out)
        _write(source, out, None)
    return out


def is_merged(source: ModelSource) -> bool:
    """Whether an adapter's own folder holds the merged model, undamaged and made from the present weights."""
    assert source.adapter is not None
    out = source.adapter / MERGED
    try:
        made_from = json.loads((out / RECORD).read_text(encoding="utf-8"))["weights"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(made_from == _digest(source)) and damage(out) is None


def _write(source: ModelSource, out: Path, dtype: str | None) -> Export:
    import torch

    try:
        return _prove_and_save(source, out, _stored_type(source, dtype), as_in_base=dtype is None)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"The accelerator has not enough memory for {base_named(source.base).name} in float32.",
            fix="On the CPU it takes longer, but has more: set CUDA_VISIBLE_DEVICES= and type the same again.",
            base_named_name=base_named(source.base).name,
        ) from error


def _prove_and_save(source: ModelSource, out: Path, stored: torch.dtype, *, as_in_base: bool) -> Export:
    """`as_in_base`: whether each tensor gets the type that it has in the base's files."""
    import torch

    from podium.models.adapters import NO_EFFECT
    from podium.models.merging import TEXTS, expect, prove
    from podium.models.stored import as_stored

    run = run_of(source)
    trained, tokenizer, base, origin = _on_its_base(source, run)
    expected = expect(trained, tokenizer, (*_texts(run), *TEXTS), _pictured(source))
    if expected.effect == 0 and NO_EFFECT not in source.ignored:
        raise ModelError(
            f"The adapter {source.adapter} changes nothing on {len(expected.readings)} prompts: it is the base alone.",
            code=NO_EFFECT,
            fix=f"Train it, or name the base itself. To go on as it is: --ignore {NO_EFFECT}",
            adapter=source.adapter,
            readings_count=len(expected.readings),
            no_effect=NO_EFFECT,
        )
    model = _merged(trained, expected, base, origin)
    state = as_stored(model, dtype=stored) if as_in_base else None
    model.to(stored)
    del trained
    _set_end_tokens(model, tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(out) as staging:
        _save(model, tokenizer, staging, state)
        del model, state
        saved, _ = load_model(ModelSource(base=str(staging)), dtype=torch.float32)
        proof = prove(saved, expected, stored, base, origin)  # in float32: the rounding of weights alone
        name = str(stored).removeprefix("torch.")
        proved = {**asdict(proof), "passed": proof.passed}
        record = {"weights": _digest(source), "dtype": name, "proof": proved, OPENING: opening(source)}
        record |= {TEMPLATE: template_kwargs(source)}
        (staging / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        described = model_card(source, address=out.name, dtype=name, proof=str(proof), merged=True)
        (staging / CARD).write_text(described, encoding="utf-8")
    return Export(folder=out, dtype=name, proof=proof, merged=source.adapter is not None)


def _stored_type(source: ModelSource, asked: str | None) -> torch.dtype:
    """The type to save in. Raises `ModelError` for a quantized base."""
    import torch

    if asked is not None and asked not in DTYPES:
        raise ConfigError(
            f"--dtype is {asked!r}; it must be one of {listed(DTYPES)}.",
            settings=("dtype",),
            asked=asked,
            dtypes=DTYPES,
        )
    config = read_config(source.base)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"The base {base_named(source.base).name} is stored quantized: a merge into it would lose the adapter.",
            code="M009",
            fix="Give the model it was made from: --base OWNER/NAME.",
            base_named_name=base_named(source.base).name,
        )
    dtype = getattr(torch, asked) if asked else config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _merged(model: Any, expected: Expected, base: BaseProof | None, origin: Origin | None) -> PreTrainedModel:
    """The model with its adapter in its weights, proved before they are rounded."""
    import torch
    from peft import PeftModel

    from podium.models.merging import merge, prove

    if not isinstance(model, PeftModel):
        return model
    plain = merge(model)
    prove(plain, expected, torch.float32, base, origin)
    return plain


def _on_its_base(
    source: ModelSource, run: Run | None
) -> tuple[Any, PreTrainedTokenizerBase, BaseProof | None, Origin | None]:
    """The model in float32; for an adapter, with its origin and what completions of its run say of its base.

    The first completions were sampled from the base, before the adapter changed anything. Where training began with a
    trained adapter, only later ones can be compared, with the model a step after them.

    Raises:
        ModelError: the adapter does not fit the base, or they are not as training recorded them.
    """
    import torch

    base, _ = load_model(replace(source, adapter=None), dtype=torch.float32)
    if source.adapter is None or run is None:
        trained, origin = with_adapter(base, source)
        return trained, load_tokenizer(source), None, origin
    staged = Run(folder=run.folder.parent) if (run.folder.parent / STAGES).is_file() else run
    begun = staged.parts[0].run if staged.parts else run
    tokenizer = load_tokenizer(source)
    found = _base_proof(begun, base, tokenizer, 0)
    trained, origin = with_adapter(base, source)
    if found is None or not found.passed:
        found = _base_proof(run, trained, tokenizer, checkpoint_step(source.adapter)) or found
    if found is not None and not found.passed:
        logger.warning("%s may not be the base that was trained on: %s.", base_named(source.base).name, found)
    return trained, tokenizer, found, origin


def _base_proof(run: Run, model: Any, tokenizer: PreTrainedTokenizerBase, step: int | None) -> BaseProof | None:
    """Recorded completions that were sampled after `step` steps (None: the last ones), compared with `model`."""
    from podium.models.merging import Sampled, check_base

    config = run.config
    filtered = config.get("top_p", 1.0) < 1 or config.get("top_k") or config.get("min_p")
    if config.get("use_vllm") and filtered:  # recorded as probabilities of what the filter left
        return None
    rows = _rollouts(run, 0 if step == 0 else -1)
    if rows is None:
        return None
    if "branches" in rows:
        rows = rows[rows["branches"].isna()]  # whose completion does not follow on the prompt
    rows = rows[rows["policy_step"] <= (rows["policy_step"].max() if step is None else step)].dropna(subset="mean_logp")
    rows = rows[rows["policy_step"] == rows["policy_step"].max()]
    fields = [field.name for field in dataclasses.fields(Sampled)]
    sampled = [Sampled(**row) for row in rows[fields].to_dict("records")][:COMPLETIONS]
    recorded = {**config, **run.environment.get("model", {})}
    quantized = any(recorded.get(key) for key in ("quantized", "load_in_4bit", "load_in_8bit"))
    return check_base(model, tokenizer, sampled, temperature=config.get("temperature") or 1.0, quantized=quantized)


def _rollouts(run: Run, place: int) -> pd.DataFrame | None:
    """The completions of the first (0) or the last (-1) file; None: there is none, or a crash has cut it short."""
    files = recorded_files(run.folder / ROLLOUTS)
    return frame_of(files[place]) if files else None


def _texts(run: Run | None) -> list[str]:
    """Prompts of the run's last recorded round, each with the first of its completions."""
    rows = None if run is None else _rollouts(run, -1)
    if rows is None:
        return []
    rows = rows.drop_duplicates("prompt").head(PROMPTS)
    return [f"{prompt}{completion}" for prompt, completion in zip(rows["prompt"], rows["completion"], strict=True)]


def _pictured(source: ModelSource) -> list[tuple[list[int], GivenImages]]:
    """A question about an image of noise, where the model reads images and its processor can be had."""
    config = read_config(source.base)
    placeholder = getattr(config, "image_token_id", None)
    if placeholder is None or config.get_text_config() is config:
        return []
    import numpy as np
    from PIL import Image

    from podium.models.images import ImageProcessor
    from podium.models.loading import read_processor

    noise = np.random.default_rng(0).integers(0, 255, (224, 224, 3), dtype=np.uint8)
    blocks = [{"type": "image", "image": Image.fromarray(noise)}, {"type": "text", "text": "What is this?"}]
    try:
        processor = ImageProcessor(functools.cache(lambda: read_processor(source.processor)), placeholder)
        return [processor([{"role": "user", "content": blocks}], {"add_generation_prompt": True})]
    except ModelError as error:
        logger.warning("Merged without a look at images: %s", error.what)
        return []


def _set_end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the end tokens of training to the generation config, which may lack them in a base model."""
    from podium.models.loading import end_ids

    ends = sorted(end_ids(model, tokenizer))
    if ends and model.generation_config is not None:
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]


def _save(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, state: Any = None) -> None:
    """Save model, with the tensors of `state` where there is one, and tokenizer, without names of this machine."""
    from podium.models.stored import write_processor

    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    write_processor(model, folder)
    path = folder / "tokenizer_config.json"
    path.write_bytes(edited(path, **dict.fromkeys(LOCAL_KEYS)))


def _digest(source: ModelSource) -> str:
    """sha256 of the adapter's files, or of the model's."""
    folder = source.folder
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    digest = hashlib.sha256(source.base.encode())
    for path in (*files, *([source.adapter / ADAPTER] if source.adapter is not None else [])):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
