from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.config.compose import compose
from rlctl.config.provenance import dump, plain

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
tricky = st.sampled_from(
    [
        "off",
        "1e5",
        "007",
        "1_000",
        "null",
        "~",
        "${a}",
        r"\${a}",
        r"\\${a}",
        "a: b",
        "[0-9]",
        "1:30",
        "a\x85b",
        "a\nb\n",
    ]
)
keys = st.text("abcdefghij_", min_size=1).filter(lambda key: key not in ("defaults", "rewards"))
values = st.recursive(
    scalars | tricky, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)
trees = st.dictionaries(keys, values, max_size=4)


@given(trees)
@settings(max_examples=60, deadline=None)
def test_what_is_dumped_is_read_back_unchanged(tree: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.yaml"
        path.write_text(dump(tree), encoding="utf-8")
        assert plain(compose(path, [])) == tree
