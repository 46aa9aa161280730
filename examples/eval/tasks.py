"""Questions for freekv-compare --tasks, with the repository's texts as haystacks; needs nothing but Python.

    python3 tasks.py tasks.jsonl --tasks needles copy --lengths 1024 4096
    freekv-compare ... --section tasks --tasks tasks.jsonl

The forms are those of RULER (arXiv 2404.06654) and of copying, look-up and classification from the context. The same
arguments give the same file, byte for byte, on every Python 3.9 or later. A length is one of tokens, taken as
--characters for each: freekv-compare says how many a prompt really has.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

TEXTS = Path(__file__).resolve().parent / "texts"
PLACES = """lighthouse orchard harbour library windmill bakery chapel museum brewery quarry stable tavern castle
bridge theatre foundry cottage garden market station tower prison school hospital bank mill palace monastery vineyard factory
observatory lodge ferry warehouse workshop kennel greenhouse courthouse cinema dairy aquarium armoury gallery barracks
cathedral fountain granary hotel""".split()
COMMON = """apple river candle mirror window basket hammer ladder pillow ribbon silver copper wagon saddle helmet lantern
blanket button carpet compass curtain dagger engine feather gravel hatchet jacket kettle locket marble needle oyster
paddle quilt rocket shovel teapot umbrella velvet whistle anchor barrel cherry donkey eagle falcon goose hazel iron
jasmine kitten lemon meadow nettle olive parrot quartz raven salmon tulip violet walnut yarrow zebra acorn badger cactus
daisy ember fiddle goblet harp ivory jungle kayak lizard magnet nutmeg orchid pepper quiver robin sparrow thistle urchin
valley wombat yogurt zipper almond beacon cobalt emerald fossil garnet hornet island jewel""".split()
LABELS = ["red", "green", "blue"]
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "

# Facts that a question asks for in other words: no word of four letters or more stands in both, but those of STOP. The
# answer is one of four, all alike likely without the fact.
PARAPHRASES = [
    ("Doctor Hale grew up in {}.",
     "The physician spent his childhood in the city of",
     ["Lisbon", "Vienna", "Dublin", "Prague"]),
    ("Grandmother hid her savings inside the {}.",
     "The old woman's money can be found in a",
     ["teapot", "pillow", "piano", "clock"]),
    ("On his wedding day Edgar wore a {} coat.",
     "When he got married, the jacket of the groom was",
     ["purple", "yellow", "brown", "silver"]),
    ("The captain's dog was called {}.",
     "The skipper's pet answered to the name",
     ["Bruno", "Oscar", "Felix", "Rufus"]),
    ("Miss Ames teaches {} to the children of the village.",
     "The subject in which pupils are instructed by the local schoolmistress is",
     ["music", "botany", "French", "algebra"]),
    ("Every evening the watchman eats {} for supper.",
     "At night the guard's usual meal consists of",
     ["soup", "bread", "rice", "fish"]),
    ("The thief entered the manor through the {}.",
     "The burglar got into the great house by way of the",
     ["cellar", "chimney", "kitchen", "balcony"]),
    ("Farmer Lund buys his seed in {}.",
     "The month when the peasant purchases what he will sow is",
     ["March", "April", "June", "August"]),
    ("The ambassador's favourite pastime is {}.",
     "What the diplomat likes to do most in spare hours is",
     ["fishing", "painting", "chess", "hunting"]),
    ("A storm destroyed the roof of the {}.",
     "Bad weather ruined the top of one building, the",
     ["church", "school", "station", "hotel"]),
    ("Young Peter broke his {} while skating.",
     "On the ice the boy fractured his",
     ["wrist", "ankle", "elbow", "knee"]),
    ("The queen travelled to the coast by {}.",
     "Her Majesty reached the seaside using a",
     ["train", "carriage", "boat", "horse"]),
]
STOP = {"with", "when", "what", "that", "which", "from", "this", "there"}


class Haystack:
    """Whole sentences of the texts, in the order of one of them from a place that the dice choose. Of those in prose:
    `technical` is full of numbers."""

    def __init__(self, genesis, folklore, technical):
        self.texts = [[s for s in re.split(r"(?<=[.!?]) +|\n+", text) if s]
                      for text in (genesis, folklore, technical)]

    def of(self, dice, characters):
        """About so many characters of one text, on over its end to its beginning."""
        sentences = self.texts[dice.randrange(2)]
        at, some, size = dice.randrange(len(sentences)), [], 0
        while size < characters:
            some.append(sentences[at])
            size += len(sentences[at]) + 1
            at = (at + 1) % len(sentences)
        return some


def with_inserted(sentences, inserts):
    """The text with each (depth, paragraph) between sentences, where so much of it is before; with the real depths."""
    total, size, pending, parts, depths = sum(len(s) + 1 for s in sentences), 0, sorted(inserts), [], {}
    for sentence in sentences:
        while pending and size >= pending[0][0] * total:
            _, paragraph = pending.pop(0)
            depths[paragraph] = size / total
            parts.append("\n\n" + paragraph + "\n\n")
        parts.append(sentence + " ")
        size += len(sentence) + 1
    for _, paragraph in pending:
        depths[paragraph] = 1.0
        parts.append("\n\n" + paragraph + "\n\n")
    return "".join(parts).strip(), depths


def spread(count, first=0.03, last=0.95):
    """So many depths from `first` to `last`."""
    return [first + (last - first) * i / max(1, count - 1) for i in range(count)]


def numbers(dice, count):
    """Different numbers of five digits."""
    return [str(n) for n in dice.sample(range(10000, 100000), count)]


class Maker:
    """One kind of task at one length: its methods give {"prompt", "questions"}."""

    def __init__(self, dice, haystack, characters):
        self.dice, self.haystack, self.characters = dice, haystack, characters

    def _text(self, inserts):
        room = self.characters - sum(len(paragraph) + 4 for _, paragraph in inserts)
        return with_inserted(self.haystack.of(self.dice, max(200, room)), inserts)

    def _number_needles(self, keys, asked):
        """Facts at even depths, and a question for each of the first `asked` in the order of the dice."""
        subjects, values = self.dice.sample(PLACES, keys), numbers(self.dice, keys)
        facts = [f"The secret number of the {s} is {v}." for s, v in zip(subjects, values)]
        prompt, depths = self._text(list(zip(spread(keys), facts)))
        chosen = self.dice.sample(range(keys), asked)
        return {"prompt": prompt, "questions": [
            {"question": f"\n\nAs stated above, the secret number of the {subjects[i]} is",
             "continuation": " " + values[i], "depth": round(depths[facts[i]], 3)} for i in chosen]}

    def needles(self):
        return self._number_needles(8, 8)

    def multikey8(self):
        return self._number_needles(9, 4)

    def multikey32(self):
        return self._number_needles(33, 4)

    def multivalue(self):
        subject, values = self.dice.choice(PLACES), numbers(self.dice, 3)
        facts = [f"One of the three secret numbers of the {subject} is {v}." for v in values]
        prompt, _ = self._text(list(zip(spread(3, 0.15, 0.85), facts)))
        return {"prompt": prompt, "questions": [
            {"question": f"\n\nAs stated above, the three secret numbers of the {subject} are", "answers": values,
             "continuation": " {}, {} and {}".format(*values), "max_tokens": 40}]}

    def multiquery(self):
        subjects, values = self.dice.sample(PLACES, 8), numbers(self.dice, 8)
        facts = [f"The secret number of the {s} is {v}." for s, v in zip(subjects, values)]
        prompt, _ = self._text(list(zip(spread(8), facts)))
        a, b, c = self.dice.sample(range(8), 3)
        return {"prompt": prompt, "questions": [
            {"question": f"\n\nAs stated above, the secret numbers of the {subjects[a]}, the {subjects[b]} and the "
                         f"{subjects[c]}, in this order, are", "answers": [values[a], values[b], values[c]],
             "continuation": f" {values[a]}, {values[b]} and {values[c]}", "max_tokens": 40}]}

    def passkey(self):
        key, depth = numbers(self.dice, 1)[0], self.dice.uniform(0.05, 0.95)
        fact = f"The pass key is {key}. Remember it. {key} is the pass key."
        count = max(2, (self.characters - len(fact)) // len(FILLER))
        prompt, depths = with_inserted([FILLER.strip()] * count, [(depth, fact)])
        return {"prompt": prompt, "questions": [
            {"question": "\n\nWhat is the pass key? The pass key is", "continuation": " " + key,
             "depth": round(depths[fact], 3)}]}

    def variables(self):
        """Four chains of three variables; the value of the last of one."""
        names = self.dice.sample([f"{a}{b}" for a in "ABCDEFGHKMNPRSTUVWXYZ" for b in range(1, 10)], 12)
        values = numbers(self.dice, 4)
        lines = []
        for hop in range(3):  # each hop of all chains before the next, in an order of its own
            for chain in self.dice.sample(range(4), 4):
                right = values[chain] if hop == 0 else names[4 * hop - 4 + chain]
                lines.append(f"VAR {names[4 * hop + chain]} = {right}.")
        prompt, _ = self._text(list(zip(spread(12), lines)))
        asked = self.dice.sample(range(4), 2)
        return {"prompt": prompt, "questions": [
            {"question": f"\n\nFollowing the assignments above, the value of the variable {names[8 + i]} is",
             "choices": [" " + v for v in values], "correct": i} for i in asked]}

    def common_words(self):
        """Words in a list, five of them many times as often as the others."""
        words = sorted(set(COMMON))
        often = self.dice.sample(words, 5)
        listed, others = [], [w for w in words if w not in often]
        count = max(40, self.characters // 13)  # of a number, a word and a line break
        while len(listed) < count:
            listed += often * 5 + self.dice.sample(others, min(len(others), 30))
        listed = listed[:count]
        self.dice.shuffle(listed)
        prompt = "\n".join(f"{i + 1}. {word}" for i, word in enumerate(listed))
        return {"prompt": "A list of words, some of which are repeated often:\n\n" + prompt, "questions": [
            {"question": "\n\nThe five words that are repeated most often in the list above are:", "answers": often,
             "continuation": " " + ", ".join(often), "max_tokens": 60}]}

    def copy(self):
        """Random words at a depth: every step of repeating them needs the place behind the last one."""
        words = [self.dice.choice(COMMON) for _ in range(120)]
        number, passage = self.dice.randrange(10, 100), " ".join(words)
        depth = self.dice.uniform(0.05, 0.85)
        marked = f"Passage {number}: {passage}. End of passage {number}."
        prompt, depths = self._text([(depth, marked)])
        return {"prompt": prompt, "questions": [
            {"question": f"\n\nThe same once more, word for word:\n\nPassage {number}:", "continuation": " " + passage,
             "depth": round(depths[marked], 3)}]}

    def lookup(self):
        keys = self.dice.sample([f"{a}-{b}" for a in sorted(set(COMMON)) for b in PLACES], 100)
        values = numbers(self.dice, 100)
        table = "{\n" + "".join(f'  "{k}": {v},\n' for k, v in zip(keys, values)) + "}"
        if len(table) < self.characters:
            around = self.haystack.of(self.dice, self.characters - len(table))
            depth = self.dice.uniform(0.1, 0.8)
            prompt, _ = with_inserted(around, [(depth, table)])
        else:  # as many lines as the length has room for
            fewer = max(10, self.characters * 100 // len(table))
            keys, values = keys[:fewer], values[:fewer]
            prompt = "{\n" + "".join(f'  "{k}": {v},\n' for k, v in zip(keys, values)) + "}"
        return {"prompt": prompt, "questions": [
            {"question": f'\n\nOnce more, one line of the table:\n\n  "{keys[i]}":', "continuation": " " + values[i]}
            for i in self.dice.sample(range(len(keys)), 10)]}

    def table(self):
        """A table at a depth, written out again row by row: a long answer of which every row needs another line."""
        names, values = self.dice.sample(sorted(set(COMMON)), 20), numbers(self.dice, 20)
        places = [self.dice.choice(PLACES) for _ in names]
        rows = "".join(f"| {n} | {p} | {v} |\n" for n, p, v in zip(names, places, values))
        marked = "| word | place | number |\n|---|---|---|\n" + rows.strip()
        prompt, depths = self._text([(self.dice.uniform(0.05, 0.85), marked)])
        written = "\n".join(f"{n}: {v}" for n, v in zip(names, values))
        return {"prompt": prompt, "questions": [
            {"question": f"\n\nThe words of the table and their numbers, row by row:\n\n{names[0]}:", "answers": values,
             "continuation": written[len(names[0]) + 1:], "max_tokens": 300, "stop": "\n\n",
             "depth": round(depths[marked], 3)}]}

    def counting(self):
        """A long answer that follows from itself: what forgets its own last lines loses count."""
        first = self.dice.randrange(100, 900)
        counted = [str(n) for n in range(first, first + 60)]
        prompt, _ = self._text([(self.dice.uniform(0.05, 0.85), f"Somebody counts from {first}.")])
        return {"prompt": prompt, "questions": [
            {"question": f"\n\nCounting, one number after the other: {', '.join(counted[:3])},", "answers": counted[3:],
             "continuation": " " + ", ".join(counted[3:]), "max_tokens": 400}]}

    def classification(self):
        """40 pieces of text with the label of the text that they are from."""
        names = self.dice.sample(LABELS, len(self.haystack.texts))
        size = max(60, self.characters // 40 - 20)

        def piece(of):
            sentences = self.haystack.texts[of]
            text, at = "", self.dice.randrange(len(sentences))
            while len(text) < size:
                text += sentences[at] + " "
                at = (at + 1) % len(sentences)
            return text[:size].rsplit(" ", 1)[0]

        kinds = [i % len(names) for i in range(40)]
        self.dice.shuffle(kinds)
        shots = "".join(f"Text: {piece(kind)}\nLabel: {names[kind]}\n\n" for kind in kinds)
        asked = [self.dice.randrange(len(names)) for _ in range(4)]
        return {"prompt": shots.strip(), "questions": [
            {"question": f"\n\nText: {piece(kind)}\nLabel:", "choices": [" " + name for name in names],
             "correct": kind} for kind in asked]}

    def paraphrased(self):
        chosen = self.dice.sample(PARAPHRASES, 6)
        right = [self.dice.randrange(4) for _ in chosen]
        facts = [fact.format(answers[i]) for (fact, _, answers), i in zip(chosen, right)]
        prompt, depths = self._text(list(zip(spread(6), facts)))
        return {"prompt": prompt, "questions": [
            {"question": f"\n\nAs we know from the above: {question}", "choices": [" " + a for a in answers],
             "correct": i, "depth": round(depths[fact], 3)}
            for (_, question, answers), i, fact in zip(chosen, right, facts)]}


# Prompts of each kind at each length, by default: 96 questions where there are several a prompt.
KINDS = {"needles": 12, "multikey8": 24, "multikey32": 24, "multivalue": 24, "multiquery": 24, "passkey": 24,
         "variables": 24, "common_words": 16, "copy": 12, "lookup": 10, "classification": 12, "table": 12, "counting": 12,
         "paraphrased": 16}


def read_haystack():
    return Haystack(*[(TEXTS / name).read_text(encoding="ascii")
                      for name in ("genesis.txt", "hacker-folklore.txt", "technical.txt")])


def make(kinds, lengths, seed, characters, prompts=None):
    """The lines of the file. Each kind, length and prompt has dice of its own, so that a part of the tasks is the same
    alone and among others."""
    haystack = read_haystack()
    for kind in kinds:
        for length in lengths:
            for nth in range(KINDS[kind] if prompts is None else prompts):
                dice = random.Random(f"{seed} {kind} {length} {nth}")
                task = getattr(Maker(dice, haystack, int(length * characters)), kind)()
                yield {"group": f"{kind}, {length}", "length": length, **task}


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", help="file to write, JSON lines")
    parser.add_argument("--tasks", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="TASK",
                        help="of " + ", ".join(KINDS) + "; all by default")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096], help="tokens of a prompt, about")
    parser.add_argument("--prompts", type=int, help="of each task and length, instead of " +
                        ", ".join(f"{kind} {count}" for kind, count in KINDS.items()))
    parser.add_argument("--characters", type=float, default=4.0, help="of a token, about (default 4)")
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args(arguments)
    if min(wanted.lengths) < 256:
        parser.error(f"a length of {min(wanted.lengths)} tokens has no room for facts; give 256 or more")
    if wanted.prompts is not None and wanted.prompts < 1:
        parser.error(f"--prompts {wanted.prompts} is below 1")
    if not Path(wanted.out).absolute().parent.is_dir():
        parser.error(f"{wanted.out}: there is no folder {Path(wanted.out).parent}")
    lines = list(make(wanted.tasks, wanted.lengths, wanted.seed, wanted.characters, wanted.prompts))
    Path(wanted.out).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="ascii")
    questions = sum(len(line["questions"]) for line in lines)
    print(f"{questions} questions on {len(lines)} prompts in {wanted.out}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
