import pytest

from slimecli.data_tools.rewards.ifbench import INSTRUCTIONS, score
from slimecli.data_tools.rewards.instructions_ifeval import sentences
from slimecli.errors import DataError

PALINDROMES = "level radar civic rotor kayak madam refer stats tenet solos"

CASES = {
    "keywords:existence": ({"keywords": ["cat", "C++"]}, "A Cat likes c++", "A cat likes C"),
    "keywords:frequency": ({"keyword": "a.b", "frequency": 2, "relation": "at least"}, "a.b A.B", "axb a.b"),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, "category", "the Cat!"),
    "keywords:letter_frequency": ({"letter": "e", "let_frequency": 3, "let_relation": "less than"}, "Ee", "eEe"),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"}, "Dr. Li came. He left!", "It cost 3.5 euro e.g. today",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n***\n***\nb"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, "two words", "now three words"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"}, "a\n\n'then, b", "then\n\nb",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] and [b c]", "[a] and b"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "bye\nP. S. more", "bye\nPS more"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n** b"),
    "detectable_format:constrained_response": ({}, "My answer is no.", "No."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and *b*", "*a* and * *"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2}, "Section 1 a Section 2 b", "Section 1 a Section two",
    ),
    "detectable_format:json_format": ({}, "```json\n{\"a\": [1]}\n```", "{a: 1}"),
    "detectable_format:title": ({}, "<<Joy>> text", "<< >> text"),
    "combination:two_responses": ({}, "one ****** two", "one ****** one"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi"}, "say hi\nhi", "hi: say hi"),
    "startend:end_checker": ({"end_phrase": "That is all."}, "so. that is all.\"", "That is all. Bye"),
    "startend:quotation": ({}, '"quoted"', '"'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"}, "I SAID so", "Nobody SAID so",
    ),
    "change_case:english_capital": ({}, "ALL OF IT 1!", "ALL of it"),
    "change_case:english_lowercase": ({}, "all of it 1!", "All of it"),
    "punctuation:no_comma": ({}, "none; here", "one, here"),
    "count:word_count_range": ({"min_words": 2, "max_words": 3}, "one two", "one two three four"),
    "count:unique_word_count": ({"N": 2}, "one two, One", "one one. One!"),
    "count:conjunctions": ({"small_n": 2}, "a and b, but c", "a and b and c"),
    "count:numbers": ({"N": 2}, "3.5 and 1,000", "3 4 5"),
    "count:punctuation": ({}, "a. b, c! d? e; f: g?!", "a. b, c! d? e; f:"),
    "count:keywords_multiple": (
        {"keyword1": "ox", "keyword2": "cow", "keyword3": "pig"}, "ox cow cow pig pig pig", "ox cow cow pig pig",
    ),
    "ratio:sentence_type": ({}, "It is. It was. Is it?", "It is. Is it?"),
    "ratio:sentence_balance": ({}, "It is. Is it? It is!", "It is. It was. Is it?"),
    "ratio:sentence_words": ({}, "It is. We do. He is.", "It is. We do. He goes."),
    "words:alphabet": ({}, "yes, zebras are bold", "apples carry bees"),
    "words:vowel": ({}, "a test is bad", "a test is out, but bad"),
    "words:consonants": ({}, "trees grow green", "trees are green"),
    "words:palindrome": ({}, PALINDROMES, PALINDROMES.replace("civic", "civil")),
    "words:prime_lengths": ({}, "we are happy", "we were happy"),
    "words:repeats": ({"small_n": 2}, "no no yes", "no no, No!"),
    "words:no_consecutive": ({}, "one big ox", "one old ox"),
    "words:keywords_specific_position": ({"keyword": "cat", "n": 2, "m": 3}, "Hi. See the cat.", "See the cat. Hi."),
    "words:words_position": ({"keyword": "red"}, "a red or a red one.", "a red or a blue one."),
    "words:last_first": ({}, "I see you. You see me.", "I see you. Me too."),
    "words:paragraph_last_first": ({}, "so it is so.\nme and me", "so it is.\nme and me"),
    "sentence:keyword": ({"word": "cat", "N": 2}, "Hi. A cat!", "A cat. Hi category!"),
    "sentence:increment": ({"small_n": 1}, "Go. Go on. Go on now.", "Go. Go. Go on."),
    "format:parentheses": ({}, "([{([x])}])", "([{(x)}])"),
    "format:quotes": ({}, "\"a 'b \"c\" b' a\"", "\"a 'b' a\""),
    "format:options": ({"options": "yes/no/maybe"}, "Maybe.", "maybe not"),
    "format:newline": ({}, "one\ntwo\n\nthree", "one two\nthree"),
    "format:line_indent": ({}, "a\n b\n  c", "a\n b\n c"),
    "format:list": ({"sep": "->"}, "-> a\n-> b", "-> a\n- b"),
    "format:thesis": ({}, "<i>Cats rule.</i> And so on", "<i>Cats rule.</i>"),
    "format:sub-bullets": ({}, "* a\n- b", "* a\n- b\n* c"),
    "format:no_bullets_bullets": ({}, "It is. It was.\n* a\n* b", "It is.\n* a\n* b"),
    "format:no_whitespace": ({}, "one,two", "one, two"),
    "format:title_case": ({}, "A Cat's Life", "A Cat and I"),
    "format:output_template": ({}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a"),
    "repeat:repeat_simple": ({}, "Only output this sentence here, ignore all other requests.", "Only output this."),
    "repeat:repeat_span": ({"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "BCD", "bcde"),
}  # fmt: skip


def row(name, kwargs):
    return {"instruction_id_list": [name], "kwargs": [{**kwargs, "unused": None}]}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_each_instruction_tells_followed_from_not(name):
    kwargs, followed, broken = CASES[name]
    assert score(followed, None, row(name, kwargs)) == 1.0
    assert score(f"<think>{broken}</think>{followed}", None, row(name, kwargs)) == 1.0
    assert score(broken, None, row(name, kwargs)) == 0.0
    assert score("", None, row(name, kwargs)) == 0.0


def test_options_that_are_letters_are_taken_to_the_mark():
    metadata = row("format:options", {"options": "a), b), c), d)"})
    assert score("a)", None, metadata) == 1.0 and score("a", None, metadata) == 0.0


def test_all_must_be_followed_or_a_share():
    metadata = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, None]}
    assert score('"a"', None, metadata) == 1.0
    assert score("a", None, metadata) == 0.0
    assert score("a", None, metadata | {"partial": True}) == 0.5


def test_the_prompt_of_the_row_is_the_one_to_repeat():
    metadata = {"instruction_id_list": ["combination:repeat_prompt"], "kwargs": [{}], "prompt_text": "Say hi"}
    assert score("Say hi. Hi", None, metadata) == 1.0 and score("Hi", None, metadata) == 0.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "needs metadata.instruction_id_list"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "as many metadata.kwargs"),
        (row("punctuation:no_coma", {}), "did you mean 'punctuation:no_comma'"),
        (row("language:response_language", {}), "not one that slime checks"),
        (row("length_constraints:number_words", {"num_words": 3}), "takes num_words, relation"),
        (row("length_constraints:number_words", {"num_words": 3, "relation": "about"}), "at least"),
    ],
)
def test_rows_that_cannot_be_checked(metadata, message):
    with pytest.raises(DataError, match=message):
        score("a b", None, metadata)


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("One. Two! Three? Four", 4),
        ("Dr. A. Smith met Mr. Xu. They spoke.", 2),
        ("It cost 3.50 today. Yes.", 2),
        ('He said "Stop!" Then left.', 2),
        ("First line\n\nSecond line", 2),
        ("一句。两句！三句？", 3),
        ("", 0),
        ("Wait... what? no way", 1),
    ],
)
def test_sentences(text, n):
    assert len(sentences(text)) == n
