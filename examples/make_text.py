"""Writes a text for examples/train_gpt.py: short stories in which everything said is said again.

Run: python examples/make_text.py PATH [--bytes 1000000] [--seed 0]

Each story makes up the names of a few animals, tells once what each of them is, where it lives and
what it carries, and then speaks of nothing else. A name cannot be learnt from other stories: to
spell it a second time a model must look back to where it was told, hundreds of bytes away. The same
arguments write the same bytes.
"""

import argparse
import random
from pathlib import Path

ONSETS = ["b", "br", "d", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t", "v"]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ou"]
CODAS = ["", "l", "n", "r", "s", "m", "nd", "rk"]
KINDS = ["badger", "crane", "ferret", "fox", "hare", "heron", "marten", "otter", "raven", "stoat"]
COLOURS = ["black", "brown", "golden", "grey", "red", "silver", "spotted", "white"]
PLACES = ["bridge", "chapel", "ford", "harbour", "mill", "orchard", "quarry", "tower", "well"]
THINGS = ["basket", "bell", "candle", "drum", "kettle", "key", "ladder", "lantern", "map", "rope"]

INTRODUCTION = "{name} is a {colour} {kind}. {name} lives at the {place} and carries a {thing}."
# Every word in braces was told before: of one animal, and of another.
SENTENCES = [
    "{name} walks from the {place} to the {other_place}, where {other_name} lives.",
    "The {kind} with the {thing} waits for the {other_kind} with the {other_thing}.",
    '"I am {name}," says the {colour} {kind}, and the {other_colour} {other_kind} nods.',
    "{other_name} would like to have the {thing} of {name}, and not a {other_thing}.",
    "At night {name} takes the {thing} and goes home to the {place}.",
    "Who carries the {thing}? {name} does. Who lives at the {other_place}? {other_name} does.",
]
FIELDS = ("name", "kind", "colour", "place", "thing")


def make_name(rng):
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(2))
    return ("".join(syllables) + rng.choice(CODAS)).capitalize()


def make_story(rng):
    count = rng.randint(2, 4)
    properties = [[make_name(rng) for _ in range(count)]]
    properties += [rng.sample(words, count) for words in (KINDS, COLOURS, PLACES, THINGS)]
    animals = [dict(zip(FIELDS, values, strict=True)) for values in zip(*properties, strict=True)]
    lines = [INTRODUCTION.format(**animal) for animal in animals]
    for _ in range(rng.randint(5, 10)):
        one, other = rng.sample(animals, 2)
        others = {f"other_{field}": value for field, value in other.items()}
        lines.append(rng.choice(SENTENCES).format(**one, **others))
    return "\n".join(lines) + "\n\n"


def make_text(size, seed=0):
    """`size` bytes of stories; the last one ends where the text does."""
    rng = random.Random(seed)
    stories, length = [], 0
    while length < size:
        stories.append(make_story(rng))
        length += len(stories[-1])
    return "".join(stories).encode("ascii")[:size]


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.path.parent.mkdir(parents=True, exist_ok=True)
    options.path.write_bytes(make_text(options.bytes, options.seed))
    print(f"{options.path}: {options.bytes} bytes")


if __name__ == "__main__":
    main()
