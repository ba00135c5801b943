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
Lima, Boston, Denver, Dallas, Milan, Turin, Geneva, Zurich, Warsaw, Riga, Porto, Naples, Lyon, Nice, Bonn, Cologne,
Sydney, Perth, Toronto, Chicago, Miami, Austin, Seoul, Kyoto, Hanoi, Dubai"""
_PEOPLE = """Anna, Tom, Maria, Peter, Lucy, David, Emma, Paul, Sara, John, Nina, Mark, Julia, Leo, Clara, Simon, Eva,
Oscar, Rosa, Adam, Laura, Felix, Ida, Hugo, Vera, Max, Alice, Bruno, Greta, Victor"""
_SONGS = """Blue Moon, Golden Hour, Silver Rain, Red River, Green Fields, Slow Train, Summer Wind, Winter Sun,
Open Road, Wild Heart, Paper Moon, Night Drive, First Light, Cold Water, Old Friend, Sweet Home, Lost Stars,
High Tide, Dark Horse, Long Way, Second Chance, Last Dance, Deep Sea, Quiet Street"""
_TEXTS = """dinner is ready, lunch is at noon, practice is over, everything is fine, nobody is home, traffic is bad,
work is done, rain is coming, breakfast is on the table, school is closed, grandma is here, coffee is ready,
tickets are sold out, dad is asleep, supper will be late, help is on the way, peace is near, plans have changed,
guests are coming, someone is at the door"""
_PRODUCTS = """lamp, chair, kettle, desk, mirror, blanket, clock, camera, jacket, backpack, bottle, pillow, carpet,
heater, toaster, guitar, helmet, tent, scarf, wallet, keyboard, notebook, shelf, basket"""
_EVENTS = """team lunch, dentist visit, yoga class, book club, piano lesson, city tour, job talk, board game night,
birthday party, garden party, family dinner, budget review, art show, bike trip, house tour, sales call,
choir practice, wine tasting"""
_TOPICS = """taxes, travel, garden, school, health, work, money, history, cars, books, sports, science, politics,
animals, fashion, art, gifts, repairs, insurance, coffee, chess, space"""
_DISHES = """pizza, pasta, soup, salad, sushi, curry, tacos, rice, pancakes, burgers, noodles, stew, omelette, risotto,
dumplings, lasagne, chili, fish cakes"""
_WORDS = """house, river, tree, light, stone, night, water, bread, bird, cloud, dream, fire, flower, friend, heart,
horse, island, moon, mountain, music, ocean, paper, road, star, storm, summer, table, window, winter, wood"""

VALUES: Mapping[str, tuple[Value, ...]] = {
    "account": _words("savings, checking, business, holiday, family, pension, student, travel, house, joint"),
    "amount": (*range(5, 100, 5), 12, 18, 24, 36, 42, 48, 64, 72, 84, 96),
    "artist": _words(
        "Mira Stone, Jack Hale, Luna Park, Otis Green, Ella West, Ray Moss, Ivy Lake, Sam Cross, Nora Field, Ben Frost,"
        "Tess Hill, Carl Wood, June Bell, Max Rivers, Lola Marsh, Roy Banks"
    ),
    "bill": _words("water, power, phone, gas, internet, rent, school, garage, heating, insurance"),
    "call": _words("ringing, busy, open"),
    "city": _words(_CITIES),
    "code": tuple(f"{letter}{number}" for letter in "ABCDEFGHKLMNPRST" for number in range(12, 96, 7)),
    "color": _words("red, blue, green, yellow, orange, purple, pink, white, violet, golden"),
    "company": _words(
        "Acme, Globex, Initech, Umbra, Solaris, Vertex, Nimbus, Orion, Zenith, Quanta, Helio, Borealis, Atlas, Delta"
    ),
    "count": tuple(range(2, 13)),
    "cuisine": _words("Italian, Thai, Greek, Indian, French, Turkish, Korean, Mexican, Spanish, Chinese"),
    "currency": _words("euros, dollars, pounds, yen, francs, pesos, crowns, rupees"),
    "day": _words("monday, tuesday, wednesday, thursday, friday, saturday, sunday, today, tomorrow")
    + tuple(f"{day} {month}" for month in ("May", "June", "July") for day in range(2, 30, 3)),
    "degrees": tuple(range(8, 31)),
    "device": _words(
        "radio, fan, lamp, heater, oven, printer, speaker, screen, pump, kettle, camera, washer, dryer, fridge, mixer"
    ),
    "dish": _words(_DISHES),
    "done": _words("done, complete, ready"),
    "door": _words("front, back, side, garage, garden, cellar, balcony, kitchen"),
    "event": _words(_EVENTS),
    "file": tuple(
        f"{name}.{ending}"
        for name in _words("report, budget, photos, plan, letter, invoice, agenda, slides")
        for ending in ("pdf", "txt", "doc")
    ),
    "genre": _words("jazz, rock, folk, blues, disco, techno, classical, soul, country, swing, reggae, opera"),
    "hotel": _words(
        "Grand Hotel, Park Inn, Royal Court, Lake House, Sun Palace, Hill Lodge, Star Hotel, Garden Inn, Harbour House,"
        "City Lodge, Old Mill, White Swan"
    ),
    "identifier": tuple(range(103, 990, 7)),
    "language": _words("French, German, Spanish, Italian, Polish, Dutch, Greek, Danish, Turkish, Latin"),
    "minutes": tuple(range(5, 60, 5)),
    "mountain": _words(
        "Elbrus, Eiger, Etna, Olympus, Fuji, Rainier, Logan, Denali, Teide, Triglav, Zugspitze, Snowdon"
    ),
    "percent": tuple(range(20, 99, 3)),
    "person": _words(_PEOPLE),
    "phone": tuple(str(number) for number in range(2017, 9900, 83)),
    "playing": _words("playing, started, on"),
    "playlist": _words("party, morning, focus, travel, dinner, gym, sleep, summer, road, happy"),
    "product": _words(_PRODUCTS),
    "rate": (0.5, 0.8, 1.1, 1.2, 1.5, 2.5, 7.5, 12.5),
    "restaurant": _words(
        "Casa Luna, Blue Door, Golden Fork, Little Oven, Red Lantern, Olive Tree, Green Table, Sea Breeze, Old Barn,"
        "Corner Spoon, Salt House, Lucky Bowl"
    ),
    "room": _words("kitchen, bedroom, bathroom, office, hallway, garage, attic, cellar, nursery, library, studio"),
    "seat": tuple(f"{row}{letter}" for row in range(3, 30, 2) for letter in "ABCDEF"),
    "sent": _words("sent, delivered, received"),
    "sky": _words("sunny, cloudy, rainy, foggy, stormy, clear, snowy, windy"),
    "song": _words(_SONGS),
    "speed": tuple(range(4, 80, 3)),
    "sport": _words("yoga, boxing, tennis, swimming, rowing, climbing, dancing, cycling, judo, golf, surfing, skating"),
    "square": tuple(number * number for number in range(4, 31)),
    "street": tuple(
        f"{number} {name} Street" for name in ("Oak", "Mill", "King", "Rose", "Lake") for number in range(4, 60, 9)
    ),
    "text": _words(_TEXTS),
    "time": tuple(f"{hour}:{minute}" for hour in range(1, 13) for minute in ("00", "15", "30", "45")),
    "topic": _words(_TOPICS),
    "total": tuple(range(105, 990, 9)),
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
