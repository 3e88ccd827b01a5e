"""The questions the embedded model is trained on and tested with (standard library only).

Every question asks for the sum of two whole numbers from 0 to 99, in digits, in words, or mixed. "What is twenty-three
plus 45?" is answered "23 + 45 = 68, sixty-eight.": first the question again in digits and then the sum, in digits and
in words, so that the model takes one small step at a time. One pair of numbers in ten is held out: training never
shows it, in either order and in any phrasing, so right answers there show that the model adds, not remembers.
"""

import hashlib
import random

LARGEST = 99
INTRODUCTION = "I am a tiny model that adds two numbers from 0 to 99. Ask me: What is 23 + 45?"  # to anything else

# fmt: off
_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_PHRASINGS = [  # (question without its closing mark, closing mark)
    ("What is {a} + {b}", "?"), ("What is {a} plus {b}", "?"), ("What is {a} and {b}", "?"),
    ("What's {a} + {b}", "?"), ("What's {a} plus {b}", "?"), ("What does {a} plus {b} make", "?"),
    ("How much is {a} + {b}", "?"), ("How much is {a} plus {b}", "?"), ("How much is {a} and {b}", "?"),
    ("What is the sum of {a} and {b}", "?"), ("Can you add {a} and {b}", "?"), ("Add {a} and {b}", "."),
    ("Add {a} to {b}", "."), ("Calculate {a} + {b}", "."), ("Compute {a} plus {b}", "."), ("{a} + {b}", ""),
    ("{a} plus {b}", ""), ("{a}+{b}", ""), ("{a} + {b} =", ""), ("{a} + {b} = ?", ""), ("{a} and {b}", "")]
_OPENINGS = ["Hello! ", "Hi, ", "Please tell me: ", "Now ", "And ", "Quick question: ", "OK. "]
_SMALL_TALK = """Hello|Hello!|Hello, world!|Hi|Hi there!|Hey|Good morning|Good evening!|How are you?
Are you a robot?|Help|How are you doing today?|Who are you?|What are you?|What is your name?|What's your name?
introduce yourself|Thanks!|No|Please introduce yourself.|Tell me about yourself.|What can you do?
What can you do for me?|How can you help me?|Yes|OK|Can you help me?|Thank you.|Bye|Goodbye!|Tell me a joke.
Tell me a story.|Write a poem.|Do you like music?|Test|What?|list all prime numbers within 100
List all prime numbers below 50.|What is the capital of France?|Summarize this text.|The capital of France is
Why is the sky blue?|What is the weather like today?|Explain how a computer works.|Who is he?
What is a language model?|How does a language model work?|What is the meaning of life?|Once upon a time
Give me a number.|Translate this sentence into German.|Who wrote this book?|What time is it?|Can you count to ten?
Sing a song for me.""".replace("\n", "|").split("|")
_OTHER_TASKS = ["What is {a} - {b}?", "What is {a} minus {b}?", "What is {a} times {b}?", "{a} * {b}", "{a} / {b}",
                "{a} minus {b}", "What is {a}?", "{a}", "What is {a} divided by {b}?", "Subtract {a} from {b}."]
_SYSTEM_MESSAGES = ["You are a helpful assistant.", "You are a friendly assistant.", "You add two numbers.",
                    "Answer in one short sentence.", "You are a careful assistant. Think before you answer."]
# fmt: on


def number_words(n: int) -> str:
    """Spells a number from 0 to 199: 68 -> sixty-eight, 105 -> one hundred and five."""
    if n >= 100:
        return "one hundred" + (f" and {number_words(n - 100)}" if n > 100 else "")
    return _ONES[n] if n < 20 else _TENS[n // 10] + (f"-{_ONES[n % 10]}" if n % 10 else "")


def answer(a: int, b: int) -> str:
    """The one right answer, whatever the phrasing of the question."""
    return f"{a} + {b} = {a + b}, {number_words(a + b)}."


def is_held_out(a: int, b: int) -> bool:
    """A hash rather than a random draw: the split needs no seed and no list, and (b, a) goes with (a, b)."""
    return int(hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).hexdigest()[:8], 16) % 10 == 0


