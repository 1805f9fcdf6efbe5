"""A table of one's own, from plain columns to a trained model: the trainer and a reward function of a few lines.

    python examples/own_table.py mine.csv "Write the date as year-month-day." runs/mine

The first column is the question, the second its answer. `podium init mine.csv` writes the same run as a recipe, with
rewards that fit the answers; here everything is spelled out, as in a script for TRL.
"""

import sys
from difflib import SequenceMatcher

import pandas as pd
from datasets import Dataset

from podium import GRPOConfig, GRPOTrainer

EXAMPLES, HELD_OUT = 4, 48
FORM = "Write the answer alone, without an explanation."


def exact_match(completions, answer, **kwargs):
    """1 where the completion is the answer."""
    return [float(given.strip() == right) for given, right in zip(texts(completions), answer, strict=True)]


def similarity(completions, answer, **kwargs):
    """How much of the answer is there: what is nearly right is worth more than what is all wrong."""
    pairs = zip(texts(completions), answer, strict=True)
    return [SequenceMatcher(None, given.strip(), right, autojunk=False).ratio() for given, right in pairs]


def texts(completions):
    return [completion[0]["content"] for completion in completions]


def main(path, sentence, output_dir="runs/own-table", seed="1"):
    """Train on the first two columns of a CSV, and evaluate before and after on rows that are never trained on."""
    table = pd.read_csv(path, dtype=str).sample(frac=1, random_state=0)
    question, answer = table.columns[:2]
    shown = table.drop_duplicates(answer).head(EXAMPLES)  # as many different answers as there are
    worked = [
        turn
        for _, row in shown.iterrows()
        for turn in ({"role": "user", "content": row[question]}, {"role": "assistant", "content": row[answer]})
    ]
    rows = Dataset.from_list(
        [
            {
                "prompt": [
                    {"role": "system", "content": f"{sentence} {FORM}"},
                    *worked,
                    {"role": "user", "content": row[question]},
                ],
                "question": row[question],
                "answer": row[answer],
            }
            for _, row in table.drop(shown.index).iterrows()
        ]
    )
    tokens = min(8 + max(table[answer].str.len()) // 2, 64)  # room for the longest answer
    args = GRPOConfig(
        output_dir,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=tokens,
        temperature=1.0,
        learning_rate=1e-5,
        reward_weights=[2.0, 1.0],
        max_steps=min(40, 600 // tokens),
        adam_beta2=0.99,  # the default 0.999 averages over more steps than there are
        logging_steps=1,
        accuracy="exact_match",
        eval_rows=HELD_OUT,
        eval_samples=4,
        save_strategy="no",
        report_to="none",
        seed=int(seed),
    )
    trainer = GRPOTrainer(
        "builtin:smollm2-135m-instruct",
        reward_funcs=[exact_match, similarity],
        args=args,
        train_dataset=rows.select(range(HELD_OUT, len(rows))),
        eval_dataset=rows.select(range(HELD_OUT)),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
