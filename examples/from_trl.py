"""A GRPO script as TRL users write them: word problems, answers in XML, five reward functions, LoRA.

It was written for TRL; what changed is the line that imports `GRPOConfig` and `GRPOTrainer`. So that it runs without a
network, the model is the built-in one and the word problems are made on the spot, in the shape of GSM8K: a `question`,
and a solution that ends in `#### answer`.

    python examples/from_trl.py
    MODEL=Qwen/Qwen2.5-0.5B-Instruct MAX_STEPS=200 python examples/from_trl.py
"""

import os
import random
import re

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from podium import GRPOConfig, GRPOTrainer  # was: from trl import GRPOConfig, GRPOTrainer
from podium.models.builtin import resolve_model

MODEL = os.environ.get("MODEL") or resolve_model("builtin:smollm2-135m-instruct")
MAX_STEPS = int(os.environ.get("MAX_STEPS", "20"))
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "outputs/SmolLM2-135M-GRPO")

SYSTEM_PROMPT = """Answer in this form:
<reasoning>
...
</reasoning>
<answer>
...
</answer>
"""


XML_FORM = "<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>\n"


# ---- data ----


def word_problems(count, seed=0):
    """Rows like those of GSM8K, one addition or subtraction each."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        name, thing = rng.choice(["Ana", "Ben", "Mia", "Tom"]), rng.choice(["apples", "books", "coins", "pens"])
        has, more = rng.randint(10, 40), rng.randint(1, 10)
        verb, sign = rng.choice([("finds", 1), ("loses", -1)])
        total = has + sign * more
        rows.append(
            {
                "question": f"{name} has {has} {thing} and {verb} {more}. How many {thing} does {name} have now?",
                "solution": f"{name} has {has} {'+' if sign > 0 else '-'} {more} = {total} {thing}.\n#### {total}",
            }
        )
    return Dataset.from_list(rows)


def extract_hash_answer(text):
    return text.split("####")[1].strip() if "####" in text else None


def extract_xml_answer(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def to_prompt(row):
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": "Sam has 5 cups and finds 2. How many cups does Sam have now?"},
            {"role": "assistant", "content": XML_FORM.format(reasoning="Sam has 5 + 2 = 7 cups.", answer="7")},
            {"role": "user", "content": row["question"]},
        ],
        "answer": extract_hash_answer(row["solution"]),
    }


# ---- rewards ----


def correctness_reward_func(prompts, completions, answer, **kwargs):
    """2 for the right answer."""
    responses = [completion[0]["content"] for completion in completions]
    extracted = [extract_xml_answer(response) for response in responses]
    print("-" * 20, f"\nQuestion: {prompts[0][-1]['content']}\nAnswer: {answer[0]}\nResponse: {responses[0]}")
    return [2.0 if given == right else 0.0 for given, right in zip(extracted, answer, strict=True)]


def int_reward_func(completions, **kwargs):
    """0.5 for any whole number as the answer."""
    extracted = [extract_xml_answer(completion[0]["content"]) for completion in completions]
    return [0.5 if given.isdigit() else 0.0 for given in extracted]


def strict_format_reward_func(completions, **kwargs):
    """0.5 for both sections, each tag on a line of its own, and nothing else."""
    pattern = re.compile(r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?", re.DOTALL)
    return [0.5 if pattern.fullmatch(completion[0]["content"]) else 0.0 for completion in completions]


def soft_format_reward_func(completions, **kwargs):
    """0.5 for both sections in their order, wherever the lines break."""
    pattern = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)
    return [0.5 if pattern.search(completion[0]["content"]) else 0.0 for completion in completions]


def count_xml(text):
    """0.125 for each tag that is there exactly once, less a little for every letter after the last one."""
    score = sum(0.125 for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>") if text.count(tag) == 1)
    if text.count("</answer>") == 1:
        score -= 0.001 * len(text.split("</answer>")[-1].strip())
    return score


def xmlcount_reward_func(completions, **kwargs):
    """The same form in small steps, so that there is something to climb from the start."""
    return [count_xml(completion[0]["content"]) for completion in completions]


# ---- training ----


def main():
    training_args = GRPOConfig(
        output_dir=OUTPUT_DIR,
        run_name="SmolLM2-135M-GRPO-word-problems",
        learning_rate=5e-5,
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.1,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        logging_steps=1,
        bf16=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_prompt_length=512,
        max_completion_length=96,
        max_steps=MAX_STEPS,
        save_steps=100,
        max_grad_norm=0.1,
        report_to="none",
        log_on_each_node=False,
    )
    peft_config = LoraConfig(
        r=16,
        lora_alpha=64,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"],
        task_type="CAUSAL_LM",
        lora_dropout=0.05,
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    trainer = GRPOTrainer(
        model=MODEL,
        processing_class=tokenizer,
        reward_funcs=[
            xmlcount_reward_func,
            soft_format_reward_func,
            strict_format_reward_func,
            int_reward_func,
            correctness_reward_func,
        ],
        args=training_args,
        train_dataset=word_problems(200).map(to_prompt),
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main()
