"""What each script gets: the endpoint, the API to speak, two questions, and a tool that answers them."""

import os

API, API_KEY, BASE_URL, MODEL = (os.environ[name] for name in ("API", "API_KEY", "BASE_URL", "MODEL"))
SYSTEM = "Add with the tool."
QUESTIONS = "What is 2 + 3 + 4?", "And 1 more?"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b
