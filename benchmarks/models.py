"""Every common architecture as a tiny random model: what is shared, proved, saved, and how fast it is beside TRL.

    python -m benchmarks.models                 # all of them, about half an hour on two quiet cores
    python -m benchmarks.models lfm2 gpt_oss    # some, into the same results
    python -m benchmarks.models --only speed    # the seconds alone
    python -m benchmarks.models --pages         # writes docs/scale.md and RESULTS.md from the results kept

Each model is measured in a process of its own. Weights are random and small, so nothing here says how well a model
learns; log-probabilities, gradients, tensors and states are the same computations as in a large one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.families import FAMILIES, WITH_IMAGES, tiny, tokenizer_of
from benchmarks.healthy import TARGETS

RESULTS = Path(__file__).parent / "results" / "models.json"
PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
SPEEDS = Path(__file__).parent / "RESULTS.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- /architectures -->"
LIMIT = 400
"""Seconds for one model."""
PROMPTS, COMPLETIONS, PROMPT_TOKENS, TOKENS = 4, 16, 256, 64
"""Of a step that is timed."""
REPEATS, STEPS = 2, 3

NAMES: Mapping[str, str] = {
    "llama": "Llama 3",
    "llama4_text": "Llama 4, text checkpoint",
    "llama4": "Llama 4",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral 3",
    "mistral3": "Mistral 3",
    "qwen2": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, text checkpoint",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, text checkpoint",
    "gemma3": "Gemma 3",
    "gemma3n_text": "Gemma 3n, text checkpoint",
    "gemma4": "Gemma 4",
    "phi3": "Phi-3, Phi-4",
    "gpt_oss": "gpt-oss",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4-MoE",
    "deepseek_v3": "DeepSeek-V3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmo_hybrid": "OLMo hybrid",
    "smollm3": "SmolLM3",
    "smolvlm": "SmolVLM2",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "granitemoehybrid": "Granite 4 hybrid",
    "nemotron_h": "Nemotron-H",
    "falcon_h1": "Falcon-H1",
    "kimi_linear": "Kimi-Linear",
    "minimax_m2": "MiniMax-M2",
    "exaone4": "EXAONE 4",
    "hunyuan_v1_dense": "Hunyuan dense",
    "ernie4_5": "ERNIE 4.5",
    "apertus": "Apertus",
    "bamba": "Bamba",
    "zamba2": "Zamba2",
    "mamba2": "Mamba-2",
    "mamba": "Mamba",
    "jamba": "Jamba",
    "recurrent_gemma": "RecurrentGemma",
    "bloom": "BLOOM",
}


def odd(completions: list[Any], **_: Any) -> list[float]:
    """Differs between most texts."""
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


ROWS = [{"prompt": f"What is {i} + 1?"} for i in range(4)]


def trainer(base: Path, out: Path, *, lora: Any = None, **settings: Any) -> Any:
    """A short run of two steps."""
    from podium import GRPOConfig, GRPOTrainer

    settings |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 2}
    settings |= {"learning_rate": 1e-2 if lora else 1e-3, "report_to": "none", "disable_tqdm": True, "save_steps": 1}
    return GRPOTrainer(str(base), odd, GRPOConfig(str(out), use_cpu=True, **settings), ROWS, peft_config=lora)


# ---- what is measured, each by a function of the family's name and its checkpoint ----


def exactness(name: str, _base: Path, _folder: Path) -> dict[str, Any]:
    """Packs of a tree of depth three against padded rows, in float32: nats, and gradients by their size."""
    import numpy as np
    import torch

    from podium.models.attention import attention_implementation, tree_attention
    from podium.models.forward import choose_method, token_logps
    from podium.models.packing import pack, unscored
    from podium.records import Sample

    model = tiny(name)
    method = choose_method(model)
    if method.path != "shared":
        return {"path": method.path, "why": method.not_shared}
    rng = np.random.default_rng(1)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(map(int, rng.integers(4, 200, n)))

    def samples(prompt: tuple[int, ...], stem: tuple[int, ...], lengths: Sequence[int]) -> list[Sample]:
        return [unscored(prompt, stem + ids(n)) for n in lengths]

    trunk = ids(50)
    given = [*samples(trunk + ids(70), ids(40), (3, 80, 130)), *samples(trunk + ids(5), (), (1, 64, 7))]

    def run(path: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        [packed] = pack(given, tokens_per_pack=4096)
        with tree_attention(model) if path == "shared" else attention_implementation(model, "eager"):
            out = token_logps(model, packed, temperature=1.0, head=method.head, path=path)
            (out.logps_N * torch.linspace(0.5, 1.5, len(out.logps_N))).sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return out.logps_N.detach(), grads

    (mine, my_grads), (plain, grads) = run("shared"), run("padded")
    whole = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
    off = max(float((my_grads[n] - g).norm()) / max(float(g.norm()), 1e-3 * whole) for n, g in grads.items())
    return {"path": method.path, "nats": float((mine - plain).abs().max()), "gradients": off}


def full(_name: str, base: Path, folder: Path) -> dict[str, Any]:
    """Two proved steps of all weights; saved, read back by the two classes; the second step from a checkpoint."""
    import torch

    run = trainer(base, folder / "run", prove_first_batch=True)
    run.train()
    run.save_model()
    trained = run.model.state_dict()
    found = {
        "engine": run.run.step.engine.name,
        "proved": _proved(folder / "run"),
        "read back": _read_back(folder / "run", base, trained),
    }
    again = trainer(base, folder / "run")  # sets aside what the first one saved
    again.train(resume_from_checkpoint=str(folder / "run/checkpoint-1"))
    state = again.model.state_dict()
    return found | {"resumed": all(torch.equal(x, state[n]) for n, x in trained.items())}


def adapter(name: str, base: Path, folder: Path) -> dict[str, Any]:
    """Two proved steps of LoRA on all linear layers; merged and read back by the two classes."""
    from peft import LoraConfig

    from podium.runs.find_model import find_model
    from podium.runs.shipping.merge import export_model

    targets = TARGETS.get(name, "all-linear")
    lora = LoraConfig(r=2, target_modules=targets, init_lora_weights="gaussian")
    run = trainer(base, folder / "lora", lora=lora, prove_first_batch=True)
    run.train()
    run.save_model()
    export_model(find_model(str(folder / "lora")), folder / "merged", dtype="float32")
    found = {"proved": _proved(folder / "lora"), "merged": _read_back(folder / "merged", base, None)}
    return found | ({} if targets == "all-linear" else {"layers": list(targets)})


def _proved(run: Path) -> bool:
    checks = json.loads((run / "proof.json").read_text())["checks"]
    return bool(checks) and all(check["passed"] is not False for check in checks)


def _read_back(folder: Path, base: Path, trained: Mapping[str, Any] | None) -> str:
    """Empty, or what is wrong: tensors missing, too many, or other ones than were trained or stood in the file."""
    import torch
    import transformers
    from safetensors.torch import load_file

    before = load_file(base / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    if set(before) != set(after):
        return f"{len(set(before) ^ set(after))} tensors are in one file only"
    changed = [n for n in before if not torch.equal(before[n].float(), after[n].float())]
    outside = ("vision", "visual", "projector", "connector", "merger")
    if moved := [n for n in changed if any(part in n for part in outside)]:
        return f"{moved[0]} has changed"
    if not changed:
        return "nothing has changed"
    [own] = json.loads((folder / "config.json").read_text())["architectures"]
    for reader in (transformers.AutoModelForCausalLM, getattr(transformers, own)):
        if reader is transformers.AutoModelForCausalLM and not _is_registered(folder):
            continue  # transformers itself reads such a checkpoint by its own class only
        model, info = reader.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if type(model).__name__ == own and (info["missing_keys"] or info["unexpected_keys"]):
            return f"{reader.__name__}: {info}"
        if type(model).__name__ == own and trained is not None:
            state = model.state_dict()
            if wrong := [n for n, x in trained.items() if not torch.equal(x.float(), state[n].float())]:
                return f"{reader.__name__}: {wrong[0]} is not what was trained"
    return ""


def _is_registered(folder: Path) -> bool:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_CAUSAL_LM_MAPPING


def speed(name: str, _base: Path, folder: Path) -> dict[str, Any]:
    """Seconds of a step here and in TRL, alternating: medians of `REPEATS` runs of which the first step is left out."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    import podium

    rows = [{"prompt": f"{i} " * (PROMPT_TOKENS // 2)} for i in range(PROMPTS)]

    def seconds(library: Any) -> float:
        times = [0.0]

        class Clock(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                times.append(time.perf_counter())

        args = library.GRPOConfig(
            str(folder / "timed"),
            per_device_train_batch_size=PROMPTS * COMPLETIONS,
            num_generations=COMPLETIONS,
            max_completion_length=TOKENS,
            max_steps=STEPS,
            learning_rate=1e-3,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            **({"prove_first_batch": False} if library is podium else {}),
        )
        made = {"processing_class": tokenizer_of(name), "callbacks": [Clock()]}
        try:
            run = library.GRPOTrainer(tiny(name), odd, args=args, train_dataset=Dataset.from_list(rows), **made)
            run.train()
        except Exception as error:
            raise RuntimeError(f"in {library.__name__}: {type(error).__name__}: {error}") from error
        return (times[-1] - times[1]) / (STEPS - 1)

    pairs = [(seconds(podium), seconds(trl)) for _ in range(REPEATS)]
    return {"podium": statistics.median(x for x, _ in pairs), "trl": statistics.median(x for _, x in pairs)}


MEASURES: Mapping[str, Callable[[str, Path, Path], dict[str, Any]]] = {
    "exactness": exactness,
    "full": full,
    "lora": adapter,
    "speed": speed,
}


def measure(name: str, keys: Sequence[str]) -> dict[str, Any]:
    """Some measures of one family; what raises is kept as a text."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "base"
        FAMILIES[name](base)
        for key in keys:
            try:
                found[key] = MEASURES[key](name, base, Path(place))
            except Exception as error:  # noqa: BLE001  kept as a text
                found[key] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return found


def in_a_process(name: str, keys: Sequence[str]) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.models", "--one", name, "--only", *keys]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {LIMIT} s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return {"error": done.stderr[-300:]}


# ---- the pages ----


def listed(results: Mapping[str, Any]) -> str:
    """The architectures in Markdown, by how they sample and train (`tests/system/test_models_table.py`: all else)."""
    groups: dict[str, list[str]] = {}
    for name in NAMES:
        if name in results:
            groups.setdefault(_ways(results[name]), []).append(_title(name))
    items = [f"- **{ways}**: {'; '.join(titles)}" for ways, titles in groups.items()]
    return "\n".join(
        textwrap.fill(item, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        for item in items
    )


def speeds(results: Mapping[str, Any]) -> str:
    """How many times faster than TRL's a step is, as a Markdown table of the architectures that were timed."""
    lines = ["| architecture | times TRL's speed |", "|---|---|"]
    for name in NAMES:
        times = results.get(name, {}).get("speed", {})
        if "podium" in times:
            lines.append(f"| {_title(name)} | {times['trl'] / times['podium']:.1f} |")
    return "\n".join(lines)


def _title(name: str) -> str:
    """The architecture, its type, and whether it has an image encoder."""
    images = ", images" if name in WITH_IMAGES else ""
    return f"{NAMES[name]} (`{name}`{images})"


def _ways(found: Mapping[str, Any]) -> str:
    """How an architecture trains and samples, and the layers on which alone an adapter was tried."""
    shares = found.get("exactness", {}).get("path") == "shared"
    live = found.get("full", {}).get("engine") == "live"
    ways = ["shared prefixes" if shares else "padded rows", "live engine" if live else "`generate` samples"]
    layers = found.get("lora", {}).get("layers", ())
    if layers:
        ways.append(f"LoRA on {', '.join(layers)}")
    return ", ".join(ways)


def write_pages(results: Mapping[str, Any]) -> None:
    """Put the list and the speeds into their pages."""
    for page, text in ((PAGE, listed(results)), (SPEEDS, speeds(results))):
        start, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{start}{BEGIN}\n{text}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.only)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [] if args.pages else args.names or NAMES:
        results[name] = results.get(name, {}) | in_a_process(name, args.only)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{_title(name)}: {_ways(results[name])}", flush=True)
    write_pages(results)


if __name__ == "__main__":
    main()
