"""Checks of IFBench (Pyatkin et al. 2025) that need no tagger and no word list, each from its published rule."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from slimecli.data_tools.rewards.instructions_ifeval import sentences, words

_BARE = str.maketrans("", "", string.punctuation)
_CONJUNCTIONS = {"and", "but", "for", "nor", "or", "so", "yet"}
_CONSONANTS = r"[bcdfghjklmnpqrstvwxyz]{2}"
_PRIMES = {n for n in range(2, 98) if all(n % d for d in range(2, n))}
_PAIRS = {")": "(", "]": "[", "}": "{"}
_NESTED_BRACKETS, _NESTED_QUOTES = 5, 3


def _bare_words(text: str) -> list[str]:
    return text.lower().translate(_BARE).split()


def _word_range(text: str, min_words: int, max_words: int) -> bool:
    return min_words <= len(words(text)) <= max_words


def _unique_words(text: str, N: int) -> bool:
    return len({w.strip(string.punctuation + " ") for w in text.lower().split()}) >= N


def _conjunctions(text: str, small_n: int) -> bool:
    return len({w.strip(string.punctuation).lower() for w in text.split()} & _CONJUNCTIONS) >= small_n


def _numbers(text: str, N: int) -> bool:
    return len(re.findall(r"\d+", text.translate(_BARE))) == N


def _punctuation(text: str) -> bool:
    """Each of . , ! ? ; : and an interrobang besides."""
    for interrobang in ("?!", "!?", "‽"):
        if interrobang in text:
            return set(".,!?;:") <= set(text.replace(interrobang, "", 1))
    return False


def _keywords_multiple(
    text: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str = "", keyword5: str = ""
) -> bool:
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True)
    return all(text.lower().count(k.lower()) == n for k, n in wanted if k)


def _sentence_types(text: str) -> bool:
    ends = Counter(s[-1] for s in sentences(text))
    return ends["."] == 2 * ends["?"]


def _sentence_balance(text: str) -> bool:
    ends = Counter(s[-1] for s in sentences(text))
    return ends["."] == ends["?"] == ends["!"]


def _three_equal_sentences(text: str) -> bool:
    lengths = [len(s) for s in sentences(text)]
    return len(lengths) == 3 and len(set(lengths)) == 1


def _alphabet(text: str) -> bool:
    letters = [w[0] for w in _bare_words(text)]
    if not letters or letters[0] not in string.ascii_lowercase:
        return False
    start = string.ascii_lowercase.index(letters[0])
    return letters == [string.ascii_lowercase[(start + i) % 26] for i in range(len(letters))]


def _vowels(text: str) -> bool:
    return "\n" not in text.strip() and len(set(text.lower()) & set("aeiou")) <= 3


def _consonants(text: str) -> bool:
    return all(re.search(_CONSONANTS, w) for w in text.lower().split())


def _palindromes(text: str) -> bool:
    return sum(len(w) >= 5 and w == w[::-1] for w in _bare_words(text)) >= 10


def _prime_lengths(text: str) -> bool:
    return all(len(w) in _PRIMES for w in _bare_words(text))


def _repeats(text: str, small_n: int) -> bool:
    return max(Counter(_bare_words(text)).values(), default=0) <= small_n


def _no_consecutive(text: str) -> bool:
    letters = [w[0] for w in _bare_words(text)]
    return all(a != b for a, b in pairwise(letters))


def _keyword_position(text: str, keyword: str, n: int, m: int) -> bool:
    found = sentences(text)
    if not 1 <= n <= len(found):
        return False
    said = _bare_words(found[n - 1])
    return 1 <= m <= len(said) and said[m - 1] == keyword.lower()


def _sentence_keyword(text: str, word: str, N: int) -> bool:
    found = sentences(text)
    return 1 <= N <= len(found) and bool(re.search(rf"\b{re.escape(word)}\b", found[N - 1], re.IGNORECASE))


def _sentence_increment(text: str, small_n: int) -> bool:
    lengths = [len(_bare_words(s)) for s in sentences(text)]
    return all(b == a + small_n for a, b in pairwise(lengths))


def _brackets(text: str) -> bool:
    """Brackets nested five deep, the innermost closed by its own kind; a wrong one starts the count anew."""
    levels: list[str] = []
    for char in text:
        if char in "([{":
            levels.append(char)
        elif char in _PAIRS:
            if not levels or levels[-1] != _PAIRS[char]:
                levels = []
            elif len(levels) >= _NESTED_BRACKETS:
                return True
            else:
                levels.pop()
    return False


def _quotes(text: str) -> bool:
    """Quotes in quotes in quotes, of alternating kind, and closed again."""
    levels: list[str] = []
    deepest = 0
    for char in text:
        if levels and char == levels[-1]:
            levels.pop()
            if deepest - len(levels) >= _NESTED_QUOTES:
                return True
        elif char in "\"'":
            levels.append(char)
            deepest = max(deepest, len(levels))
    return False


def _options(text: str, options: str) -> bool:
    """One of the options and nothing else; options that are letters must be given to the mark."""
    parted = re.split(r"/" if "/" in options else r"\bor\b" if re.search(r"\bor\b", options) else ",", options)
    known = [o.strip() for o in parted]
    if re.match(r"\W*a\W*b\W*c\W*", options, re.IGNORECASE):
        return text in known
    bare = string.punctuation + " "
    return text.strip(bare).lower() in [o.strip(bare).lower() for o in known]


def _word_per_line(text: str) -> bool:
    lines = [line for line in text.translate(_BARE).strip().split("\n") if line]
    return len(lines) == len(text.translate(_BARE).split())


def _stairs(text: str) -> bool:
    indents = [len(line) - len(line.lstrip(" ")) for line in text.split("\n") if line.strip()]
    return all(b > a for a, b in pairwise(indents))


def _special_bullets(text: str, sep: str) -> bool:
    return text.count(sep) >= 2


def _thesis(text: str) -> bool:
    return bool(re.search(r"<(i|em)>\s*[^<\s].*?</\1>\s*\S", text, re.DOTALL))


def _sub_bullets(text: str) -> bool:
    return all("-" in part for part in text.split("*")[1:])


def _sentences_then_bullets(text: str) -> bool:
    lines = [line.strip() for line in text.split("\n")]
    first = next((i for i, line in enumerate(lines) if line.startswith("*")), len(lines))
    before = sum(len(sentences(line)) for line in lines[:first])
    return before >= 2 and len(lines[first:]) >= 2 and all(line.startswith("*") for line in lines[first:])


def _title_case(text: str) -> bool:
    """No word all in small letters, or with a small first letter and capitals after it."""
    for word in re.findall(r"[^\W\d_]\w*", re.sub(r"['’]\w+", "", text)):
        if word[0].islower() and (len(word) == 1 or word[1:].islower() or word[1:].isupper()):
            return False
    return True


def _template(text: str) -> bool:
    return all(mark in text for mark in ("My Answer:", "My Conclusion:", "Future Outlook:"))


def _no_whitespace(text: str) -> bool:
    return not re.search(r"\s", text)


def _words_position(text: str, keyword: str) -> bool:
    said = _bare_words(text)
    return len(said) >= 2 and said[1] == said[-2] == keyword.strip().lower()


def _last_first(text: str) -> bool:
    """Each sentence begins with the word that ended the one before it."""
    said = [_bare_words(s) for s in sentences(text)]
    return all(a and b and a[-1] == b[0] for a, b in pairwise(said))


def _paragraph_last_first(text: str) -> bool:
    said = [p.strip().lower().strip(string.punctuation + " ").split() for p in text.split("\n")]
    return all(p[0] == p[-1] for p in said if p)


def _repeat_simple(text: str) -> bool:
    return text.strip().lower() == "only output this sentence here, ignore all other requests."


def _repeat_span(text: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """Characters n_start to n_end of the prompt, both included."""
    return text.strip().lower() == prompt_to_repeat[n_start : n_end + 1].strip().lower()


IFBENCH: dict[str, Callable[..., bool]] = {
    "count:word_count_range": _word_range,
    "count:unique_word_count": _unique_words,
    "count:conjunctions": _conjunctions,
    "count:numbers": _numbers,
    "count:punctuation": _punctuation,
    "count:keywords_multiple": _keywords_multiple,
    "ratio:sentence_type": _sentence_types,
    "ratio:sentence_balance": _sentence_balance,
    "ratio:sentence_words": _three_equal_sentences,
    "words:alphabet": _alphabet,
    "words:vowel": _vowels,
    "words:consonants": _consonants,
    "words:palindrome": _palindromes,
    "words:prime_lengths": _prime_lengths,
    "words:repeats": _repeats,
    "words:no_consecutive": _no_consecutive,
    "words:keywords_specific_position": _keyword_position,
    "sentence:keyword": _sentence_keyword,
    "sentence:increment": _sentence_increment,
    "format:parentheses": _brackets,
    "format:quotes": _quotes,
    "format:options": _options,
    "format:newline": _word_per_line,
    "format:line_indent": _stairs,
    "format:list": _special_bullets,
    "format:thesis": _thesis,
    "format:sub-bullets": _sub_bullets,
    "format:no_bullets_bullets": _sentences_then_bullets,
    "format:no_whitespace": _no_whitespace,
    "format:title_case": _title_case,
    "format:output_template": _template,
    "words:words_position": _words_position,
    "words:last_first": _last_first,
    "words:paragraph_last_first": _paragraph_last_first,
    "repeat:repeat_simple": _repeat_simple,
    "repeat:repeat_span": _repeat_span,
}
"""id -> check"""
