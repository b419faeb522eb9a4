"""Derive names of runs, queues, runtimes, Jobs and files from user input, within the limits of a service, and make
random names."""

import hashlib
import json
import random
import re

_DIGEST_CHARS = 10
# A program may seed the generator of the module, and would then repeat names.
_random = random.Random()  # noqa: S311


def derived_name(text: str, characters: str, max_chars: int, *, separator: str = "-", of: object = None) -> str:
    """Return `text` if it is a valid name, or else its valid characters and a digest of it.

    A valid name has at most `max_chars` of these `characters`, the content of a regular expression's set, and begins
    and ends with a letter or digit. `of` is the object that the name identifies, if it is more than the text: the
    name then always has a digest. Different strings get different names, because a string that ends like a digest
    gets one, too.
    """
    is_valid = re.fullmatch(f"(?=[A-Za-z0-9])[{characters}]{{1,{max_chars}}}(?<=[A-Za-z0-9])", text)
    if of is None and is_valid and not re.search(f"{separator}[0-9a-f]{{{_DIGEST_CHARS}}}$", text):
        return text
    digest = hashlib.sha256(json.dumps(text if of is None else of).encode()).hexdigest()[:_DIGEST_CHARS]
    readable = re.sub(f"[^{characters}]+", separator, text if "A-Z" in characters else text.lower())
    readable = readable.lstrip("._-")[: max_chars - _DIGEST_CHARS - 1].rstrip("._-") or "unnamed"
    return f"{readable}{separator}{digest}"


def random_name() -> str:
    """Return 32 random hexadecimal digits. They are not secret.

    `uuid4` makes a system call, which releases the GIL. An event loop then waits until a busy thread releases it.
    """
    return f"{_random.getrandbits(128):032x}"
