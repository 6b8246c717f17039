"""Choices that depend on a text and on nothing else."""

import random


class Dice:
    """Random choices, the same for the same text on every machine."""

    def __init__(self, text):
        self._random = random.Random(text)
        self.uniform = self._random.random

    def chance(self, probability):
        return self._random.random() < probability

    def between(self, first, last):
        return self._random.randint(first, last)

    def below(self, end):
        return self._random.randrange(end)

    def choice(self, values):
        return self._random.choice(values)

    def weighted(self, weights):
        """One of the keys; each as likely as its value says."""
        return self._random.choices(list(weights), list(weights.values()))[0]

    def weighted_call(self, weights):
        return {"call": self.weighted(weights)}
