"""Rewards for how a text is written, and for the words that are in it."""

# ruff: noqa: RUF001  # other alphabets than the English one

from __future__ import annotations

import pytest

import podium.rewards as library
from podium.errors import ConfigError
from podium.rewards import library_reward


@pytest.fixture(params=["plain", "chat"])
def wrapped(request):
    """Makes completions of texts, in either form."""
    if request.param == "plain":
        return list
    return lambda texts: [[{"role": "assistant", "content": text}] for text in texts]


def test_patterns(wrapped):
    texts = wrapped(["One, therefore two", "ONE", "", "none of it"])
    assert library.forbidden_patterns(texts, patterns=[r"\bone\b"]) == [0.0, 0.0, 1.0, 1.0]
    assert library.forbidden_patterns(texts, patterns=[r"\bone\b"], ignore_case=False) == [1.0] * 4
    assert library.required_patterns(texts, patterns=["one", "therefore"]) == [1.0, 0.5, 0.0, 0.5]


def test_distinct_ngrams(wrapped):
    texts = wrapped(["a b a b a b", "A b, a B!", "a", "", "東京東京東京"])
    assert library.distinct_ngrams(texts, size=2) == [pytest.approx(0.4), pytest.approx(2 / 3), 1.0, 1.0, 0.4]


def test_group_diversity(wrapped):
    texts = ["a b c", "x y z", "a b c", "a b d", "7", "7", "", "", "only"]
    prompts = ["p", "q", "p", "q", "r", "r", "s", "s", "t"]  # the members of a group need not be neighbours
    found = library.group_diversity(prompts, wrapped(texts), size=2)
    assert found == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, None]


TEXTS = {
    "en": "The train was late because of the snow, so we had to wait at the station for an hour.",
    "de": "Der Zug kam wegen des Schnees zu spät, und wir mussten eine Stunde auf dem Bahnhof warten.",
    "fr": "Le train était en retard à cause de la neige et nous avons attendu une heure dans la gare.",
    "es": "El tren llegó tarde por la nieve y tuvimos que esperar una hora en la estación con los niños.",
    "it": "Il treno era in ritardo per la neve e abbiamo aspettato un'ora nella stazione con gli amici.",
    "pt": "O comboio chegou com atraso por causa da neve e não pudemos sair da estação durante uma hora.",
    "nl": "De trein was te laat door de sneeuw en wij moesten een uur op het station wachten.",
    "sv": "Tåget var sent på grund av snön och vi fick vänta en timme på stationen med barnen.",
    "da": "Toget var forsinket på grund af sneen, og vi måtte vente en time på stationen, efter at det blev mørkt.",
    "pl": "Pociąg spóźnił się z powodu śniegu i musieliśmy czekać na stacji przez godzinę, bo nie było co robić.",
    "tr": "Tren kar için geç kaldı ve biz bir saat istasyonda bekledik, çok soğuk olduğu için daha kötü oldu.",
    "id": "Kereta itu terlambat karena salju dan kami harus menunggu di stasiun dengan anak untuk satu jam.",
    "ru": "Поезд опоздал из-за снега, и мы ждали на вокзале целый час.",
    "zh": "火车因为下雪晚点了，我们在车站等了一个小时。",
    "ja": "雪のために電車が遅れて、駅で一時間待ちました。",
    "ko": "눈 때문에 기차가 늦어서 역에서 한 시간을 기다렸습니다.",
    "ar": "تأخر القطار بسبب الثلج وانتظرنا ساعة في المحطة.",
    "he": "הרכבת איחרה בגלל השלג וחיכינו שעה בתחנה.",
    "el": "Το τρένο άργησε λόγω του χιονιού και περιμέναμε μία ώρα στον σταθμό.",
    "hi": "बर्फ के कारण ट्रेन देर से आई और हमने एक घंटे तक इंतज़ार किया।",
    "th": "รถไฟมาสายเพราะหิมะและเราต้องรอที่สถานีหนึ่งชั่วโมง",
}


@pytest.mark.parametrize("code", TEXTS)
def test_language(wrapped, code):
    found = dict(zip(TEXTS, library.language(wrapped(TEXTS.values()), code=code), strict=True))
    assert found.pop(code) == 1.0
    assert set(found.values()) == {0.0}


def test_language_of_mixtures_and_of_what_is_no_prose():
    english = TEXTS["en"]
    mixed, tagged, code, little = library.language(
        [f"{english} {TEXTS['ru']}", f"<think>{english}</think> $x^2$", f"{english}\n```\n{TEXTS['de'] * 5}\n```", "7"]
    )
    assert 0.4 < mixed < 0.8
    assert (tagged, code, little) == (1.0, 1.0, None)


def test_keyword_coverage(wrapped):
    texts = wrapped(["Carbon-dioxide, and LIGHT.", "enlightened", "", "light"])
    own = [["light", "carbon dioxide"]] * 3 + [None]
    assert library.keyword_coverage(texts, keywords=own) == [1.0, 0.0, 0.0, None]
    assert library.keyword_coverage(texts, answer=["the light", "light", "the", None]) == [1.0, 0.0, None, None]
    assert library.keyword_coverage(wrapped(["light " * 50]), keywords=["light"], max_words=20) == [0.0]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("Eiffel", "Eiffel Tower", 2 / 3),
        ("Eiffel " * 10, "Eiffel Tower", 2 / 12),
        ("so <answer>Tower</answer>", "Tower", 1.0),
        ("tower", ["spire", "tower"], 1.0),
        ("", "tower", 0.0),
        ("tower", [], None),
        ("tower", None, None),
        ("tower", "the", None),
    ],
)
def test_answer_f1(wrapped, text, answer, expected):
    expected = expected if expected is None else pytest.approx(expected)
    assert library.answer_f1(wrapped([text]), answer=[answer]) == [expected]


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("forbidden_patterns", {"patterns": "x"}, "must be a list"),
        ("required_patterns", {"patterns": []}, "must be a list"),
        ("required_patterns", {"patterns": ["("]}, "is no regular expression"),
        ("distinct_ngrams", {"size": 0}, "`size` must be"),
        ("group_diversity", {"size": 1.5}, "`size` must be"),
        ("language", {"code": "english"}, "no language `english`"),
        ("keyword_coverage", {"max_words": 0}, "`max_words` must be"),
    ],
)
def test_what_cannot_work_is_said(name, settings, text):
    with pytest.raises(ConfigError, match=text):
        library_reward(name, **settings)


def test_columns_that_are_missing_are_said():
    with pytest.raises(ConfigError, match="needs a column `keywords`"):
        library.keyword_coverage(["x"])
    with pytest.raises(ConfigError, match="column `budget`"):
        library.token_budget([[1]])
