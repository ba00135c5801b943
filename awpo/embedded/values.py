"""The values that fill the phrasings: short lists of common words and small numbers.

A value appears in a user's sentence, in a tool's result and in a call's arguments in the same form, so that
filling an argument is copying. The JSON type of a list is that of its members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Value = str | int | float


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


_CITIES = """Paris, Rome, London, Berlin, Madrid, Vienna, Oslo, Lisbon, Prague, Dublin, Athens, Cairo, Tokyo, Delhi,
Lima, Boston, Denver, Dallas, Milan, Geneva, Warsaw, Seoul, Hanoi, Toronto"""
_PEOPLE = """Anna, Tom, Maria, Peter, Lucy, David, Emma, Paul, Sara, John, Nina, Mark, Julia, Leo, Clara, Simon, Eva,
Oscar, Rosa, Adam"""
_SONGS = """Blue Moon, Golden Hour, Silver Rain, Red River, Green Fields, Slow Train, Summer Wind, Winter Sun,
Open Road, Wild Heart, First Light, Cold Water, Old Friend, Sweet Home, Last Dance, Deep Sea"""
_ARTISTS = """Mira Stone, Jack Hale, Luna Park, Otis Brown, Ella West, Ray Moss, Ivy Lake, Sam Cross, Nora Field,
Ben Frost, Carl Wood, June Bell"""
_TEXTS = """running late, dinner ready, almost home, happy birthday, good luck, call back, well done, train delayed,
lunch tomorrow, bring milk, meeting over, door open"""
_PRODUCTS = """lamp, chair, kettle, desk, mirror, blanket, clock, camera, jacket, bottle, pillow, carpet, guitar,
helmet, tent, scarf"""
_EVENTS = """team lunch, dentist visit, yoga class, book club, piano lesson, city tour, job talk, game night,
birthday party, family dinner, budget review, art show"""
_TOPICS = "taxes, garden, school, health, work, cars, books, science, politics, animals, fashion, coffee, chess, space"
_DISHES = "pizza, pasta, soup, salad, sushi, curry, tacos, rice, pancakes, burgers, noodles, stew"
_WORDS = "house, river, tree, light, stone, night, water, bread, bird, cloud, dream, fire, flower, horse, island, storm"

_DIGITS = range(1, 10)
# No digit twice in a number: after a digit, the next one is never in doubt within the number.
_TWO_DIGITS = tuple(10 * ten + one for ten in _DIGITS for one in _DIGITS if ten != one)

VALUES: Mapping[str, tuple[Value, ...]] = {
    "account": _words("savings, checking, business, holiday, family, pension, student, travel, house, joint"),
    "amount": tuple(range(10, 100, 10)) + tuple(range(15, 100, 20)),
    "artist": _words(_ARTISTS),
    "bill": _words("water, power, phone, gas, internet, rent, school, garage, heating, insurance"),
    "call": _words("ringing, busy, open"),
    "city": _words(_CITIES),
    "code": tuple(f"{letter}{number}" for letter in "ABCDEFGH" for number in _TWO_DIGITS[::5]),
    "color": _words("red, blue, green, yellow, orange, purple, pink, white, violet, golden"),
    "company": _words("Acme, Globex, Umbra, Solaris, Vertex, Nimbus, Orion, Zenith, Quanta, Atlas"),
    "count": tuple(range(2, 10)),
    "cuisine": _words("Italian, Thai, Greek, Indian, French, Turkish, Korean, Mexican, Spanish, Chinese"),
    "currency": _words("euros, dollars, pounds, yen, francs, pesos, crowns, rupees"),
    "day": _words("monday, tuesday, wednesday, thursday, friday, saturday, sunday, today, tomorrow")
    + tuple(f"{day} {month}" for month in ("May", "June") for day in (3, 8, 12, 17, 21, 26)),
    "degrees": tuple(number for number in _TWO_DIGITS if 12 <= number < 30),
    "device": _words("radio, fan, lamp, heater, oven, printer, speaker, screen, pump, camera, washer, dryer"),
    "dish": _words(_DISHES),
    "done": _words("done, complete, ready"),
    "door": _words("front, back, side, garage, garden, cellar, balcony, kitchen"),
    "event": _words(_EVENTS),
    "file": tuple(
        f"{name}.{ending}"
        for name in _words("report, budget, photos, plan, letter, agenda, slides")
        for ending in ("pdf", "doc")
    ),
    "genre": _words("jazz, rock, folk, blues, disco, techno, soul, country, opera"),
    "hotel": _words("Grand Hotel, Park Inn, Royal Court, Lake House, Sun Palace, Hill Lodge, Star Motel, White Swan"),
    "identifier": _TWO_DIGITS,
    "language": _words("French, German, Spanish, Italian, Polish, Dutch, Greek, Danish"),
    "minutes": (5, *range(10, 60, 10), 15, 25, 45),
    "mountain": _words("Elbrus, Eiger, Etna, Olympus, Fuji, Rainier, Logan, Denali"),
    "percent": _TWO_DIGITS[::3],
    "person": _words(_PEOPLE),
    "phone": tuple(f"{first}{rest}" for first in _DIGITS for rest in _TWO_DIGITS[::4] if str(first) not in str(rest)),
    "playing": _words("playing, started, on"),
    "playlist": _words("party, morning, focus, travel, dinner, gym, sleep, summer, road, happy"),
    "product": _words(_PRODUCTS),
    "rate": (0.5, 0.8, 1.1, 1.2, 1.5, 2.5, 7.5, 12.5),
    "restaurant": _words(
        "Casa Luna, Blue Door, Golden Fork, Little Oven, Red Lantern, Olive Tree, Green Table, Old Barn"
    ),
    "room": _words("kitchen, bedroom, bathroom, office, hallway, garage, attic, cellar, library"),
    "seat": tuple(f"{row}{letter}" for row in range(2, 10) for letter in "ABCD"),
    "sent": _words("sent, delivered, received"),
    "sky": _words("sunny, cloudy, rainy, foggy, stormy, clear, snowy, windy"),
    "song": _words(_SONGS),
    "speed": _TWO_DIGITS[::3],
    "sport": _words("yoga, boxing, tennis, rowing, climbing, cycling, judo, golf, surfing, skating"),
    "square": tuple(number * number for number in range(2, 21)),
    "street": tuple(f"{number} {name} Street" for name in ("Oak", "Mill", "King", "Rose") for number in range(2, 10)),
    "text": _words(_TEXTS),
    "time": tuple(f"{hour}:{minute}" for hour in range(1, 13) for minute in ("00", "30", "45")),
    "topic": _words(_TOPICS),
    "total": _TWO_DIGITS,
    "unit": _words("meters, feet, miles, yards, inches, kilometers"),
    "word": _words(_WORDS),
}

_METERS = {"meters": 1.0, "feet": 0.3048, "miles": 1609.344, "yards": 0.9144, "inches": 0.0254, "kilometers": 1000.0}


def _tidy(number: float) -> int | float:
    """At most two decimals, and an integer where there are none."""
    rounded = round(number, 2)
    return int(rounded) if rounded == int(rounded) else rounded


def _number(arguments: Mapping[str, Value], slot: str) -> float:
    return float(arguments[slot])


# Results that follow from the arguments; a domain file names them as `=name`.
COMPUTED: Mapping[str, Callable[[Mapping[str, Value]], Value]] = {
    "sum": lambda given: _tidy(_number(given, "first") + _number(given, "second")),
    "product": lambda given: _tidy(_number(given, "first") * _number(given, "second")),
    "quotient": lambda given: _tidy(_number(given, "dividend") / _number(given, "divisor")),
    "percentage": lambda given: _tidy(_number(given, "percent") * _number(given, "whole") / 100),
    "root": lambda given: _tidy(_number(given, "number") ** 0.5),
    "length": lambda given: _tidy(
        _number(given, "value") * _METERS[str(given["source"])] / _METERS[str(given["target"])]
    ),
}


def json_type(kind: str) -> str:
    """The JSON Schema type of a list of values."""
    sample = VALUES[kind][0]
    return {str: "string", int: "integer", float: "number"}[type(sample)]
