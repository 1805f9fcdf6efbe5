"""An agent that exists, trained as it is: a loop over the `openai` client that plays a game of higher and lower.

    python examples/agent_loop.py runs/agent-loop

`play` knows nothing of training: it is given an endpoint, a key and the row, talks to the model as to any other, and
returns what the game was worth. In a recipe it is `agent: agent_loop.py:play`.
"""

import sys

from openai import OpenAI

from podium import GRPOConfig, GRPOTrainer

GUESSES, LARGEST = 3, 7
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="of each session", max_retries=0)


def play(base_url, api_key, prompt, number):
    """One game: 1 for the number, of which every guess in the range has brought 0.05 before."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)  # one pool of connections for all games
    messages, earned = list(prompt), 0.0
    for _ in range(GUESSES):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=12).choices[0].message
        text = (answer.content or "").strip()
        if not (text.isdecimal() and 1 <= int(text) <= LARGEST):
            reply = f"Answer with a number from 1 to {LARGEST}."
        elif int(text) == int(number):
            return 1.0
        else:
            reply, earned = "higher" if int(text) < int(number) else "lower", earned + 0.05
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": reply}]
    return earned


def main(output_dir="runs/agent-loop", steps="60", model="builtin:smollm2-135m-instruct"):
    """Train on eight games of eight completions a step, with the settings of the recipe `guess`."""
    args = GRPOConfig(
        output_dir,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=64,
        temperature=1.0,
        learning_rate=2e-5,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        max_steps=int(steps),
        seed=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(model, args=args, train_dataset="builtin:guesses", agent=play)
    trainer.train()
    return [each["reward"] for each in trainer.state.log_history if "reward" in each]


if __name__ == "__main__":
    rewards = main(*sys.argv[1:])
    print(f"reward of the first three steps {sum(rewards[:3]) / 3:.2f}, of the last three {sum(rewards[-3:]) / 3:.2f}")
