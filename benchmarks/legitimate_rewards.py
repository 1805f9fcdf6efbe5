"""Sixty odd but legitimate reward functions, each with rows that suit it: nothing about them is a mistake.

    reward, rows = REWARDS["brevity"].make(), REWARDS["brevity"].rows()

They are of length, form, style, properties and part scores; negative, tiny and huge; `async`, classes, partials and
lambdas; of the kinds that the README and published GRPO scripts have, written here anew. `benchmarks.rewards_verdicts`
shows that the test of rewards calls none of them wrong.
"""

# ruff: noqa: D103  the names of these functions say what they score

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LegitimateReward:
    """A reward function, made anew by each `make`, and the rows to use it with."""

    make: Callable[[], Callable[..., Any]]
    rows: Callable[[], list[Row]]
    """At least eight, with `prompt` and the columns that the function reads."""


# ---- rows ----


def sums() -> list[Row]:
    """Plain prompts with a number as the answer."""
    return [{"prompt": f"{n} + {n % 7 + 2} = ", "answer": str(n + n % 7 + 2)} for n in range(11, 51, 4)]


def chats() -> list[Row]:
    """Conversations with a number as the answer."""
    return [
        {"prompt": [{"role": "user", "content": f"What is {row['prompt'][:-3]}?"}], "answer": row["answer"]}
        for row in sums()
    ]


def word_problems() -> list[Row]:
    """Plain prompts, a worked solution that ends in `#### number`."""
    return [
        {
            "prompt": f"Ann has {n} pens and buys {n + 3}. How many has she?",
            "answer": f"{n} + {n + 3}\n#### {2 * n + 3}",
        }
        for n in range(12, 22)
    ]


def yes_no() -> list[Row]:
    return [{"prompt": f"Is {n} even?", "answer": "no" if n % 2 else "yes"} for n in range(20, 30)]


def yes_no_chats() -> list[Row]:
    return [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in yes_no()]


_CITIES = {
    "France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Peru": "Lima",
    "Egypt": "Cairo", "Japan": "Tokyo", "Kenya": "Nairobi", "Cuba": "Havana",
}  # fmt: skip


def cities() -> list[Row]:
    return [{"prompt": f"The capital of {land}:", "answer": city} for land, city in _CITIES.items()]


def crosses() -> list[Row]:
    """Every answer is `x`."""
    return [{"prompt": f"Write something about {n} + {n}.", "answer": "x"} for n in range(10, 20)]


def choices() -> list[Row]:
    return [{"prompt": f"Question {n}: A, B, C or D?", "answer": "ABCD"[n % 4]} for n in range(8)]


_TOPICS = ("a dog", "the sea", "winter", "bread", "a train", "music", "the moon", "a garden")


def topics() -> list[Row]:
    """No answers at all."""
    return [{"prompt": f"Write a sentence about {topic}."} for topic in _TOPICS]


def topic_chats() -> list[Row]:
    return [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in topics()]


def parameters() -> list[Row]:
    """Settings of the task, which stand in the prompt: how many words, which letter, which language."""
    return [
        {
            "prompt": f"Write {count} words about {topic}, with the letter {letter}, in {language}.",
            "n_words": count,
            "letter": letter,
            "language": language,
        }
        for topic, count, letter, language in zip(
            _TOPICS, (3, 5, 7, 4, 9, 6, 8, 10), "aesontir", ("English", "German") * 4, strict=True
        )
    ]


def keyword_rows() -> list[Row]:
    return [
        {"prompt": f"What does {what} need?", "keywords": words, "reference": f"{what} needs {' and '.join(words)}"}
        for what, words in {
            "a plant": ["light", "water"], "a fire": ["fuel", "oxygen"], "a letter": ["address", "stamp"],
            "bread": ["flour", "yeast"], "a car": ["fuel", "driver"], "a choir": ["voices", "notes"],
            "a game": ["rules", "players"], "a house": ["walls", "roof"],
        }.items()
    ]  # fmt: skip


def people() -> list[Row]:
    """Objects to be written as JSON."""
    names = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo")
    return [
        {"prompt": f"As JSON: {name}, {20 + 3 * k}.", "answer": json.dumps({"name": name, "age": 20 + 3 * k})}
        for k, name in enumerate(names)
    ]


