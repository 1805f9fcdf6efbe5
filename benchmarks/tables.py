"""Everyday tables, as people have them, and what `podium init -y` takes each of them for.

python -m benchmarks.tables                all of them, a line each: `make tables`
python -m benchmarks.tables --write DIR    the tables themselves, as CSV files

A proposal is right where the columns of question and answer, the kind of the answer and the meaning of capitals are
those that a reader of the table would name. Names that do not say which column is which are read from left to right,
and the flags for the other way are printed: a proposal that is wrong has to be turned by them. No model is loaded.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from podium.cli.start.own_data import doubts_about, proposed, rows_of
from podium.data.templates import parse
from podium.errors import ConfigError
from podium.planning.propose import Proposal, Wishes


@dataclass(frozen=True, slots=True, kw_only=True)
class Everyday:
    """A table, the sentence of its owner, and the reading that is meant."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    task: str = ""
    """The sentence; empty: the owner writes none."""
    asked: tuple[str, ...]
    told: tuple[str, ...]
    kind: str
    """The shape of the answer; `setting`: a number that no answer is compared with, so a reward function is needed."""
    case_counts: bool = True
    header: bool = True
    """Whether the file has the names of its columns; without, the loss of the first row must be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was proposed for a table."""

    table: Everyday
    asked: str
    told: str
    kind: str
    wrong: tuple[str, ...]
    """What differs from the reading that is meant; empty: right."""
    doubts: tuple[str, ...]
    """What the program says that it is not sure of, or an error in place of a proposal."""
    turned: bool = False
    """Whether the flags that it prints for the other way make the proposal right."""


def zipped(text: str) -> tuple[tuple[str, ...], ...]:
    """Rows from `a b, c d`: commas between rows, spaces between cells, `_` for a space in a cell."""
    return tuple(tuple(cell.replace("_", " ") for cell in row.split()) for row in text.split(","))


