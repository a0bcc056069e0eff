"""Pages and docstrings are plain: short sentences in the order subject, verb, object, without turns of phrase that need two readings."""

from __future__ import annotations

import ast
import re
import statistics

from pages import BENCHMARKS, PAGES, ROOT
from pieces import over

MEAN, LONGEST = 16, 35  # words in a sentence
# A pattern of prose in lower case, and what to write in its place.
PUZZLES = {
    r"(?:^|[.:;] )who (?![^.]*\?)": "name who does it: a replica, a member, you",
    r"(?:^|[.;] )of (?!course|\w+ [^.]*\d)": "begin with the subject",
    r"(?:^|[.;,:] )else\b": "otherwise",
    r"(?:^|[.;] )(?:in|on|to) what\b": "begin with the subject",
    r"\b(?:whoever|whosoever|nobody would|anybody whom)\b": "name who does it",
    r", for (?:it|they|he|all|these|those|there|a|the \w+ (?:is|are|has|have))\b": "because",
    r"\bis to be \w+ed\b": "must be, or say who does it",
    r"\b(?:go|goes|went) on (?:from|as|with|without|beside|meanwhile)\b": "continue, resume, start from",
    r"\bof (?:its|one's|your|their) own (?:make|kind)\b": "your own",
    r"\b(?:a loop|a file|a piece|pieces) of (?:your|the user's|one's) own\b": "your own loop",
    r"\b(?:thereby|therein|thereof|whence|hence|lest|albeit|betwixt|ere)\b": "so, because, if",
    r"\bas ever\b|\bbut for\b|\bsave for\b": "always, except",
}


def prose(text: str) -> list[str]:
    """Returns the sentences of a page, without code, tables, headings, equations and generated blocks."""
    text = re.sub(r"^(?:```.*?^```|<!-- .*?<!-- end -->)", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = "\n".join(line for line in text.splitlines() if not re.match(r"\||    \S|#|!\[|<!--", line))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # keep the words of a link
    text = re.sub(r"`[^`]*`", "code", text)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+] |\d+\. ))", text):
        words = re.sub(r"^\s*(?:[-*+]|\d+\.) |\*+", "", " ".join(block.split()))
        found += re.split(r"(?<=[.!?])\s+(?=\W?[A-ZΑ-Ω\d]|\W?[a-zα-ω]+\b)", words)
    return [sentence for sentence in found if re.search(r"[a-z]", sentence)]


def count(sentence: str) -> int:
    return len(re.findall(r"[\w’'…·()\[\]/%°^_.−+=×≤≥→←-]*\w[^\s]*", sentence))


EACH = over("page", [*(page for page in PAGES if page.name not in ("log.md", "CHANGELOG.md")), BENCHMARKS])


@EACH
def test_sentences_are_short(page):
    sentences = prose(page.read_text())
    lengths = [count(sentence) for sentence in sentences]
    assert not [sentence for sentence, length in zip(sentences, lengths) if length > LONGEST]
    assert statistics.mean(lengths) <= MEAN


@EACH
def test_no_sentence_on_a_page_is_a_puzzle(page):
    found = [
        f"{instead}: {sentence}"
        for sentence in prose(page.read_text())
        for puzzle, instead in PUZZLES.items()
        if re.search(puzzle, sentence.lower())
    ]
    assert not found, "\n".join(found)


# The files below src/thinwire whose docstrings are checked for the same patterns.
CODE = """
checkpoint.py cli/**/*.py codecs/*.py comm/**/*.py data_ledger/*.py decoupled/*.py elastic/*.py exchange/*.py integrations/*.py jobs/*.py
kernels/*.py lm/*.py membership/**/*.py methods/*.py pieces/*.py plan/*.py recipes/*.py records/*.py report/**/*.py runtime/*.py
simulate/*.py testing/*.py topology/*.py
"""


@over("pattern", CODE.split())
def test_no_docstring_is_a_puzzle(pattern):
    files = sorted((ROOT / "src/thinwire").glob(pattern))
    found = [
        f"{file.name}: {instead}: {sentence}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for sentence in prose(re.split(r"\n\n(?:Args|Raises):\n", ast.get_docstring(node) or "")[0])
        for puzzle, instead in PUZZLES.items()
        if re.search(puzzle, sentence.lower())
    ]
    assert files and not found, "\n".join(found)


def test_puzzling_sentences_are_found():
    page = "Who differs is refused. Of heads there is one.\n\n```bash\nwho is there\n```\n\n- A group, for it is small."
    sentences = prose(page)
    assert len(sentences) == 3
    assert all(any(re.search(puzzle, sentence.lower()) for puzzle in PUZZLES) for sentence in sentences)
    assert count("one two `three` four-five 6 %") >= 5
    assert count(prose("word " * 41 + ".")[0]) > LONGEST
