"""`configs/README.md` equals the schema and the default files."""

from rlctl.config.builtin import CONFIGS
from rlctl.config.cluster_schema import CLUSTER_KINDS
from rlctl.config.fields import schema_keys
from rlctl.config.reference import reference
from rlctl.config.schema import KINDS


def test_the_page_is_not_old() -> None:
    """Else: rlctl config reference > configs/README.md."""
    assert (CONFIGS / "README.md").read_text() == reference()


def test_every_key_has_a_row_or_a_heading() -> None:
    page = reference()
    for kind in (*KINDS.values(), *CLUSTER_KINDS.values()):
        for key, _ in schema_keys(kind):
            name = key.rpartition(".")[2]
            assert f"| `{name}` |" in page or f"# {key}\n" in page, key


def test_every_meaning_is_whole_sentences() -> None:
    for kind in (*KINDS.values(), *CLUSTER_KINDS.values()):
        for key, field in schema_keys(kind):
            doc = field.metadata["doc"]
            assert doc.endswith(".") and (doc[0].isupper() or doc[0] in "[~" or doc.split()[0] in _words(field)), key


def _words(field: object) -> tuple[str, ...]:
    """A sentence may begin with a value or a key, which is written as it is."""
    return ("auto", "staged", "clip_low,", "tensorboard,")