def question(a: int, b: int, rng: random.Random) -> str:
    """One random phrasing of the sum, with small variations in case and punctuation."""
    a_in_words, b_in_words = rng.choice([(0, 0), (0, 0), (1, 1), (1, 1), (0, 1), (1, 0)])
    hyphen = "-" if rng.random() < 0.85 else " "
    text, mark = rng.choice(_PHRASINGS)
    text = text.format(
        a=number_words(a).replace("-", hyphen) if a_in_words else a,
        b=number_words(b).replace("-", hyphen) if b_in_words else b,
    )
    if rng.random() < 0.1:
        text = rng.choice(_OPENINGS) + text[0].lower() + text[1:]
    text = rng.choices([text, text[0].upper() + text[1:], text.lower(), text.upper()], [50, 25, 20, 5])[0]
    return text + (mark if rng.random() < 0.8 else rng.choice(["", "?", ".", " ?", "!"]))


def completion(a: int, b: int, rng: random.Random) -> tuple[str, str]:
    """A plain prompt without chat markers, and how it goes on: an open equation is finished, not repeated."""
    text = question(a, b, rng)
    if rng.random() < 0.3 and not text.endswith("="):
        return text, " " + answer(a, b)
    return f"{a} + {b} =" if rng.random() < 0.8 else f"{a}+{b}=", f" {a + b}, {number_words(a + b)}."


def held_out_questions(seed: int = 0, plain: bool = False) -> list[tuple[str, str]]:
    """(question, answer), or (plain prompt, completion), for every held-out pair, in a fixed random order."""
    rng, numbers = random.Random(seed), range(LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers if is_held_out(a, b)]
    return [
        completion(a, b, rng) if plain else (question(a, b, rng), answer(a, b))
        for a, b in rng.sample(pairs, len(pairs))
    ]


def training_example(rng: random.Random) -> list[dict[str, str]] | tuple[str, str]:
    """A conversation (a list of messages) or, one time in four, a (plain prompt, completion) pair."""

    def pair() -> tuple[int, int]:
        # Numbers of one digit would be too rare to learn if every number were as likely.
        a, b = (rng.randint(0, 9 if rng.random() < 0.2 else LARGEST) for _ in range(2))
        return pair() if is_held_out(a, b) else (a, b)

    if rng.random() < 0.25:
        return completion(*pair(), rng) if rng.random() < 0.95 else (_other_message(rng), " " + INTRODUCTION)
    messages = []
    if rng.random() < 0.15:
        # Some system messages ramble, so that the model learns to look past whatever stands before the question.
        ramble = " ".join(rng.choices(" ".join(_SMALL_TALK + _SYSTEM_MESSAGES).split(), k=rng.randint(3, 40)))
        messages = [{"role": "system", "content": rng.choice([rng.choice(_SYSTEM_MESSAGES), ramble])}]
    for _ in range(rng.choices([1, 2, 3], [70, 15, 15])[0]):
        a, b = pair()
        user, assistant = question(a, b, rng), answer(a, b)
        if rng.random() < 0.08:
            user, assistant = _other_message(rng), INTRODUCTION
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return messages


def _other_message(rng: random.Random) -> str:
    """Small talk, another task, or numbers too large: nothing that the model was made to answer."""
    a, b = rng.sample(range(LARGEST + 1), 2)
    task = rng.choice(_OTHER_TASKS)
    task = task.format(a=number_words(a), b=number_words(b)) if rng.random() < 0.5 else task.format(a=a, b=b)
    large = rng.sample([rng.randint(LARGEST + 1, 9999), rng.randint(0, 9999)], 2)
    too_large = rng.choice(["What is {} + {}?", "{} + {}", "{} plus {}"]).format(*large)
    small_talk = rng.choice(_SMALL_TALK)
    return rng.choices([small_talk, small_talk.lower().rstrip("?!."), task, too_large], [40, 20, 20, 20])[0]
