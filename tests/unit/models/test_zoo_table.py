"""The page of families has each family's result, as the zoo expects it."""

import re
from pathlib import Path

from tests.zoo import FAMILIES
from tests.zoo_table import Proofs, line_of, table

PAGE = Path(__file__).parents[3] / "rlctl" / "models" / "FAMILIES.md"


def test_the_page_of_families_has_a_row_of_each_with_the_result_that_the_zoo_expects() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    results = {cells[0].strip(): cells[-1].strip() for cells in rows}
    for name, family in FAMILIES.items():
        expected = family.refused.replace("on a CPU vLLM .* fails", "the engine") or "trains"
        assert re.search(expected, results[name]), f"{name}: {results[name]}"


def test_a_row_has_the_figures_of_its_proofs_and_no_path() -> None:
    figures = {"alone/max_abs_diff": 1.23e-6, "trainer = engine/token_mult_prob_error": 1.0000012}
    proofs = Proofs(["4 experts", "ties"], figures, served=True, exported=False, two_ranks=True)
    assert line_of("llama", proofs) == (
        "| llama | 4 experts, ties | 1.2e-06 |  |  | 1.000001 | yes | NO | yes |  | trains |"
    )
    proofs.refused = (
        "/tmp/a/b is a qwen3_next model; on a CPU vLLM 0.32 fails: it stops; use a GPU, where the probe judges"
    )
    assert line_of("qwen3_next", proofs).endswith("| the engine: it stops |")


def test_a_page_names_its_day_and_versions_and_families_that_were_not_run(tmp_path: Path) -> None:
    (tmp_path / "llama.json").write_text('{"facts": ["ties"], "two_ranks": true}')
    page = table(tmp_path)
    assert f"It proved 1 of the {len(FAMILIES)} families" in page and re.search(r"on \d+ \w+ 20\d\d: torch 2\.", page)
    assert "| llama | ties |  |  |  |  |  |  | yes |  | trains |" in page.splitlines()
    assert "| qwen2 |  |  |  |  |  |  |  |  |  | not in this run; expected: trains |" in page.splitlines()
