"""`configs/README.md` equals the schema and the default files, and its table of contents leads to every section."""

import re

from rlctl.config.builtin import CONFIGS
from rlctl.config.cluster_schema import CLUSTER_KINDS
from rlctl.config.fields import schema_keys
from rlctl.config.key_reference import reference
from rlctl.config.schema import KINDS

# Values and keys that begin a sentence, as they are written in a config.
FIRST_WORDS = ("auto", "staged", "clip_low,", "tensorboard,")


def test_the_page_is_not_old() -> None:
    """Else: rlctl config reference > configs/README.md."""
    assert (CONFIGS / "README.md").read_text() == reference()


def test_every_key_has_a_row_or_a_heading() -> None:
    page = reference()
    for kind in (*KINDS.values(), *CLUSTER_KINDS.values()):
        for key, _ in schema_keys(kind):
            name = key.rpartition(".")[2]
            # A row of a section within a named one has both names.
            has_row = f"| `{name}` |" in page or f".{name}` |" in page
            assert has_row or f"# {key}\n" in page, key


def test_every_meaning_is_whole_sentences() -> None:
    for kind in (*KINDS.values(), *CLUSTER_KINDS.values()):
        for key, spec in schema_keys(kind):
            doc = spec.metadata["doc"]
            assert doc.endswith("."), key
            assert doc[0].isupper() or doc[0] in "[~" or doc.split()[0] in FIRST_WORDS, key


def _read_contents(page: str) -> list[tuple[str, str, list[str]]]:
    """Return (section, anchor, keys) of each link of the table of contents."""
    table = page.partition("## Where to begin\n")[2].partition("\n## ")[0]
    links = re.findall(r"\[([\w. ]+)\]\(#([\w-]+)\)(?:: ([`\w, ]+))?", table)
    return [(section, anchor, re.findall(r"`(\w+)`", keys)) for section, anchor, keys in links]


def test_the_table_of_contents_has_every_section() -> None:
    page = reference()
    headings = re.findall(r"(?m)^##+ (.+)$", page)
    assert set(headings) - {section for section, _, _ in _read_contents(page)} == {"Where to begin", "A recipe"}


def test_a_link_of_the_table_of_contents_leads_to_its_section() -> None:
    page = reference()
    headings = re.findall(r"(?m)^##+ (.+)$", page)
    # GitHub makes the anchor of a heading without its dots.
    anchors = {heading: heading.lower().replace(".", "").replace(" ", "-") for heading in headings}
    assert [section for section, anchor, _ in _read_contents(page) if anchors.get(section) != anchor] == []


def test_a_key_of_the_table_of_contents_has_a_row_in_its_section() -> None:
    page = reference()
    tables = {part.partition("\n")[0]: part for part in re.split(r"(?m)^##+ ", page)}
    keys_without_row = []
    for section, _, keys in _read_contents(page):
        rows = set(re.findall(r"(?m)^\| `(\w+)` \|", tables[section]))
        if "`name: " in tables[section]:
            rows.add("name")
        keys_without_row += [f"{section}.{key}" for key in keys if key not in rows]
    assert keys_without_row == []
