"""Training prompts for `real_train.py`: questions like those of `real_prompts.py`, but about other subjects.

Chats combine every sentence of a table with every word of its row. Texts that repeat the prompt are docstrings and
sources of Python's standard library, so they depend on Python's version.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator

import numpy as np
import real_prompts

MODULES = """
    argparse asyncio base64 bisect calendar collections concurrent.futures configparser contextlib copy csv
    datetime decimal difflib email.utils fractions functools glob gzip hashlib heapq html http.client inspect io
    itertools json logging math operator os os.path pathlib pickle pprint queue random re shutil socket sqlite3
    statistics string subprocess tempfile textwrap threading time unittest urllib.parse uuid zipfile
"""
ASKING = (
    "Explain in your own words what `{name}` does. Its documentation says: {text}",
    "Give a short example in Python that uses `{name}`: {text}",
    "Summarize this text in its own words and phrases:\n\n{text}",
    "Correct the spelling mistakes in this text, and repeat the whole of it:\n\n{text}",
    "When would one use `{name}`? {text}",
)
EDITING = ("Add type annotations to this function.", "Add a comment to this function.", "Rename the first argument.")
EDIT = "{what} Answer with the whole function and nothing else.\n\n```python\n{source}\n```"
LONGEST, SOURCE = 300, 600  # length in characters of a docstring, and of a source

TABLE: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Why {}?", "Explain to a ten-year-old why {}.", "Can you tell me in a few sentences why {}?"),
        """leaves turn red in autumn; ice floats on water; cats purr; the moon has phases; onions make us cry; metal
        feels colder than wood; we dream; bread rises; birds fly south in winter; salt melts ice; stars twinkle; popcorn
        pops; volcanoes erupt; we yawn; the days are longer in summer; iron rusts; bees make honey; thunder follows
        lightning; deserts are cold at night; dogs wag their tails; soap cleans; some people are left-handed; flamingos
        are pink; rivers bend; we have leap years; batteries run out; milk turns sour; wine is kept in the dark""",
    ),
    (
        ("How does {} work?", "Explain how {} works to a child.", "What is {}, and what is it used for?",
         "What are the parts of {}, and what does each do?"),
        """a refrigerator; a microscope; a sewing machine; a windmill; a camera; a submarine; a piano; a vaccine; a
        search engine; a hot-air balloon; a compass; a telescope; a solar panel; a zip; a lift; a pressure cooker; a
        hearing aid; a pendulum clock; a printer; a suspension bridge; a touch screen; a steam engine; a parachute; a
        thermometer; a lighthouse; a barcode; a wind instrument; a washing machine; a credit card; a helicopter""",
    ),
    (
        ("Explain {} to a beginner.", "What is {}? Give an example.", "Give a short definition of {}.",
         "Give me three facts about {}."),
        """gravity; photosynthesis; inflation; democracy; evolution; a prime number; supply and demand; binary search;
        a hash table; an algorithm; the water cycle; electricity; probability; a black hole; natural selection; a loop
        in programming; an object in programming; sorting; encryption; machine learning; plate tectonics; the greenhouse
        effect; a metaphor; irony; compound interest; the placebo effect; an ecosystem; a fraction; friction; osmosis;
        the internet; a database; version control; the immune system; a neural network; the speed of light""",
    ),
    (
        ("What should I see in {} in three days?", "Tell me about {}.", "What is {} famous for?",
         "Write a short guide for visitors of {}.", "What food should one try in {}?"),
        """Lisbon; Kyoto; Prague; Istanbul; Edinburgh; Mexico City; Cairo; Vienna; Barcelona; Buenos Aires; Marrakesh;
        Amsterdam; Seoul; New Orleans; Athens; Copenhagen; Havana; Singapore; Dublin; Krakow; Vancouver; Cape Town;
        Florence; Bangkok; Reykjavik; Chicago""",
    ),
    (
        ("What is the capital of {}, and what is it known for?", "What is the population of {}?",
         "Which countries are next to {}?"),
        """Canada; Brazil; Turkey; Kenya; Switzerland; New Zealand; Morocco; Vietnam; Finland; Peru; Hungary; Nigeria;
        Pakistan; Norway; Chile; Kazakhstan; Poland; Indonesia; Ireland; South Korea; Bolivia; Tanzania""",
    ),
    (
        ("Who was {}?", "Who was {}, and what did they do?", "What is {} known for?", "Write a short biography of {}."),
        """Marie Curie; Isaac Newton; Leonardo da Vinci; Florence Nightingale; Galileo Galilei; Grace Hopper; Alan
        Turing; Frida Kahlo; Nelson Mandela; Charles Darwin; Cleopatra; Johannes Kepler; Rosa Parks; Ludwig van
        Beethoven; Jane Austen; Nikola Tesla; Amelia Earhart; Louis Pasteur; Hypatia; Marco Polo; Katherine Johnson;
        William Shakespeare; Emmy Noether; Charles Babbage; Joan of Arc; Gutenberg""",
    ),
    (
        ("Give me three tips for {}.", "How do I get better at {}?", "What do I need to know about {}?",
         "Make a plan of one week for {}.", "What mistakes do beginners make when {}?"),
        """sleeping better; saving money; learning to swim; growing tomatoes; speaking in public; playing the guitar;
        taking photographs; cooking rice; running ten kilometres; writing clearly; remembering names; drawing faces;
        training a puppy; studying for exams; packing a suitcase; baking bread; learning chess; job interviews; keeping
        a diary; reading more books; painting a room; managing time; hiking in the mountains; programming in Python""",
    ),
    (
        ("How do I make {}?", "Write a recipe for {}.", "What do I need for {}?"),
        """pancakes; vegetable soup; a green salad; lemonade; scrambled eggs; an apple pie; tomato sauce; green tea; a
        cheese sandwich; fried rice; chocolate cake; guacamole; roast potatoes; a fruit smoothie; lentil curry; pizza
        dough; hot chocolate; mashed potatoes; oatmeal; a paper boat; a candle; a kite""",
    ),
    (
        ("What are the pros and cons of {}?", "What are the advantages of {}?", "Is {} a good idea? Why, or why not?"),
        """living in a big city; electric cars; school uniforms; owning a dog; social media; nuclear power; travelling
        alone; buying a house; online shopping; a vegetarian diet; night shifts; studying abroad; open-plan offices;
        paper books; starting a business; living with friends; public transport; a four-day week; homework; tourism""",
    ),
    (
        ("Write a short poem about {}.", "Tell me a story about {}.", "Write a haiku about {}.",
         "Write the first paragraph of a novel about {}.", "Describe {} in three sentences."),
        """the moon; a dragon who is afraid of fire; an old tree; the first day of snow; a robot in a garden; a silent
        village; the wind; a clever fox; friendship; a broken clock; a train at night; my grandmother; a letter that
        arrives late; spring; a cat on the roof; a forgotten island; rain in the city; a shy giant; a market; autumn; a
        painter without colours; the desert; a small boat; a teacher; a hidden door; music""",
    ),
    (
        ("Write an e-mail that asks {}.", "Write a polite letter that asks {}.",
         "Write a short message that tells {}."),
        """my boss for a day off; a shop to take back a jacket; my neighbour to be quieter at night; a professor for a
        meeting; a friend to feed my fish; a hotel for a quiet room; my colleague for the figures of last month; the
        bank about a missing payment; a school for its timetable; the library to keep a book for me; my team about the
        new schedule; a customer that the parcel is late; an airline about a lost bag; my aunt how the holiday was""",
    ),
    (
        ("What is the difference between {}?", "Compare {}.", "How do I choose between {}?"),
        """a frog and a toad; tea and herbal tea; weather and climate; a list and a tuple in Python; a virus and a
        bacterium; a lake and a pond; jam and jelly; a comet and an asteroid; a violin and a viola; a novel and a short
        story; butter and margarine; a crocodile and an alligator; RAM and a hard disk; HTTP and HTTPS; a stack and a
        queue; mean and median; a bus and a tram; a simile and a metaphor; running and walking; cats and dogs""",
    ),
    (
        ("Write a Python function that {}.", "Write a short program that {}, and explain it.", "In Python, what {}?"),
        """reverses a string; counts the words of a text; finds the largest number of a list; checks whether a number is
        prime; reads a file line by line; removes duplicates from a list; sorts a dictionary by its values; computes
        the factorial of a number; converts Celsius to Fahrenheit; merges two sorted lists; checks for a palindrome;
        adds two matrices; downloads a page; prints a calendar; flattens a list of lists; rolls two dice""",
    ),
)  # fmt: skip


def chats() -> list[str]:
    """Every sentence with every word, with normalized white space."""
    return [
        sentence.format(" ".join(word.split()))
        for told, words in TABLE
        for word in words.split(";")
        for sentence in told
    ]


def _callables() -> Iterator[tuple[str, Callable[..., object]]]:
    for module in MODULES.split():
        for name, one in sorted(vars(importlib.import_module(module)).items()):
            if callable(one) and not name.startswith("_"):
                yield f"{module}.{name}", one


def _source(function: Callable[..., object]) -> str:
    try:
        return inspect.getsource(function).strip()
    except OSError:  # generated at run time
        return ""


def texts() -> list[str]:
    """A prompt for each distinct docstring, and one for each function with a short source."""
    said: dict[str, str] = {}
    sources: dict[str, None] = {}
    for name, one in _callables():
        text = inspect.getdoc(one)
        if text and len(text) > 40:
            said.setdefault(" ".join(text.split())[:LONGEST], name)
        if inspect.isfunction(one) and 0 < len(source := _source(one)) <= SOURCE:
            sources[source] = None
    asked = [ASKING[n % len(ASKING)].format(name=name, text=text) for n, (text, name) in enumerate(said.items())]
    return asked + [EDIT.format(what=EDITING[n % 3], source=source) for n, source in enumerate(sources)]


def lessons(seed: int, share: float = 0.2) -> list[str]:
    """All chats, plus texts up to this share, in a seeded order, without any prompt that is measured."""
    rng = np.random.default_rng(seed)
    measured = {prompt.text for ask in real_prompts.KINDS.values() for prompt in ask()}
    told = [text for text in chats() if text not in measured]
    other = [text for text in texts() if text not in measured]
    rest = rng.permutation(len(other))[: round(len(told) * share / (1 - share))]
    asked = told + [other[place] for place in rest]
    return [asked[place] for place in rng.permutation(len(asked))]