def lists() -> list[Row]:
    """Numbers to be put in order."""
    numbers = [[(7 * k + 3 * j * j + 5) % 23 for j in range(4)] for k in range(8)]
    return [
        {"prompt": f"Sort: {' '.join(map(str, each))}", "answer": " ".join(map(str, sorted(each)))} for each in numbers
    ]


def rhymes() -> list[Row]:
    words = ("cat", "moon", "light", "sing", "day", "cold", "tree", "ball")
    return [{"prompt": f"A word that rhymes with {word}:", "word": word} for word in words]


# ---- parts of the functions ----


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def each(value: Callable[..., Any], *columns: str) -> Callable[[], Callable[..., Any]]:
    """Makes a function of `completions` and these columns that scores every text with `value(text, *column values)`."""

    def make() -> Callable[..., Any]:
        names = ", ".join(("completions", *columns))
        scope: dict[str, Any] = {"value": value, "text_of": text_of}
        zipped = ", ".join(("map(text_of, completions)", *columns))
        exec(f"def score({names}, **kwargs):\n    return [value(*row) for row in zip({zipped})]", scope)
        function = scope["score"]
        function.__name__ = value.__name__
        return function

    return make


def numbers_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


def words_in(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def tagged(text: str, tag: str = "answer") -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[-1].strip() if found else ""


def gold_number(answer: str) -> str:
    return answer.split("####")[-1].strip()


# ---- length ----


def brevity(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """The README's."""
    return [-len(text_of(each)) / 100 for each in completions]


def reward_len(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    return [-abs(20 - len(text_of(each))) for each in completions]


def longer_is_better(text: str) -> float:
    return min(len(text) / 400, 1.0)


def token_length(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
    return [-len(ids) / 10 for ids in completion_ids]


def overlong(text: str) -> float:
    """Soft: 0 up to 40 characters, -1 from 60 on."""
    return -min(max(len(text) - 40, 0) / 20, 1.0)


def cosine_length(text: str, answer: str) -> float:
    """Right answers are worth more the shorter they are, wrong ones lose less the longer they are."""
    progress = math.cos(min(len(text), 200) / 200 * math.pi)
    is_right = text.strip().endswith(answer)
    return 0.75 + 0.25 * progress if is_right else -0.75 - 0.25 * progress


def length_modulo(text: str, answer: str) -> float:
    """An odd sum of a property of the text and the answer."""
    return len(text) % 7 + float(answer in text.split())


def exact_count(text: str, n_words: int) -> float:
    return float(len(text.split()) == n_words)


def near_count(text: str, n_words: int) -> float:
    return -abs(len(text.split()) - n_words) / n_words


def one_sentence(text: str) -> float:
    return float(len(re.findall(r"[.!?](?:\s|$)", text)) == 1)


# ---- form ----


def think_and_answer(text: str) -> float:
    return float(re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", text.strip(), re.DOTALL) is not None)


def tag_count(text: str) -> float:
    return sum(0.25 * (text.count(tag) == 1) for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"))


def soft_xml(text: str) -> float:
    return 0.5 * bool(re.search(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", text, re.DOTALL))


def strict_xml(text: str) -> float:
    return 0.5 * bool(re.match(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$", text, re.DOTALL))


def xml_count(text: str) -> float:
    """Part scores for tags, less for what stands behind the last."""
    tags = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    tail = len(text.split("</answer>")[-1]) if "</answer>" in text else 0
    return sum(0.125 for tag in tags if text.count(tag) == 1) - 0.001 * tail


def is_whole_number(text: str) -> float:
    return 0.5 * tagged(text).isdigit()


def code_block(text: str) -> float:
    return float(re.search(r"```python\n.+?\n```", text, re.DOTALL) is not None)


def valid_json(text: str) -> float:
    try:
        json.loads(text)
    except ValueError:
        return 0.0
    return 1.0


def json_keys(text: str) -> float:
    """A part for JSON, a part for each of two keys of the right type."""
    try:
        value = json.loads(text)
    except ValueError:
        return -1.0
    if not isinstance(value, dict):
        return -0.5
    return 0.5 * isinstance(value.get("name"), str) + 0.5 * isinstance(value.get("age"), int)


def bullet_points(text: str) -> float:
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(line.lstrip().startswith(("-", "*")) for line in lines) / max(len(lines), 1)


# ---- style and properties ----


def no_emoji(text: str) -> float:
    return -float(sum(ord(letter) > 0x1F000 for letter in text))


def no_digits(text: str) -> float:
    return float(not any(letter.isdigit() for letter in text))


def letter_count(text: str) -> float:
    return text.count("e") / 10


def asked_letter(text: str, letter: str) -> float:
    return min(text.lower().count(letter), 5) / 5


def in_lower_case(text: str) -> float:
    letters = [letter for letter in text if letter.isalpha()]
    return sum(map(str.islower, letters)) / max(len(letters), 1)


def distinct_words(text: str) -> float:
    found = words_in(text)
    return len(set(found)) / max(len(found), 1)


def repetition_penalty(text: str) -> float:
    """Repeated pairs of words, negative or 0."""
    found = words_in(text)
    pairs = list(itertools.pairwise(found))
    return -(1 - len(set(pairs)) / len(pairs)) if pairs else 0.0


_GOOD = {"good", "great", "happy", "love", "fine", "bright", "warm"}
_BAD = {"bad", "sad", "poor", "hate", "cold", "dark"}


def sentiment(text: str) -> float:
    found = words_in(text)
    return sum((word in _GOOD) - (word in _BAD) for word in found) / math.sqrt(len(found) + 1)


def readability(text: str) -> float:
    found = words_in(text)
    vowels = sum(len(re.findall(r"[aeiouy]+", word)) for word in found)
    return (206.8 - 1.0 * len(found) - 84.6 * vowels / len(found)) / 100 if found else 0.0


def rhyme(text: str, word: str) -> float:
    found = words_in(text)
    return float(bool(found) and found[-1] != word and found[-1][-2:] == word[-2:])


_GERMAN = {"der", "die", "das", "und", "ist", "nicht", "ein", "ich"}
_ENGLISH = {"the", "and", "is", "not", "a", "i", "of", "to"}


def in_language(text: str, language: str) -> float:
    wanted, other = (_ENGLISH, _GERMAN) if language == "English" else (_GERMAN, _ENGLISH)
    found = words_in(text)
    return sum((word in wanted) - (word in other) for word in found) / max(len(found), 1)


def ascii_share(text: str) -> float:
    return sum(letter.isascii() for letter in text) / max(len(text), 1)


def starts_with_capital(text: str) -> float:
    return float(text[:1].isupper())


def forbidden_words(text: str) -> float:
    return -2.0 * sum(word in text.lower() for word in ("sorry", "cannot", "as an ai"))


def vowel_balance(text: str) -> float:
    letters = [letter for letter in text.lower() if letter.isalpha()]
    share = sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)
    return math.exp(-10 * (share - 0.4) ** 2)


# ---- the right answer, whole or in parts ----


def correct(text: str, answer: str) -> float:
    return float(text.strip().casefold() == answer.casefold())


def correct_in_tags(text: str, answer: str) -> float:
    return 2.0 * (tagged(text) == answer)


def boxed_match(text: str, answer: str) -> float:
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return float(bool(found) and found[-1].strip() == answer)


def after_hashes(text: str, answer: str) -> float:
    found = re.findall(r"####\s*(-?[\d.,]+)", text)
    return float(bool(found) and found[-1].rstrip(".").replace(",", "") == gold_number(answer))


def last_number(text: str, answer: str) -> float:
    found = numbers_in(text)
    return float(bool(found) and found[-1] == float(answer))


def closeness(text: str, answer: str) -> float:
    """1 for the number, less the farther away."""
    found = numbers_in(text)
    return math.exp(-abs(found[-1] - float(answer)) / 5) if found else 0.0


def distance(text: str, answer: str) -> float:
    """Minus the distance, and a number for texts without one."""
    found = numbers_in(text)
    return -min(abs(found[-1] - float(answer)), 100.0) if found else -100.0


def first_letter(text: str, answer: str) -> float:
    return float(text.strip()[:1].upper() == answer and not text.strip()[1:2].isalpha())


def yes_or_no(text: str, answer: str) -> float:
    """Right 1, wrong -1, neither 0."""
    found = words_in(text)[-1:]
    return 0.0 if found not in (["yes"], ["no"]) else 1.0 if found == [answer] else -1.0


def word_overlap(text: str, reference: str) -> float:
    """F1 of words."""
    given, wanted = collections.Counter(words_in(text)), collections.Counter(words_in(reference))
    shared = sum((given & wanted).values())
    return 2 * shared / (sum(given.values()) + sum(wanted.values())) if shared else 0.0


def bigram_overlap(text: str, reference: str) -> float:
    """Precision of pairs of words with a penalty for short texts."""
    given, wanted = words_in(text), words_in(reference)
    pairs = collections.Counter(itertools.pairwise(given))
    shared = sum((pairs & collections.Counter(itertools.pairwise(wanted))).values())
    return shared / sum(pairs.values()) * math.exp(min(0.0, 1 - len(wanted) / len(given))) if shared else 0.0


def edit_distance(text: str, answer: str) -> float:
    """1 minus the share of characters to change."""
    text = text.strip()[:50]
    before = list(range(len(answer) + 1))
    for row, letter in enumerate(text, 1):
        line = [row]
        for column, wanted in enumerate(answer, 1):
            line.append(min(before[column] + 1, line[-1] + 1, before[column - 1] + (letter != wanted)))
        before = line
    return 1 - before[-1] / max(len(text), len(answer), 1)


def keyword_share(text: str, keywords: Sequence[str]) -> float:
    found = set(words_in(text)[:12])
    return sum(word in found for word in keywords) / len(keywords)


def ranking(text: str, answer: str) -> float:
    """The share of places with the right number."""
    given, wanted = text.split(), answer.split()
    return sum(one == other for one, other in zip(given, wanted, strict=False)) / max(len(given), len(wanted))


def same_object(text: str, answer: str) -> float:
    """The share of fields that are right."""
    try:
        given = json.loads(text)
    except ValueError:
        return 0.0
    wanted = json.loads(answer)
    return (
        sum(given.get(key) == value for key, value in wanted.items()) / len(wanted) if isinstance(given, dict) else 0.0
    )


def tiny(text: str, answer: str) -> float:
    return 1e-9 * (text.strip() == answer)


def huge(text: str, answer: str) -> float:
    return 1e6 * (text.strip() == answer)


def none_for_some(text: str, answer: str) -> float | None:
    """None where there is no number to judge."""
    return float(numbers_in(text)[-1] == float(answer)) if numbers_in(text) else None


def penalty_only(text: str, answer: str) -> float:
    return 0.0 if text.strip() == answer else -1.0


def with_format_bonus(text: str, answer: str) -> float:
    """A part for tags, the rest for the answer in them."""
    return 0.2 * ("<answer>" in text and "</answer>" in text) + 0.8 * (tagged(text) == answer)


# ---- other kinds of functions ----


class TargetLength:
    """A class with settings and `__call__`."""

    def __init__(self, words: int) -> None:
        self.words = words
        self.__name__ = "target_length"

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        return [1 / (1 + abs(len(text_of(each).split()) - self.words)) for each in completions]


class GroupNovelty:
    """1 for a text that is not one of its siblings' of the same prompt."""

    __name__ = "group_novelty"

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[float]:
        keys = [(repr(prompt), text_of(each)) for prompt, each in zip(prompts, completions, strict=True)]
        counts = collections.Counter(keys)
        return [1 / counts[key] for key in keys]


async def async_correct(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(text_of(each).strip() == gold) for each, gold in zip(completions, answer, strict=True)]


def of_patterns(completions: Sequence[Any], pattern: str, bonus: float, **kwargs: Any) -> list[float]:
    return [bonus * bool(re.search(pattern, text_of(each))) for each in completions]


def pattern_partial() -> Callable[..., Any]:
    return functools.partial(of_patterns, pattern=r"^[A-Z].*\.$", bonus=0.1)


def a_lambda() -> Callable[..., Any]:
    return lambda completions, **kwargs: [float(text_of(each).endswith(".")) for each in completions]


def copies_prompt_style(prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Words of the prompt are to be used in the text: a property of both, no answer."""
    pairs = [(set(words_in(text_of(p))), set(words_in(text_of(c)))) for p, c in zip(prompts, completions, strict=True)]
    return [len(asked & given) / max(len(asked), 1) for asked, given in pairs]


def logs_metrics(completions: Sequence[Any], answer: Sequence[str], log_metric: Any, **kwargs: Any) -> list[float]:
    """Logs a number of its own."""
    right = [float(text_of(each).strip() == gold) for each, gold in zip(completions, answer, strict=True)]
    log_metric("share_right", sum(right) / len(right))
    return right


def two_stage(completions: Sequence[Any], answer: Sequence[str], trainer_state: Any = None, **kwargs: Any) -> Any:
    """The form counts at first, the answer from step 10 on."""
    late = trainer_state is not None and trainer_state.global_step >= 10
    texts = [text_of(each) for each in completions]
    return [float(tagged(t) == gold) if late else 0.5 * bool(tagged(t)) + 0.5 * (tagged(t) == gold)
            for t, gold in zip(texts, answer, strict=True)]  # fmt: skip


def _of(make: Callable[[], Any], rows: Callable[[], list[Row]]) -> LegitimateReward:
    return LegitimateReward(make=make, rows=rows)


def _plain(function: Callable[..., Any], *row_sets: Callable[[], list[Row]]) -> Iterable[tuple[str, LegitimateReward]]:
    """An entry for each set of rows; the first has the function's own name."""
    for place, rows in enumerate(row_sets):
        name = function.__name__ + (f", {rows.__name__}" if place else "")
        yield name, _of(lambda: function, rows)


def _each(
    rows: Callable[[], list[Row]], value: Callable[..., Any], *columns: str
) -> tuple[tuple[str, LegitimateReward]]:
    return ((value.__name__, _of(each(value, *columns), rows)),)


REWARDS: Mapping[str, LegitimateReward] = dict(
    entry
    for entries in (
        _plain(brevity, chats, yes_no_chats, yes_no, cities, crosses, choices),
        _plain(reward_len, topics, cities),
        _each(topics, longer_is_better),
        _plain(token_length, topics),
        _each(sums, overlong),
        _each(sums, cosine_length, "answer"),
        _each(sums, length_modulo, "answer"),
        _each(parameters, exact_count, "n_words"),
        _each(parameters, near_count, "n_words"),
        _each(topics, one_sentence),
        _each(chats, think_and_answer),
        _each(chats, tag_count),
        _each(chats, soft_xml),
        _each(chats, strict_xml),
        _each(chats, xml_count),
        _each(word_problems, is_whole_number),
        _each(topics, code_block),
        _each(people, valid_json),
        _each(people, json_keys),
        _each(topics, bullet_points),
        _each(cities, no_emoji),
        _each(cities, no_digits),
        _each(topics, letter_count),
        _each(parameters, asked_letter, "letter"),
        _each(topic_chats, in_lower_case),
        _each(topic_chats, distinct_words),
        _each(topic_chats, repetition_penalty),
        _each(topics, sentiment),
        _each(topics, readability),
        _each(rhymes, rhyme, "word"),
        _each(parameters, in_language, "language"),
        _each(yes_no, ascii_share),
        _each(cities, starts_with_capital),
        _each(topic_chats, forbidden_words),
        _each(topics, vowel_balance),
        _each(cities, correct, "answer"),
        _each(chats, correct_in_tags, "answer"),
        _each(sums, boxed_match, "answer"),
        _each(word_problems, after_hashes, "answer"),
        _each(sums, last_number, "answer"),
        _each(sums, closeness, "answer"),
        _each(sums, distance, "answer"),
        _each(choices, first_letter, "answer"),
        _each(yes_no, yes_or_no, "answer"),
        _each(keyword_rows, word_overlap, "reference"),
        _each(keyword_rows, bigram_overlap, "reference"),
        _each(cities, edit_distance, "answer"),
        _each(keyword_rows, keyword_share, "keywords"),
        _each(lists, ranking, "answer"),
        _each(people, same_object, "answer"),
        _each(cities, tiny, "answer"),
        _each(cities, huge, "answer"),
        _each(sums, none_for_some, "answer"),
        _each(cities, penalty_only, "answer"),
        _each(chats, with_format_bonus, "answer"),
        (("target_length", _of(lambda: TargetLength(12), topics)),),
        (("group_novelty", _of(GroupNovelty, topics)),),
        _plain(async_correct, sums),
        (("pattern_partial", _of(pattern_partial, topics)),),
        (("a_lambda", _of(a_lambda, topics)),),
        _plain(copies_prompt_style, topics),
        _plain(logs_metrics, cities),
        _plain(two_stage, chats),
    )
    for entry in entries
)
"""By name; a function that is here with several sets of rows has theirs behind its name."""