CAPITALS = zipped(
    "France Paris,Italy Rome,Spain Madrid,Norway Oslo,Japan Tokyo,Cuba Havana,Egypt Cairo,Peru Lima,Kenya Nairobi,"
    "Austria Vienna,Greece Athens,Ireland Dublin"
)
PAST = zipped("go went,see saw,eat ate,take took,run ran,sing sang,buy bought,walk walked,fly flew,give gave,know knew")
MEANINGS = zipped(
    "ASAP as_soon_as_possible,FAQ frequently_asked_questions,DIY do_it_yourself,GPS global_positioning_system,"
    "ATM automated_teller_machine,VIP very_important_person,PIN personal_identification_number,RAM random_access_memory"
)
TITLES = zipped(
    "Rain_again Heavy_rain_is_expected_in_the_north_until_Friday,New_bridge The_city_opened_its_third_bridge,"
    "Cup_final The_home_team_lost_the_final_by_one_goal,Late_trains A_broken_signal_delayed_all_trains,"
    "Old_map A_map_of_1790_was_found_in_a_library,Free_museums All_museums_are_free_on_Sundays,"
    "Cold_spring April_was_the_coldest_in_thirty_years,Bee_count Volunteers_counted_fewer_bees_than_last_year"
)
NUMBERS = zipped(
    "1 one,2 two,3 three,4 four,5 five,6 six,7 seven,8 eight,9 nine,10 ten,11 eleven,12 twelve,20 twenty,40 forty"
)
PLURALS = zipped("cat cats,mouse mice,child children,box boxes,leaf leaves,city cities,foot feet,man men,knife knives")
FRENCH = zipped(
    "house maison,dog chien,bread pain,water eau,red rouge,night nuit,book livre,apple pomme,cheese fromage"
)
SYMBOLS = zipped("gold Au,silver Ag,iron Fe,oxygen O,sodium Na,tin Sn,lead Pb,copper Cu,zinc Zn,helium He,carbon C")
GENDERS = zipped(
    "king queen,actor actress,uncle aunt,nephew niece,waiter waitress,hero heroine,lion lioness,prince princess"
)
OPPOSITES = zipped(
    "hot cold,tall short,early late,rich poor,soft hard,full empty,light dark,wet dry,near far,old young"
)
WORDS = tuple(row[0] for row in (*PLURALS, *FRENCH, *OPPOSITES))
UPPER = tuple((word, word.upper()) for word in WORDS)
BACKWARDS = tuple((word, word[::-1]) for word in WORDS)
DEGREES = tuple((str(c), str(c * 9 // 5 + 32)) for c in range(-20, 45, 5))
SPELLED = tuple((word, "-".join(word)) for word in WORDS)

PAIRS: tuple[tuple[str, str, Sequence[tuple[str, ...]], str, str, str, str], ...] = (
    (
        "country",
        "capital",
        CAPITALS,
        "Name the capital of the country.",
        "text",
        "Which country is it the capital of?",
        "text",
    ),
    ("verb", "past", PAST, "Give the past tense.", "text", "Write the verb that this is the past of.", "text"),
    ("acronym", "meaning", MEANINGS, "Write out the acronym.", "text", "Write the acronym for the meaning.", "text"),
    ("title", "summary", TITLES, "Write a summary for the title.", "text", "Find a title for the summary.", "text"),
    ("number", "words", NUMBERS, "Write the number in words.", "text", "Give the number for the words.", "number"),
    (
        "celsius",
        "fahrenheit",
        DEGREES,
        "Convert Celsius to Fahrenheit.",
        "number",
        "Convert from Fahrenheit to Celsius.",
        "number",
    ),
    (
        "noun",
        "plural",
        PLURALS,
        "Write the plural of the noun.",
        "text",
        "Give the noun in the singular for each plural.",
        "text",
    ),
    ("english", "french", FRENCH, "Translate into French.", "text", "Translate the French word into English.", "text"),
    (
        "word",
        "uppercase",
        UPPER,
        "Write the word in capital letters.",
        "text",
        "Give the word for the uppercase text.",
        "text",
    ),
    ("word", "reversed", BACKWARDS, "Write the word backwards.", "text", "Say which word was reversed.", "text"),
    (
        "element",
        "symbol",
        SYMBOLS,
        "Name the symbol of the element.",
        "text",
        "Name the element with this symbol.",
        "text",
    ),
    (
        "adjective",
        "opposite",
        OPPOSITES,
        "Say the opposite of the adjective.",
        "text",
        "Find the adjective from its opposite.",
        "text",
    ),
    ("masculine", "feminine", GENDERS, "Give the feminine form.", "text", "Give the masculine form.", "text"),
    ("word", "spelling", SPELLED, "Spell the word with hyphens.", "text", "Write the word for the spelling.", "text"),
)
"""Left and right column, rows, and a sentence with the kind of its answer for each direction."""


def both_directions() -> Iterator[Everyday]:
    """Each pair as it stands, every other time without a sentence; and asked from right to left."""
    for number, (left, right, rows, task, kind, back, back_kind) in enumerate(PAIRS):
        how = {"columns": (left, right), "rows": tuple(rows)}
        there = task if number % 2 else ""
        yield Everyday(name=f"{left}-{right}", task=there, asked=(left,), told=(right,), kind=kind, **how)
        yield Everyday(name=f"{right}-{left}", task=back, asked=(right,), told=(left,), kind=back_kind, **how)


REVIEWS = tuple(
    (f"The {thing} was {word}.", label)
    for thing in ("film", "soup", "room", "book")
    for word, label in (("great", "positive"), ("awful", "negative"), ("lovely", "positive"), ("dirty", "negative"))
)
TICKETS = tuple(
    (f"{text} ({number})", team)
    for number in range(8)
    for text, team in (
        ("I was charged twice", "billing"),
        ("I cannot log in", "access"),
        ("Nothing arrived", "shipping"),
    )
)
QUESTIONS = tuple((f"What is the capital of {country}?", capital) for country, capital in CAPITALS)
SUMS = tuple((f"What is {a} + {a * 3 % 11}?", str(a + a * 3 % 11)) for a in range(2, 30))
PEOPLE = tuple(
    (f"{name} is {20 + n} and lives in {city}.", name, str(20 + n), city)
    for n, (name, city) in enumerate(
        zipped("Ana Rome,Ben Oslo,Cleo Lima,Dan Cairo,Eva Paris,Finn Delhi,Gus Dublin,Hana Tokyo")
    )
)
LETTERS = tuple((word, letter, str(word.count(letter))) for word in WORDS[:14] for letter in "ae")
DATES = tuple(
    (f"{day}. {month} {1990 + day}", f"{1990 + day}-{number:02}-{day:02}")
    for day in range(1, 9)
    for number, month in ((3, "March"), (8, "August"))
)
INITIALS = tuple((f"{a} {b}", f"{a[0]}. {b[0]}.") for (a, _), (b, _) in pairwise(CAPITALS))
CHOICES = tuple((question, "Mars", answer, "Lagos", "ABC"[1]) for question, answer in QUESTIONS[:6]) + tuple(
    (question, answer, "Mars", "Lagos", "A") for question, answer in QUESTIONS[6:]
)
LISTS = tuple(
    (f"{n * 7 % 10} {n * 3 % 10 + 10} {n}", ", ".join(map(str, sorted((n * 7 % 10, n * 3 % 10 + 10, n)))))
    for n in range(20, 40)
)
PAIRS_NLI = tuple(
    (f"{n} men play {game}.", text, label)
    for n in range(2, 8)
    for game, text, label in (("chess", "People play.", "yes"), ("tennis", "Nobody plays.", "no"))
)


def turned(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    """Rows of two cells, right one first."""
    return tuple((right, left) for left, right in rows)


def beside(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    """Rows with a number in front, and a source and a date behind."""
    return tuple((n, *row, f"list {n % 3}", f"2024-0{n % 9 + 1}-11") for n, row in enumerate(rows, start=1))


def turns(question: str, answer: str = "") -> str:
    """Messages as JSON text, as they come out of a data frame."""
    made = [{"role": "user", "content": question}]
    return json.dumps([*made, *([{"role": "assistant", "content": answer}] if answer else [])])


def others() -> Iterator[Everyday]:
    """Named columns, labels, several columns, other languages, files without a header."""
    table = Everyday
    yield table(
        name="reviews",
        columns=("review", "sentiment"),
        rows=REVIEWS,
        task="Classify the sentiment of the review.",
        asked=("review",),
        told=("sentiment",),
        kind="label",
    )
    yield table(
        name="label-first",
        columns=("mood", "review"),
        rows=turned(REVIEWS),
        asked=("review",),
        told=("mood",),
        kind="label",
    )
    yield table(
        name="tickets",
        columns=("id", "ticket", "team", "source", "date"),
        rows=beside(TICKETS),
        asked=("ticket",),
        told=("team",),
        kind="label",
    )
    yield table(
        name="notes",
        columns=("country", "capital", "notes"),
        rows=tuple((*row, "checked") for row in CAPITALS),
        task="Name the capital.",
        asked=("country",),
        told=("capital",),
        kind="text",
    )
    yield table(
        name="yes-no",
        columns=("text", "label"),
        rows=tuple((f"{n} is even", ("yes", "no", "Yes", "No")[n % 4]) for n in range(40)),
        asked=("text",),
        told=("label",),
        kind="label",
        case_counts=False,
    )
    yield table(
        name="text-label",
        columns=("label", "text"),
        rows=turned(REVIEWS),
        asked=("text",),
        told=("label",),
        kind="label",
    )
    yield table(
        name="choices",
        columns=("question", "A", "B", "C", "answer"),
        rows=CHOICES,
        task="Answer with the letter of the right choice.",
        asked=("question", "A", "B", "C"),
        told=("answer",),
        kind="choice",
    )
    yield table(
        name="answer-first",
        columns=("answer", "question"),
        rows=turned(QUESTIONS),
        asked=("question",),
        told=("answer",),
        kind="text",
    )
    yield table(name="q-a", columns=("q", "a"), rows=QUESTIONS, asked=("q",), told=("a",), kind="text")
    yield table(
        name="input-output",
        columns=("output", "input"),
        rows=turned(UPPER),
        asked=("input",),
        told=("output",),
        kind="text",
    )
    yield table(
        name="prompt-completion",
        columns=("prompt", "completion"),
        rows=QUESTIONS,
        asked=("prompt",),
        told=("completion",),
        kind="text",
    )
    yield table(
        name="source-target",
        columns=("id", "source", "target"),
        rows=tuple((n, *row) for n, row in enumerate(FRENCH)),
        task="Translate.",
        asked=("source",),
        told=("target",),
        kind="text",
    )
    yield table(
        name="alpaca",
        columns=("instruction", "input", "output"),
        rows=tuple(("Give the plural.", *row) for row in PLURALS),
        asked=("instruction", "input"),
        told=("output",),
        kind="text",
    )
    yield table(
        name="passages",
        columns=("context", "question", "answer"),
        rows=tuple((text, "Who is it?", name) for text, name, _, _ in PEOPLE),
        asked=("context", "question"),
        told=("answer",),
        kind="text",
    )
    yield table(
        name="entailment",
        columns=("premise", "hypothesis", "label"),
        rows=PAIRS_NLI,
        asked=("premise", "hypothesis"),
        told=("label",),
        kind="label",
    )
    yield table(
        name="json-columns",
        columns=("text", "name", "city"),
        rows=tuple((text, name, city) for text, name, _, city in PEOPLE),
        task="Extract the name and the city as JSON.",
        asked=("text",),
        told=("name", "city"),
        kind="json",
    )
    yield table(
        name="json-record",
        columns=("sentence", "record"),
        rows=tuple((text, json.dumps({"name": name, "age": int(age)})) for text, name, age, _ in PEOPLE),
        task="Extract name and age as JSON.",
        asked=("sentence",),
        told=("record",),
        kind="json",
    )
    yield table(
        name="dates",
        columns=("date", "iso"),
        rows=DATES,
        task="Write the date as year-month-day.",
        asked=("date",),
        told=("iso",),
        kind="date",
    )
    yield table(
        name="sorting",
        columns=("numbers", "in order"),
        rows=LISTS,
        task="Sort the numbers, with commas between them.",
        asked=("numbers",),
        told=("in order",),
        kind="list",
    )
    yield table(
        name="letters",
        columns=("word", "letter", "answer"),
        rows=LETTERS,
        asked=("word", "letter"),
        told=("answer",),
        kind="number",
    )
    yield table(
        name="letter-count",
        columns=("word", "letter", "n"),
        rows=LETTERS,
        task="How often does the letter occur in the word?",
        asked=("word", "letter"),
        told=("n",),
        kind="number",
    )
    yield table(
        name="code",
        columns=("question", "tests"),
        rows=tuple(
            (
                f"Write a function add{n}(x) that adds {n}.",
                json.dumps([{"call": f"add{n}", "args": [1], "expected": n + 1}]),
            )
            for n in range(2, 12)
        ),
        asked=("question",),
        told=(),
        kind="code",
    )
    yield table(
        name="arithmetic",
        columns=("expression", "result"),
        rows=tuple((f"{a} * {a + 3}", str(a * (a + 3))) for a in range(2, 30)),
        asked=("expression",),
        told=("result",),
        kind="number",
    )
    yield table(
        name="german",
        columns=("frage", "antwort"),
        rows=tuple((f"Was ist die Hauptstadt von {a}?", b) for a, b in CAPITALS),
        asked=("frage",),
        told=("antwort",),
        kind="text",
    )
    yield table(
        name="german-nouns",
        columns=("Nr", "Wort", "Mehrzahl", "Notiz"),
        rows=tuple(
            (n, a, b, "")
            for n, (a, b) in enumerate(
                zipped("Hund Hunde,Haus Häuser,Kind Kinder,Buch Bücher,Auto Autos,Baum Bäume,Maus Mäuse,Tür Türen")
            )
        ),
        task="Bilde die Mehrzahl des Wortes.",
        asked=("Wort",),
        told=("Mehrzahl",),
        kind="text",
    )
    yield table(
        name="french-capitals",
        columns=("capitale", "pays"),
        rows=turned(CAPITALS),
        task="Donne la capitale du pays.",
        asked=("pays",),
        told=("capitale",),
        kind="text",
    )
    yield table(
        name="spanish",
        columns=("pregunta", "respuesta"),
        rows=tuple((f"¿Cuál es la capital de {a}?", b) for a, b in CAPITALS),
        asked=("pregunta",),
        told=("respuesta",),
        kind="text",
    )
    yield table(
        name="japanese",
        columns=("質問", "回答"),
        rows=tuple((f"{n}たす{n}は?", str(2 * n)) for n in range(1, 20)),
        asked=("質問",),
        told=("回答",),
        kind="number",
    )
    yield table(
        name="messages",
        columns=("prompt", "answer"),
        rows=tuple((turns(a), b) for a, b in QUESTIONS),
        asked=("prompt",),
        told=("answer",),
        kind="text",
    )
    yield table(
        name="sums-no-header",
        columns=SUMS[0],
        rows=SUMS[1:],
        asked=(SUMS[0][0],),
        told=(SUMS[0][1],),
        kind="number",
        header=False,
    )
    yield table(
        name="labels-no-header",
        columns=REVIEWS[0],
        rows=REVIEWS[1:],
        asked=(REVIEWS[0][0],),
        told=(REVIEWS[0][1],),
        kind="label",
        header=False,
    )
    yield table(
        name="exact-length",
        columns=("question", "n_words"),
        rows=tuple((f"Write a sentence of {n} words about {word}.", str(n)) for n in range(3, 9) for word in WORDS[:4]),
        task="Write a sentence with exactly the number of words that is asked for.",
        asked=("question",),
        told=("n_words",),
        kind="setting",
    )


LEFT_TO_RIGHT: tuple[tuple[str, str, Sequence[tuple[Any, ...]], str, str], ...] = (
    ("in_words", "number", turned(NUMBERS), "number", "text"),
    ("name", "initials", INITIALS, "text", "text"),
    ("date", "iso", DATES, "date", "date"),
    ("letters", "word", turned(SPELLED), "text", "text"),
)
"""Two columns whose names say neither, rows, and the kind of the right one and of the left one."""


def in_either_order() -> Iterator[Everyday]:
    """The same rows in both orders of the columns: the left one is always the question."""
    for left, right, rows, kind, back_kind in LEFT_TO_RIGHT:
        yield Everyday(
            name=f"{left}+{right}", columns=(left, right), rows=tuple(rows), asked=(left,), told=(right,), kind=kind
        )
        yield Everyday(
            name=f"{right}+{left}",
            columns=(right, left),
            rows=turned(rows),
            asked=(right,),
            told=(left,),
            kind=back_kind,
        )


TABLES: tuple[Everyday, ...] = (*both_directions(), *others(), *in_either_order())


def write(table: Everyday, folder: Path) -> Path:
    """Write a table as a CSV file."""
    path = folder / f"{table.name}.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([table.columns, *table.rows])
    return path


def outcome(table: Everyday, folder: Path) -> Outcome:
    """What `podium init FILE -y`, with the table's sentence, proposes, against the reading that is meant."""
    return _outcome(table, write(table, folder), Wishes(sentence=table.task))


def _outcome(table: Everyday, path: Path, wishes: Wishes) -> Outcome:
    try:
        rows = rows_of(str(path))
        made = proposed(rows, str(path), wishes)
    except ConfigError as error:
        needs_reward = table.kind == "setting" and "--reward-file" in error.fix
        wrong = () if needs_reward else ("no proposal",)
        return Outcome(table=table, asked="", told="", kind="", wrong=wrong, doubts=(str(error),))
    doubts = tuple(doubts_about(rows, str(path), wishes, made.chosen, path.parent))
    asked, told = (str(made.settings.get(key) or f"{{{key}}}") for key in ("prompt", "answer"))
    wrong = tuple(_wrong(table, made, asked, told, doubts))
    _, prompt, _, answer = shlex.split(made.chosen.other) or [""] * 4
    other = dataclasses.replace(wishes, prompt=prompt, answer=answer)
    return Outcome(
        table=table,
        asked=asked,
        told=told,
        kind=made.shape,
        wrong=wrong,
        doubts=doubts,
        turned=bool(wrong and prompt) and not _outcome(table, path, other).wrong,
    )


def _wrong(table: Everyday, made: Proposal, asked: str, told: str, doubts: Sequence[str]) -> Iterator[str]:
    if set(parse(asked).columns) != set(table.asked):
        yield "question"
    if made.shape != "code" and set(parse(told).columns) != set(table.told):
        yield "answer"
    if made.shape != table.kind:
        yield "kind"
    if ("ignore_case" in str(made.settings.get("rewards"))) is table.case_counts:
        yield "capitals"
    if not table.header and not any("first line" in doubt for doubt in doubts):
        yield "header"


def lines(found: Sequence[Outcome]) -> Iterator[str]:
    """A table with a line for each outcome, and the counts."""
    for each in found:
        verdict = f"wrong: {', '.join(each.wrong)}" if each.wrong else "right"
        said = "turned by its flags" if each.turned else "said" if each.doubts else ""
        asked, told = (text.replace("\n", " ")[:34] for text in (each.asked, each.told))
        yield f"{each.table.name:22} {asked:35} {told:35} {each.kind:8} {verdict:16} {said}"
    wrong = [each for each in found if each.wrong]
    asked_for = [each.table.name for each in wrong if not each.kind and each.doubts]
    unsaid = [each.table.name for each in wrong if each.kind and not each.turned]
    yield f"{len(found) - len(wrong)} of {len(found)} right at once"
    yield f"{sum(each.turned for each in wrong)} right with the flags that are printed"
    yield f"{len(asked_for)} asked for: {', '.join(asked_for) or 'none'}"
    yield f"{len(unsaid)} wrong and not turned: {', '.join(unsaid) or 'none'}"


def main() -> None:
    """Print the outcomes; exit code 1 where a proposal is wrong that the flags it prints do not turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="only write the tables, into this folder")
    given = parser.parse_args()
    if given.write:
        given.write.mkdir(parents=True, exist_ok=True)
        for table in TABLES:
            write(table, given.write)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = [outcome(table, Path(folder)) for table in TABLES]
    print("\n".join(lines(found)))
    sys.exit(any(each.wrong and each.kind and not each.turned for each in found))


if __name__ == "__main__":
    main()
