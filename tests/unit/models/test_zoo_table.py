"""The page of models has each family's result, as the zoo expects it."""

from pathlib import Path

from tests.zoo import result_table


def test_the_table_of_families_is_that_of_the_zoo() -> None:
    page = Path(__file__).parents[3] / "rlctl" / "models" / "README.md"
    assert result_table() in page.read_text()
