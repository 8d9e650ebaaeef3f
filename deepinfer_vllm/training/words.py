"""The words that texts are made of."""

CITIES = (
    "Paris",
    "Berlin",
    "London",
    "Rome",
    "Oslo",
    "Madrid",
    "Lisbon",
    "Vienna",
    "Prague",
    "Athens",
    "Dublin",
    "Warsaw",
)
NAMES = ("Ann", "Bob", "Carl", "Dora", "Emil", "Fay", "Gus", "Hanna", "Ivan", "June", "Karl", "Lena", "Max", "Nora")
ANIMALS = ("fox", "dog", "cat", "horse", "crow", "mouse", "bear", "wolf", "hen", "goat")
PLACES = ("river", "wood", "hill", "house", "sea", "city", "garden", "bridge", "market", "mill")
COLOURS = ("red", "blue", "green", "brown", "white", "black", "grey")
MOODS = ("lazy", "quick", "tall", "young", "small", "large", "quiet", "clever")
VERBS = ("walked", "looked", "came", "went", "ran", "jumped", "turned", "moved")
TIMES = ("In the morning", "At night", "One day", "After a week", "Before the winter", "Late in the evening")
SAYINGS = (
    "there is nothing else to do",
    "the sun is shining again",
    "we should wait for the others",
    "nobody knows where the water goes",
    "it is not far from here",
)
THINGS = ("apples", "books", "lamps", "chairs", "stones", "coins", "maps", "boats", "rings", "keys", "shoes", "bells")
NOUNS = ("item", "user", "order", "number", "word", "line", "price", "city", "value", "name")
FUNCTIONS = ("count", "sum", "find", "check", "read", "clean", "merge", "sort")
