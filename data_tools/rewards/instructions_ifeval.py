"""The checks of IFEval (Zhou et al. 2023), each from its published rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])[\"')\]*_]*\s+(?![a-z])|\n{2,}|(?<=[。！？])")
_ABBREVIATIONS = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|No|Inc|Ltd|Co|[A-Z])\.$")


def words(text: str) -> list[str]:
    """Runs of word characters."""
    return re.findall(r"\w+", text)


def sentences(text: str) -> list[str]:
    """Sentences, told by the mark that ends them; titles and initials do not end one."""
    found: list[str] = []
    open_part = ""
    for part in _SENTENCE_END.split(text):
        open_part = f"{open_part} {part}".strip() if open_part else part.strip()
        if open_part and not _ABBREVIATIONS.search(open_part):
            found.append(open_part)
            open_part = ""
    return [*found, open_part] if open_part else found


def compare(number: int, relation: str, limit: int) -> bool:
    """`less than` or `at least`."""
    if relation not in ("less than", "at least"):
        raise TypeError(f"relation is {relation!r}, not `less than` or `at least`")
    return number < limit if relation == "less than" else number >= limit


def _keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(re.escape(k), text, re.IGNORECASE) for k in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return compare(len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE)), relation, frequency)


def _forbidden(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(w)}\b", text, re.IGNORECASE) for w in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return compare(len(sentences(text)), relation, num_sentences)


def _number_words(text: str, num_words: int, relation: str) -> bool:
    return compare(len(words(text)), relation, num_words)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs divided by ***; an empty one may only be the first or last."""
    parts = [bool(p.strip()) for p in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(parts) == num_paragraphs


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = text.split("\n\n")
    filled = sum(bool(p.strip()) for p in parts)
    if filled != num_paragraphs or not 1 <= nth_paragraph <= filled or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    marker = postscript_marker.strip()
    return bool(re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()))


def _bullets(text: str, num_bullets: int) -> bool:
    stars = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == num_bullets


def _constrained(text: str) -> bool:
    return any(option in text for option in _OPTIONS)


def _highlights(text: str, num_highlights: int) -> bool:
    single = [h for h in re.findall(r"\*[^\n*]*\*", text) if h.strip("*").strip()]
    double = [h for h in re.findall(r"\*\*[^\n*]*\*\*", text) if h.strip("*").strip()]
    return len(single) + len(double) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)) >= num_sections


def _json(text: str) -> bool:
    body = re.sub(r"^```(?:json|Json|JSON)?", "", text.strip()).removesuffix("```")
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def _title(text: str) -> bool:
    return any(t.lstrip("<").rstrip(">").strip() for t in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str) -> bool:
    parts = [p.strip() for p in text.split("******")]
    filled = [p for p in parts if p]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return compare(sum(w.isupper() for w in words(text)), capital_relation, capital_frequency)


def _upper(text: str) -> bool:
    return text.isupper()


def _lower(text: str) -> bool:
    return text.islower()


def _no_comma(text: str) -> bool:
    return "," not in text


IFEVAL: dict[str, Callable[..., bool]] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": _number_words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _upper,
    "change_case:english_lowercase": _lower,
    "punctuation:no_comma": _no_comma,
}
"""id -> check. `english_capital` and `english_lowercase` check the case alone, not the language."""
